"""What a reward manager does to rollouts: text, place and keys of rewards, groups, failures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agentgym.errors import InfraError
from agentgym.rewards.base import RewardData, RewardManager, RewardResult
from agentgym.rewards.functions import ScoreFunction
from agentgym.rewards.scorer import TOKEN_REWARDS, Scorer, make_data, with_same_components
from agentgym.rollout import Rollout
from agentgym.tokens.output import AgentLoopOutput, Span
from agentgym.types import Outcome, RolloutStatus, Task

TEXT = {1: "x=", 2: "42", 3: "y", 9: "?"}
TASK = Task(id="t", prompt="?", data={"reward_model": {"ground_truth": "42"}, "extra_info": {"index": 7}})


def decode(ids: Sequence[int]) -> str:
    return "".join(TEXT[i] for i in ids)


def segment(ids: Sequence[int], mask: Sequence[int]) -> AgentLoopOutput:
    spans = [
        Span(start=i, stop=i + 1, kind="model" if m else "environment", turn=i, weight_version=0)
        for i, m in enumerate(mask)
    ]
    logprobs = [-0.5 if m else 0.0 for m in mask]
    return AgentLoopOutput(
        prompt_ids=[9], response_ids=ids, response_mask=mask, response_logprobs=logprobs, spans=spans
    )


def rollout(*segments: AgentLoopOutput, reward: float | None = 0.0, sample: int = 0, **outcome: Any) -> Rollout:
    status = outcome.pop("status", RolloutStatus.COMPLETED)
    return Rollout(
        env_id="e",
        task_id="t",
        group="g",
        sample=sample,
        outcome=Outcome(status=status, reward=reward, **outcome),
        segments=segments,
    )


class Contains(RewardManager):
    """1.0 where the truth is in the model's own text."""

    def __init__(self) -> None:
        super().__init__(ScoreFunction("none.py"))
        self.seen: list[RewardData] = []

    async def run_single(self, data: RewardData) -> RewardResult:
        self.seen.append(data)
        return {"reward_score": float(data.ground_truth in data.solution_str), "reward_extra_info": {"n": 1, "s": "x"}}


async def test_what_a_tool_said_is_not_the_models_text() -> None:
    # C9
    manager = Contains()
    scorer = Scorer(manager, decode=decode)
    assert (await scorer.score(rollout(segment([1, 2], [1, 0])), TASK)).reward == 0.0
    assert (await scorer.score(rollout(segment([1, 2, 3], [1, 1, 0])), TASK)).reward == 1.0
    assert [data.solution_str for data in manager.seen] == ["x=", "x=\n42"]
    assert manager.seen[0].extra_info["response_str"] == "x=42"
    assert manager.seen[0].extra_info["index"] == 7


def test_the_default_place_of_a_reward_is_the_last_model_token() -> None:
    # C9, C10
    manager = Contains()
    result: RewardResult = {"reward_score": 10.0, "reward_extra_info": {}}
    assert manager.assemble(result, segment([1, 2], [1, 0])) == [10.0, 0.0]
    assert manager.assemble(result, segment([1, 2, 3], [1, 1, 0])) == [0.0, 10.0, 0.0]
    assert manager.assemble(result, segment([2, 2, 2], [0, 0, 0])) == [0.0, 0.0, 0.0]
    assert manager.assemble(result, segment([], [])) == []


async def test_the_managers_score_replaces_the_environments_and_keeps_the_rewards_of_steps() -> None:
    scorer = Scorer(Contains(), decode=decode)
    played = rollout(segment([2], [1]), reward=1.25, reward_components={"own": 1.0})
    scored = await scorer.score(played, TASK, env_score=1.0)
    assert scored.reward == 0.25 + 1.0
    assert scored.outcome.reward_components == {"own": 1.0, "n": 1.0}
    assert scored.reward_info == {"s": "x"}
    assert scored.segments[0].reward == 1.25


async def test_a_manager_may_place_rewards_on_tokens() -> None:
    from agentgym.trainer.batch import make_batch

    class Spread(Contains):
        def assemble(self, result: RewardResult, segment: AgentLoopOutput) -> Sequence[float]:
            return [0.5 * m for m in segment.response_mask]

    scored = await Scorer(Spread(), decode=decode).score(rollout(segment([1, 2, 2], [1, 0, 1])), TASK)
    assert scored.segments[0].extra_fields[TOKEN_REWARDS] == [0.5, 0.0, 0.5]
    assert make_batch([scored])["token_level_rewards"].tolist() == [[0.5, 0.0, 0.5]]


async def test_failures_are_counted_by_type_and_never_zero() -> None:
    class Fails(Contains):
        error: Exception = KeyError("truth")
        calls = 0

        async def run_single(self, data: RewardData) -> RewardResult:
            self.calls += 1
            raise self.error

    manager = Fails()
    scored = await Scorer(manager, decode=decode).score(rollout(segment([2], [1]), reward=1.0), TASK)
    assert (scored.status, scored.reward, scored.outcome.error_type) == (RolloutStatus.FAILED_ENV, None, "KeyError")
    assert "task t" in (scored.outcome.error or "")
    assert manager.calls == 1
    manager.error = InfraError("gone")
    lost = await Scorer(manager, decode=decode).score(rollout(segment([2], [1])), TASK)
    assert (lost.status, lost.reward) == (RolloutStatus.FAILED_INFRA, None)
    assert manager.calls == 3  # once more


async def test_a_scorer_that_hangs_is_given_up() -> None:
    class Hangs(Contains):
        async def run_single(self, data: RewardData) -> RewardResult:
            await asyncio.Event().wait()
            raise AssertionError

    scored = await Scorer(Hangs(), decode=decode, timeout=0.05).score(rollout(segment([2], [1])), TASK)
    assert (scored.outcome.error_type, scored.reward) == ("ScorerTimeout", None)


@pytest.mark.parametrize("value", [None, {"reward_score": float("nan")}, {"score": 1.0}, {"reward_score": "1"}])
async def test_a_result_that_is_none_is_an_error(value: Any) -> None:
    class Wrong(Contains):
        async def run_single(self, data: RewardData) -> RewardResult:
            return value  # type: ignore[no-any-return]

    scored = await Scorer(Wrong(), decode=decode).score(rollout(segment([2], [1])), TASK)
    assert (scored.reward, scored.outcome.error_type) == (None, "TypeError")


class Ranks(Contains):
    """Scores a group by the order of its lengths."""

    batched = True

    async def run_group(self, data: Sequence[RewardData]) -> Sequence[RewardResult]:
        self.seen.extend(data)
        return [{"reward_score": float(len(one.solution_str)), "reward_extra_info": {}} for one in data]


async def test_a_group_is_scored_when_its_last_rollout_has_ended() -> None:
    manager = Ranks()
    scorer = Scorer(manager, decode=decode)
    scorer.expect(["g", "g", "g"])
    late = asyncio.create_task(scorer.score(rollout(segment([1, 2], [1, 1]), sample=1), TASK))
    early = asyncio.create_task(scorer.score(rollout(segment([3], [1]), sample=0), TASK))
    await asyncio.sleep(0)
    assert not early.done()
    assert manager.seen == []
    failed = await scorer.score(rollout(status=RolloutStatus.FAILED_INFRA, reward=None, sample=2), TASK)
    assert failed.reward is None
    assert [(await task).reward for task in (early, late)] == [1.0, 5.0]
    assert [data.sample for data in manager.seen] == [0, 1]


def test_every_sample_of_a_batch_has_the_same_components() -> None:
    batch = with_same_components([rollout(reward_components={"a": 1.0}), rollout(reward_components={"b": 2.0})])
    assert [r.outcome.reward_components for r in batch] == [{"a": 1.0, "b": None}, {"a": None, "b": 2.0}]


def test_without_tokens_the_text_is_that_of_the_conversation() -> None:
    played = Rollout(
        env_id="e",
        task_id="t",
        group="g",
        sample=0,
        outcome=Outcome(status=RolloutStatus.COMPLETED, reward=None),
        conversation=[
            {"role": "user", "content": "6*7?"},
            {"role": "assistant", "content": "wait"},
            {"role": "tool", "content": "42", "name": "c", "tool_call_id": "1"},
            {"role": "assistant", "content": "so 42"},
        ],
    )
    data = make_data(played, TASK)
    assert data.solution_str == "wait\nso 42"
    assert data.extra_info["response_str"] == "wait\n42\nso 42"

"""`counter`: the tool's state, the two halves of the reward, the tasks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym import make
from agentgym.checks import check_env
from agentgym.envs.counter import Counter, CounterTool
from agentgym.errors import ConfigError
from agentgym.session import SessionManager
from agentgym.types import AssistantTurn, Message, RolloutStatus, Task, ToolCall


def add(*numbers: Any) -> AssistantTurn:
    return AssistantTurn(tool_calls=tuple(ToolCall(name="counter", arguments={"add": number}) for number in numbers))


def texts(observation: tuple[Message, ...]) -> list[Any]:
    return [message["content"] for message in observation]


def play(*turns: AssistantTurn | str, env: Counter | None = None) -> tuple[list[Any], float]:
    """What the tool says and the sum of the rewards, in the first training task."""
    env = env or Counter()
    env.reset(options={"task_id": "train-000000"})
    said, total = [], 0.0
    for turn in turns:
        observation, reward, *_ = env.step(turn)
        said += texts(observation)
        total += reward
    env.close()
    return said, total


def first() -> Task:
    return Counter().tasks("train")[0]  # from 105 to 80


def test_the_counter_goes_on_from_call_to_call_and_greets_once() -> None:
    said, _ = play(add(-9), add(4, 2), add(0))
    assert said == ["start: 105\nnow: 96", "now: 100", "now: 102", "now: 102"]


@pytest.mark.parametrize("bad", [10, -10, 1.5, "1e999", "٣", None, [1], True])
def test_a_step_out_of_range_does_not_move_the_counter(bad: Any) -> None:
    said, _ = play(add(1), add(bad), add(0))
    assert said[0] == "start: 105\nnow: 106"
    assert said[1].startswith("Error")
    assert said[2] == "now: 106"


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        ([add(-9), add(-9), add(-7), "#### 105"], 1.0),
        ([add(-9, -9, -7), "#### 105"], 1.0),
        ([add(-9), add(-9), add(-7), "#### 80"], 0.5),
        ([add(-9), add(-9), add(-7), ""], 0.5),
        ([add(0), "#### 105"], 0.5),
        (["#### 105"], 0.5),  # guessed
        ([add(0), "#### 80"], 0.0),
        (["#### ١٠٥"], 0.0),
        (["#### 1e999"], 0.0),
        (["#### " + " ".join(map(str, range(200)))], 0.0),
        (["#### " + "9" * 100_000], 0.0),
        ([""], 0.0),
    ],
)
def test_each_half_of_the_task_is_half_of_the_reward(turns: list[Any], reward: float) -> None:
    assert play(*turns)[1] == reward


def test_the_weight_of_the_counter_is_a_setting() -> None:
    turns = Counter().oracle(first())
    assert play(*turns[:-1], "", env=Counter(tool_reward_weight=0.25))[1] == 0.25
    assert play(*turns, env=Counter(tool_reward_weight=0.25))[1] == 1.0


async def test_a_limit_still_scores_the_counter() -> None:
    turns = Counter().oracle(first())
    async with SessionManager() as manager:
        async with manager.open("counter", task_id="train-000000", max_turns=len(turns) - 1) as session:
            for turn in turns[:-1]:
                await session.step(turn)
        assert manager.stats().live == 0
    assert session.outcome.status is RolloutStatus.TRUNCATED_TURNS
    assert session.outcome.reward == 0.5


async def test_sessions_do_not_see_each_other_and_leave_nothing() -> None:  # D8
    async with SessionManager() as manager:

        async def count(step: int) -> list[Any]:
            async with manager.open("counter", task_id="train-000000") as session:
                said = [texts((await session.step(add(step))).observation)[0] for _ in range(3)]
                (tool,) = session.env.tools
                assert isinstance(tool, CounterTool)
                tools.add(tool)
            return said

        tools: set[CounterTool] = set()
        said = await asyncio.gather(*(count(step) for step in range(4)))
    assert said == [[f"start: 105\nnow: {105 + s}", f"now: {105 + 2 * s}", f"now: {105 + 3 * s}"] for s in range(4)]
    (tool,) = tools
    assert not tool._values
    assert not tool._targets


@pytest.mark.parametrize("calls", [1, 3, 7])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_oracle_solves_within_the_calls(split: str, calls: int) -> None:
    env = Counter(split=split, calls=calls)
    for task in env.tasks(split)[:20]:
        env.reset(options={"task_id": task.id})
        turns = env.oracle(task)
        assert 2 <= len(turns) <= calls + 1
        results = [env.step(turn) for turn in turns]
        assert sum(result[1] for result in results) == 1.0
        assert results[-1][2]
    env.close()


def test_splits_are_disjoint_for_any_two_seeds_and_come_from_the_seed() -> None:
    prompts: dict[str, set[str]] = {"train": set(), "validation": set()}
    for seed in (0, 1, 2):
        for split, seen in prompts.items():
            tasks = Counter(seed=seed).tasks(split)
            assert len({task.id for task in tasks}) == len({task.prompt for task in tasks}) == len(tasks)
            seen |= {str(task.prompt).partition(" to ")[0] for task in tasks}
    assert not prompts["train"] & prompts["validation"]
    assert Counter(seed=1).tasks("train") == Counter(seed=1).tasks("train") != Counter(seed=2).tasks("train")
    with pytest.raises(ConfigError, match="expected 'train' or 'validation'"):
        Counter().tasks("test")


@pytest.mark.parametrize("kwargs", [{"calls": 0}, {"calls": 8}, {"train_size": 0}, {"validation_size": 10_001}])
def test_wrong_settings_are_refused(kwargs: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(kwargs))):
        Counter(**kwargs)


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=200))
def test_any_text_gets_a_normal_answer(text: str) -> None:
    env = Counter()
    env.reset(seed=1)
    assert env.step(text)[1] in (0.0, 0.5)
    env.close()


@pytest.mark.filterwarnings("error")
def test_passes_the_checks_of_gymnasium_and_agentgym() -> None:
    env = make("counter")
    gymnasium_check(env)
    env.close()
    assert [finding for finding in check_env("counter").findings if finding.level != "ok"] == []

"""`Scorer`: gives played rollouts the reward of a manager. The same in training, validation, evaluation and re-scoring.

Consumes rollouts whose session has been released, in any order; produces the same rollouts with their reward. A batched
manager waits for the last rollout of a group, failed ones included, as announced with `Scorer.expect`.
"""

from __future__ import annotations

import asyncio
import numbers
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from agentgym.errors import AgentGymError, EnvError, InfraError, boundary
from agentgym.messages import text_of
from agentgym.rewards.base import RewardData, RewardManager, RewardResult
from agentgym.rewards.functions import read_score
from agentgym.rollout import Rollout
from agentgym.tally import error_type, status_of
from agentgym.tokens.output import AgentLoopOutput
from agentgym.tool_env import ToolEnv
from agentgym.types import Task

if TYPE_CHECKING:
    from agentgym.session import Session

TOKEN_REWARDS = "token_rewards"
"""Key of a segment's ``extra_fields``: one number per response token, from a manager with an `assemble` of its own."""

ATTEMPTS = 2
"""A scorer that loses its connection is asked once more."""

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class _Group:
    """A group that is not complete yet."""

    size: int
    arrived: int = 0
    data: list[RewardData] = field(default_factory=list)
    results: asyncio.Future[dict[int, RewardResult]] | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """What was played, and what its scoring needs beside the rollout."""

    rollout: Rollout
    task: Task | None
    env_score: float | None
    """The environment's own score, which is a part of the rollout's reward; None: the rollout failed."""

    @classmethod
    def of(cls, rollout: Rollout, session: Session) -> Episode:
        """The episode of a session that has ended."""
        return cls(rollout, session.task, None if rollout.status.failed else session.terminal_score)

    async def scored(self, scorer: Scorer | None) -> Rollout:
        """The rollout with its final reward."""
        return self.rollout if scorer is None else await scorer.score(self.rollout, self.task, self.env_score)


class Scorer:
    """Applies a reward manager to rollouts.

    Args:
        manager: who scores.
        decode: token ids of a turn to text.
        timeout: seconds for one call of the manager.
    """

    def __init__(self, manager: RewardManager, *, decode: Decode | None = None, timeout: float = 300.0) -> None:
        self.manager = manager
        self.decode = decode
        self.timeout = timeout
        self._sizes: Counter[str] = Counter()
        self._groups: dict[str, _Group] = {}
        self._own_assemble = type(manager).assemble is not RewardManager.assemble

    def expect(self, groups: Iterable[str]) -> None:
        """Announce rollouts to come, each by the key of its group; a group that was not announced has one."""
        self._sizes.update(groups)

    def forget(self) -> None:
        """Drop what was announced: the rollouts were cancelled."""
        self._sizes.clear()
        self._groups.clear()

    async def score(self, rollout: Rollout, task: Task | None, env_score: float | None = None) -> Rollout:
        """The rollout with its reward: what the environment gave for its steps, and the manager's score at the end.

        A failed rollout stays as it is. Where scoring fails, the rollout becomes a failed one.

        Args:
            rollout: as played.
            task: that was played.
            env_score: the environment's own terminal score: the part of the rollout's reward that is replaced.
        """
        try:
            result = await self._result(rollout, task, env_score)
        except AgentGymError as error:
            return _failed(rollout, error)
        if result is None:
            return rollout
        steps = (rollout.reward or 0.0) - (env_score or 0.0)
        return self._scored(rollout, result, steps)

    def prepare(self, session: Session) -> None:
        """Tell the environment of an open session whether it must score the episode itself."""
        if isinstance(session.env, ToolEnv):
            style = style_of({} if session.task is None else session.task.data)
            session.env.scored_elsewhere = not self.manager.uses_env_score(style)

    async def aclose(self) -> None:
        """Close the manager."""
        await self.manager.aclose()

    async def _result(self, rollout: Rollout, task: Task | None, env_score: float | None) -> RewardResult | None:
        data = None if rollout.status.failed else make_data(rollout, task, self.decode, env_score)
        if self.manager.batched:
            return await self._in_group(rollout, data)
        if data is None:
            return None
        [result] = await self._run(lambda: _one(self.manager, data), 1, rollout.task_id)
        return result

    async def _in_group(self, rollout: Rollout, data: RewardData | None) -> RewardResult | None:
        key = rollout.group
        group = self._groups.setdefault(key, _Group(size=self._sizes.pop(key, 1)))
        if group.results is None:
            group.results = asyncio.get_running_loop().create_future()
        group.arrived += 1
        if data is not None:
            group.data.append(data)
        if group.arrived >= group.size:
            del self._groups[key]
            await self._run_group(group, rollout.task_id)
        results = await asyncio.shield(group.results)
        return None if data is None else results[data.sample]

    async def _run_group(self, group: _Group, task_id: str) -> None:
        assert group.results is not None
        data = sorted(group.data, key=lambda one: one.sample)
        try:
            results = await self._run(lambda: self.manager.run_group(data), len(data), task_id) if data else []
        except BaseException as error:
            if isinstance(error, AgentGymError):
                group.results.set_exception(error)
                group.results.exception()  # it is raised by whoever waits; with nobody waiting it is no news
                return
            group.results.cancel()
            raise
        group.results.set_result({one.sample: result for one, result in zip(data, results, strict=True)})

    async def _run(self, call: Callable[[], Any], count: int, task_id: str) -> Sequence[RewardResult]:
        """Call the manager, once more after a lost connection. Raises only errors of agentgym."""
        what = f"reward manager {type(self.manager).__name__}"
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with boundary(what, task_id=task_id):
                    return [_checked(result) for result in await self._bounded(call, what, task_id, count)]
            except InfraError:
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    async def _bounded(self, call: Callable[[], Any], what: str, task_id: str, count: int) -> Sequence[Any]:
        scope = asyncio.timeout(self.timeout)
        try:
            async with scope:
                results: Sequence[Any] = await call()
        except TimeoutError:
            if not scope.expired():
                raise
            raise EnvError(
                f"{what} took more than {self.timeout:g} s (reward.timeout)",
                task_id=task_id,
                error_type="ScorerTimeout",
            ) from None
        if len(results) != count:
            raise TypeError(f"{what} gave {len(results)} results for {count} rollouts")
        return results

    def _scored(self, rollout: Rollout, result: RewardResult, steps: float) -> Rollout:
        numeric, other = _split(result["reward_extra_info"])
        reward = steps + result["reward_score"]
        components = {**rollout.outcome.reward_components, **numeric}
        outcome = replace(rollout.outcome, reward=reward, reward_components=components)
        segments = [
            replace(segment, reward=reward, reward_components=components, extra_fields=self._fields(segment, result))
            for segment in rollout.segments
        ]
        return replace(rollout, outcome=outcome, segments=segments, reward_info={**rollout.reward_info, **other})

    def _fields(self, segment: AgentLoopOutput, result: RewardResult) -> Mapping[str, Any]:
        if not self._own_assemble:
            return segment.extra_fields
        rewards = [float(value) for value in self.manager.assemble(result, segment)]
        return {**segment.extra_fields, TOKEN_REWARDS: rewards}


async def _one(manager: RewardManager, data: RewardData) -> list[RewardResult]:
    return [await manager.run_single(data)]


def make_data(
    rollout: Rollout, task: Task | None, decode: Decode | None = None, env_score: float | None = None
) -> RewardData:
    """What a manager sees of a rollout."""
    task_data = {} if task is None else task.data
    outcome = rollout.outcome
    solution, response = texts_of(rollout, decode)
    extra = dict(task_data.get("extra_info") or {}) | {
        "response_str": response,
        "tool_rewards": list(outcome.tool_rewards),
        "turn_scores": list(outcome.turn_scores),
        "num_turns": outcome.num_turns,
        "status": str(outcome.status),
    }
    prompt = [] if task is None or isinstance(task.prompt, str) else [text_of(message) for message in task.prompt]
    return RewardData(
        data_source=rollout.data_source or ("" if task is None else task.data_source),
        solution_str=solution,
        ground_truth=ground_truth_of(task_data),
        extra_info=extra,
        style=style_of(task_data),
        prompt_str=task.prompt if task is not None and isinstance(task.prompt, str) else "\n".join(prompt),
        model_tokens=sum(segment.num_model_tokens for segment in rollout.segments),
        env_score=env_score,
        task_id=rollout.task_id,
        group=rollout.group,
        sample=rollout.sample,
    )


def style_of(task_data: Mapping[str, Any]) -> Literal["rule", "model"]:
    """Who scores the task: ``reward_model.style``, default ``rule``."""
    return "model" if _reward_model(task_data).get("style") == "model" else "rule"


def _reward_model(task_data: Mapping[str, Any]) -> Mapping[str, Any]:
    value = task_data.get("reward_model")
    return value if isinstance(value, Mapping) else {}


def ground_truth_of(task_data: Mapping[str, Any]) -> Any:
    """``reward_model.ground_truth``, else ``ground_truth``, else ``answer``, else all data of the task."""
    reward_model = _reward_model(task_data)
    for source, key in ((reward_model, "ground_truth"), (task_data, "ground_truth"), (task_data, "answer")):
        if key in source:
            return source[key]
    return dict(task_data)


def texts_of(rollout: Rollout, decode: Decode | None) -> tuple[str, str]:
    """The text of the model alone, and of model and environment after the prompt.

    From the tokens where there are any, so that it is exactly what was sampled; otherwise from the conversation.
    """
    if decode is not None and rollout.segments:
        own = [
            decode(segment.response_ids[span.start : span.stop])
            for segment in rollout.segments
            for span in segment.spans
            if span.kind == "model"
        ]
        return "\n".join(own), "\n".join(decode(segment.response_ids) for segment in rollout.segments)
    first = next((i for i, m in enumerate(rollout.conversation) if m["role"] == "assistant"), len(rollout.conversation))
    after = rollout.conversation[first:]
    own = [text_of(message) for message in after if message["role"] == "assistant"]
    return "\n".join(own), "\n".join(text_of(message) for message in after)


def with_same_components(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts with equal keys in ``reward_components``: None where a rollout has no value.

    Keys are those that any of them has; a mean over a component is over the rollouts that have it.
    """
    names = sorted({name for rollout in rollouts for name in rollout.outcome.reward_components})
    result = []
    for rollout in rollouts:
        present = rollout.outcome.reward_components
        if len(present) < len(names):
            filled = {name: present.get(name) for name in names}
            rollout = replace(rollout, outcome=replace(rollout.outcome, reward_components=filled))
        result.append(rollout)
    return result


def _checked(result: Any) -> RewardResult:
    if not isinstance(result, Mapping) or "reward_score" not in result:
        raise TypeError(f"the reward manager gave {result!r:.200}; expected reward_score and reward_extra_info")
    score = read_score(result["reward_score"])["reward_score"]
    return {"reward_score": score, "reward_extra_info": dict(result.get("reward_extra_info") or {})}


def _split(info: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    numeric = {name: float(value) for name, value in info.items() if isinstance(value, numbers.Real)}
    return numeric, {name: value for name, value in info.items() if name not in numeric}


def _failed(rollout: Rollout, error: AgentGymError) -> Rollout:
    trace = error.traceback_text if isinstance(error, EnvError) else ""
    status = status_of(error)
    outcome = replace(
        rollout.outcome,
        status=status,
        reward=None,
        error_type=error_type(error),
        error=f"{error}\n{trace}".strip(),
    )
    segments = [replace(segment, reward=None, status=status) for segment in rollout.segments]
    return replace(rollout, outcome=outcome, segments=segments)

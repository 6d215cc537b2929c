"""What a reward manager is given and what it gives back; how managers are found by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypedDict

from agentgym.plugins import scan
from agentgym.registry import Registry
from agentgym.rewards.functions import ScoreFunction
from agentgym.tokens.output import AgentLoopOutput


class RewardResult(TypedDict):
    """What a manager gives back for one rollout."""

    reward_score: float
    """Replaces the terminal score of the environment."""
    reward_extra_info: Mapping[str, Any]
    """Numbers become reward components; anything else is written beside the rollout. The same keys for every one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardData:
    """One rollout to score. Plain data: it may be sent to another process."""

    data_source: str
    solution_str: str
    """The text of the model alone (mask 1), turns separated by a newline."""
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """The row's, and ``response_str`` (the text of model and environment), ``tool_rewards``, ``turn_scores``,
    ``num_turns``, ``status``."""
    style: Literal["rule", "model"] = "rule"
    prompt_str: str = ""
    """Text of the first prompt's messages."""
    model_tokens: int = 0
    """Tokens that the model sampled."""
    env_score: float | None = None
    """The environment's own terminal score, where it was asked for it (`RewardManager.uses_env_score`)."""
    task_id: str = ""
    group: str = ""
    sample: int = 0


class RewardManager(ABC):
    """Scores rollouts. One object lives in each process that plays them, and serves all of its rollouts at once.

    Args:
        function: what ``reward.path`` names; calling it gives the environment's own score where nothing is named.
        options: a manager takes its ``reward.options`` as keyword arguments.

    Example:
        >>> @register_reward_manager("halved")
        ... class Halved(RewardManager):
        ...     async def run_single(self, data):
        ...         result = await self.function(data)
        ...         return {**result, "reward_score": result["reward_score"] / 2}
    """

    batched: ClassVar[bool] = False
    """True: `run_group` is called with all rollouts of a group when the last of them has been played."""

    def __init__(self, function: ScoreFunction) -> None:
        self.function = function

    @abstractmethod
    async def run_single(self, data: RewardData) -> RewardResult:
        """Score one rollout. Whatever is raised counts as a failure of that rollout, never as a score of 0."""

    async def run_group(self, data: Sequence[RewardData]) -> Sequence[RewardResult]:
        """Score the rollouts of a group, in order; only where `batched`."""
        return [await self.run_single(one) for one in data]

    def assemble(self, result: RewardResult, segment: AgentLoopOutput) -> Sequence[float]:
        """Where the reward stands in a segment: one number per response token, 0.0 where the model did not sample.

        The scalar stands at the last token of the model; a segment without one carries none. Override it to reward
        single tokens; their sum is what the segment counts in a baseline.
        """
        rewards = [0.0] * len(segment.response_mask)
        last = max((position for position, mask in enumerate(segment.response_mask) if mask), default=None)
        if last is not None:
            rewards[last] = result["reward_score"]
        return rewards

    def uses_env_score(self, style: str) -> bool:
        """Whether the environment must score the episode itself, for a task of that style."""
        return self.function.own

    async def aclose(self) -> None:  # noqa: B027 - most managers hold nothing
        """Give back what the manager holds. Idempotent."""


reward_managers: Registry[type[RewardManager]] = Registry("reward manager", scan)
register_reward_manager = reward_managers.decorator

for _name, _target in {
    "naive": "agentgym.rewards.naive:NaiveManager",
    "batch": "agentgym.rewards.batch:BatchManager",
    "parallel": "agentgym.rewards.parallel:ParallelManager",
    "composite": "agentgym.rewards.composite:CompositeManager",
    "dapo": "agentgym.rewards.dapo:DapoManager",
    "remote": "agentgym.rewards.remote:RemoteManager",
    "model": "agentgym.rewards.model:ModelManager",
}.items():
    reward_managers.register(_name, _target)

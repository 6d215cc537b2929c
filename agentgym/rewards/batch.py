"""``reward.manager=batch``: one call for all rollouts of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from agentgym.errors import ConfigError
from agentgym.rewards.base import RewardData, RewardManager, RewardResult
from agentgym.rewards.functions import PLURAL, ScoreFunction, arguments_of, read_score


class BatchManager(RewardManager):
    """``compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs)`` gives a list of scores.

    It is called when all rollouts of a group have been played; those that failed are left out.
    """

    batched: ClassVar[bool] = True

    def __init__(self, function: ScoreFunction) -> None:
        super().__init__(function)
        if function.own:
            raise ConfigError("reward.manager=batch needs a function that scores a group: set reward.path")
        function.check(PLURAL)

    async def run_single(self, data: RewardData) -> RewardResult:
        [result] = await self.run_group([data])
        return result

    async def run_group(self, data: Sequence[RewardData]) -> Sequence[RewardResult]:
        rows = [arguments_of(one) for one in data]
        values: Any = await self.function.call({f"{name}s": [row[name] for row in rows] for name in rows[0]})
        listed = list(values)
        if len(listed) != len(rows):
            raise TypeError(f"the batch reward function returned {len(listed)} scores for {len(rows)} rollouts")
        return [read_score(value) for value in listed]

"""``reward.manager=naive``: the reward function, once per rollout."""

from __future__ import annotations

from agentgym.rewards.base import RewardData, RewardManager, RewardResult
from agentgym.rewards.functions import ScoreFunction


class NaiveManager(RewardManager):
    """Calls the reward function for each rollout, as soon as it has been played."""

    def __init__(self, function: ScoreFunction) -> None:
        super().__init__(function)
        function.check()

    async def run_single(self, data: RewardData) -> RewardResult:
        return await self.function(data)

"""``reward.manager=dapo``: the reward function, and a soft penalty for answers that come near the length limit."""

from __future__ import annotations

from agentgym.errors import ConfigError
from agentgym.rewards.base import RewardData, RewardManager, RewardResult
from agentgym.rewards.functions import ScoreFunction
from agentgym.rewards.overlong import overlong_penalty


class DapoManager(RewardManager):
    """Adds `overlong_penalty` to the score; components ``score`` and ``overlong``.

    Args:
        function: the score; the environment's own one without ``reward.path``.
        max_length: model tokens; default: ``rollout.max_response_length``.
        buffer: the penalty grows over the last so many tokens.
        factor: penalty at ``max_length``.
    """

    def __init__(
        self,
        function: ScoreFunction,
        *,
        max_length: int | None = None,
        buffer: int = 256,
        factor: float = 1.0,
        max_response_length: int | None = None,
    ) -> None:
        super().__init__(function)
        function.check()
        length = max_length if max_length is not None else max_response_length
        if length is None:
            raise ConfigError("reward.manager=dapo needs reward.options.max_length: model tokens of the longest answer")
        if not 1 <= buffer <= length:
            raise ConfigError(f"reward.options.buffer={buffer}: expected 1 to {length} tokens (max_length)")
        self.max_length, self.buffer, self.factor = length, buffer, factor

    async def run_single(self, data: RewardData) -> RewardResult:
        result = await self.function(data)
        penalty = overlong_penalty(
            data.model_tokens, max_length=self.max_length, buffer=self.buffer, factor=self.factor
        )
        info = {**result["reward_extra_info"], "score": result["reward_score"], "overlong": penalty}
        return {"reward_score": result["reward_score"] + penalty, "reward_extra_info": info}

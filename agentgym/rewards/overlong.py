"""Reward shaping by length."""

from __future__ import annotations

from agentgym.errors import ConfigError


def overlong_penalty(model_tokens: int, *, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """``min(-(len - (max_length - buffer)) / buffer * factor, 0)``, to be added to the reward (DAPO, Yu et al. 2025).

    Args:
        model_tokens: response length counted in mask-1 tokens, neither the span nor the number of turns.
        max_length, buffer: in model tokens; the penalty starts at ``max_length - buffer``.
        factor: penalty at ``max_length``.

    Example:
        9 model tokens, ``max_length=10``, ``buffer=4``: -0.75.
    """
    if buffer < 1:
        raise ConfigError(f"overlong buffer is {buffer}, expected at least 1 model token")
    return min(-(model_tokens - (max_length - buffer)) / buffer * factor, 0.0)

"""Reward shaping by length; the formula is the core's, which scores rollouts."""

from agentgym.rewards.overlong import overlong_penalty

__all__ = ["overlong_penalty"]

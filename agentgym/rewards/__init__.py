"""Who scores a rollout, where the environment's own score does not do: reward functions and reward managers."""

from agentgym.rewards.base import RewardData, RewardManager, RewardResult, register_reward_manager, reward_managers
from agentgym.rewards.functions import ScoreFunction

__all__ = [
    "RewardData",
    "RewardManager",
    "RewardResult",
    "ScoreFunction",
    "register_reward_manager",
    "reward_managers",
]

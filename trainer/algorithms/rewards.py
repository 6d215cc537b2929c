"""Where a rollout's reward stands in its token sequence, and which tokens are trained."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.trainer.algorithms.masked import select


def place_rewards(scores: Sequence[float | None] | Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Put each row's score on its last model token.

    Args:
        scores: [B], one per row; None or NaN: not scorable (failed, cancelled).
        response_mask: [B, T].

    Returns:
        token_level_rewards: [B, T] float32; all 0 in a row without a model token or without a score.
        valid: [B] bool, False for those rows; ``(~valid).sum()`` is the number to report.

    Example:
        scores ``[1.0]``, mask ``[[1, 1, 0]]`` (a tool token last): ``[[0, 1, 0]]``.
    """
    mask = response_mask.bool()
    score = torch.tensor([math.nan if s is None else float(s) for s in scores], dtype=torch.float32).to(mask.device)
    if score.shape != mask.shape[:1]:
        raise ConfigError(f"{len(score)} scores for {len(mask)} rows of the response mask; give one per row")
    valid = score.isfinite() & mask.any(-1)
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return select(score[:, None].expand(mask.shape), last & valid[:, None]), valid


def place_turn_rewards(turn_rewards: Sequence[Sequence[float]], turn_index: Tensor, response_mask: Tensor) -> Tensor:
    """Put each turn's reward on the turn's last model token, for the ``turn_level`` estimator.

    Args:
        turn_rewards: per row, the reward of turn 0, 1, ...; turns without a model token in the row are left out.
        turn_index: [B, T] int, turn of each token.
        response_mask: [B, T].

    Returns:
        [B, T] float32 token rewards.
    """
    mask = response_mask.bool()
    rewards = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    for row, of_turns in enumerate(turn_rewards):
        for turn, reward in enumerate(of_turns):
            tokens = (mask[row] & (turn_index[row] == turn)).nonzero()
            if len(tokens):
                rewards[row, tokens[-1]] = reward
    return rewards


def mask_truncated(truncated: Tensor, response_mask: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Both masks with the truncated rows cleared (``config.mask_truncated``), so that no loss, KL, entropy or length
    counts them.

    Call it **after** the advantages: a truncated rollout's reward stays in its group's baseline.

    Args:
        truncated: [B] bool.
        response_mask, loss_mask: [B, T].
    """
    kept = ~truncated.bool().to(response_mask.device)[:, None]
    return response_mask * kept, loss_mask * kept

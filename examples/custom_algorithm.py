"""An advantage and a policy loss of your own, in one file.

    agentgym train env=calculator-math plugins=examples/custom_algorithm.py algo.advantage=best-only \
        algo.policy_loss=pull

``algo.extra_fields=[a,b]`` hands both of them further arguments by name: fields of the batch, or what an agent loop, a
scorer or the episode's metrics left on the rollout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agentgym.trainer.algorithms import aggregate_loss, register_advantage, register_policy_loss


@register_advantage("best-only")
def best_only(rewards: Tensor, mask: Tensor, index: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """1 on the tokens of a prompt's best samples where another one is worse, 0 elsewhere. All arguments: [B, T]."""
    score = (rewards * mask).sum(-1)
    same = index[:, None] == index[None, :]
    best = score == torch.where(same, score[None, :], -torch.inf).max(-1).values
    worst = score == torch.where(same, score[None, :], torch.inf).min(-1).values
    advantages = mask * (best & ~worst).float()[:, None]
    return advantages, advantages


@register_policy_loss("pull")
def pull(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: Any,
    config: Any,
    rollout_is_weights: Tensor | None = None,
    *,
    loss_mask: Tensor | None = None,
    totals: Any = None,
    **_: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-likelihood weighted by the advantage. ``totals`` makes the loss the same for every split of the batch."""
    loss = aggregate_loss(-log_prob * advantages, response_mask, "token-mean", loss_mask=loss_mask, totals=totals)
    return loss, {"pulled": (advantages > 0).float().mean()}

"""Turn-level credit: each turn is compared with the same turn of the group's other rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.trainer.algorithms.config import AlgorithmConfig
from agentgym.trainer.algorithms.grouping import GroupScores, RolloutScores, rollout_scores
from agentgym.trainer.algorithms.masked import working
from agentgym.trainer.algorithms.scan import Packed, suffix_sums

if TYPE_CHECKING:
    from agentgym.trainer.algorithms.registry import Labels


@torch.no_grad()
def turn_level(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    *,
    valid: Tensor | None = None,
    rollout: Labels | None = None,
    turn_index: Tensor | None = None,
    config: AlgorithmConfig,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Reward-to-go over turns (no discount), normalised per group and turn, on all model tokens of the turn.

    A turn that only one rollout of the group has gets 0. ``config.norm_by_std`` as in grpo. A turn that several
    segments of a rollout hold counts once, with their mean.

    Arguments and results: `AdvantageFn`. Returns are the rewards-to-go of the turns. Raises `ConfigError` without
    ``turn_index``.
    """
    if turn_index is None:
        raise ConfigError("advantage 'turn_level' needs turn_index [B, T], the turn of each token; got None")
    rollouts = rollout_scores(token_level_rewards, response_mask, index, valid=valid, rollout=rollout)
    mask, owner = rollouts.mask, rollouts.rollout
    turns, turn = torch.unique(turn_index.to(mask.device)[mask], return_inverse=True)
    row = mask.nonzero()[:, 0]
    shape = (len(mask), len(turns))
    reward = working(token_level_rewards)[mask].double()
    per_turn = torch.zeros(shape, dtype=torch.float64, device=mask.device).index_put_(
        (row, turn), reward, accumulate=True
    )
    present = torch.zeros(shape, dtype=torch.bool, device=mask.device).index_put_(
        (row, turn), torch.tensor(True, device=mask.device)
    )
    to_go = suffix_sums(per_turn, 1.0)

    advantages = _normalised(rollouts, to_go, present, config.norm_by_std).to(mask.device)
    packed = Packed.of(mask)
    of_tokens = (advantages[owner[row], turn], to_go[row, turn])
    return packed.spread(of_tokens[0].to(rollouts.dtype)), packed.spread(of_tokens[1].to(rollouts.dtype))


def _normalised(rollouts: RolloutScores, to_go: Tensor, present: Tensor, norm_by_std: bool) -> Tensor:
    """[R, K] advantage of each turn of each rollout, from [B, K] rewards-to-go and which row has which turn."""
    taken = rollouts.rollout >= 0
    owner, group = rollouts.rollout[taken].cpu(), rollouts.scores.group
    present, to_go = present[taken].cpu().double(), to_go[taken].cpu()
    number, turns = len(group), to_go.shape[1]
    segments = to_go.new_zeros(number, turns).index_add(0, owner, present)
    mean = to_go.new_zeros(number, turns).index_add(0, owner, to_go * present) / segments.clamp(min=1)
    exists = segments > 0
    label = group[:, None] * turns + torch.arange(turns)
    scores = GroupScores(mean[exists], label[exists])
    return torch.zeros_like(mean).masked_scatter(exists, scores.standardised(norm_by_std))

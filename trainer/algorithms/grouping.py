"""Group baselines: scores of rollouts, centred and scaled within their group."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.trainer.algorithms.filtering import EQUAL_REWARDS
from agentgym.trainer.algorithms.masked import select, working

if TYPE_CHECKING:
    from agentgym.trainer.algorithms.registry import Labels

STD_EPS = 1e-6


def codes(labels: Sequence[Hashable]) -> Tensor:
    """[N] int64: equal labels get equal numbers, from 0 in order of appearance."""
    seen: dict[Hashable, int] = {}
    return torch.tensor([seen.setdefault(label, len(seen)) for label in labels], dtype=torch.long)


def as_list(labels: Labels, rows: int, what: str) -> list[Hashable]:
    """Labels of any kind as a list of ``rows`` hashables."""
    result: list[Hashable] = list(labels) if isinstance(labels, Sequence) else labels.tolist()
    if len(result) != rows:
        raise ConfigError(f"{what} has {len(result)} labels for {rows} rows; give one per row")
    return result


@dataclass(frozen=True)
class GroupScores:
    """N scores, each with a group; all statistics in float64.

    Scores are shifted by the group's smallest before the mean is taken (two passes), and a group whose scores are equal
    to 1e-6 relative is centred to exactly 0: in float32, dividing rounding noise by a tiny deviation gave up to 0.19.
    """

    score: Tensor
    """[N] float64, finite."""
    group: Tensor
    """[N] int64 >= 0; not every number need occur."""

    @cached_property
    def count(self) -> Tensor:
        """[N] size of the group that each score belongs to."""
        return self._total(torch.ones_like(self.score))

    @cached_property
    def informative(self) -> Tensor:
        """[N] bool: the group has at least two scores, and they differ."""
        low, high = self._extreme("amin", self.score), self._extreme("amax", self.score)
        return high - low > EQUAL_REWARDS * torch.maximum(low.abs(), high.abs())

    def centred(self, weight: Tensor | None = None) -> Tensor:
        """[N] score minus the group's mean, weighted if a weight [N] > 0 is given; 0 where not informative."""
        shifted = self.score - self._extreme("amin", self.score)
        weight = torch.ones_like(shifted) if weight is None else weight
        mean = self._total(weight * shifted) / self._total(weight)
        return select(shifted - mean, self.informative)

    @cached_property
    def std(self) -> Tensor:
        """[N] unbiased standard deviation of the group; 0 where not informative."""
        return (self._total(self.centred().square()) / (self.count - 1).clamp(min=1)).sqrt()

    def standardised(self, norm_by_std: bool) -> Tensor:
        """[N] centred, and divided by ``std + 1e-6`` if asked for."""
        return self.centred() / (self.std + STD_EPS) if norm_by_std else self.centred()

    def margin(self) -> Tensor:
        """[N] lead of the group's best over its second; 0 on all others, and where the best score occurs twice."""
        best = self.score == self._extreme("amax", self.score)
        second = self._extreme("amax", self.score.masked_fill(best, -torch.inf))
        alone = self._total(best.double()) == 1
        return select(self.score - second, best & alone & self.informative)

    def _total(self, x: Tensor) -> Tensor:
        return x.new_zeros(self._groups).index_add(0, self.group, x)[self.group]

    def _extreme(self, reduce: str, x: Tensor) -> Tensor:
        return x.new_zeros(self._groups).scatter_reduce(0, self.group, x, reduce, include_self=False)[self.group]

    @property
    def _groups(self) -> int:
        return int(self.group.max()) + 1 if len(self.group) else 0


@dataclass(frozen=True)
class RolloutScores:
    """The rollouts of a batch as scores: segments merged, rows that take no part left out."""

    scores: GroupScores
    """Of R rollouts."""
    length: Tensor
    """[R] float64, model tokens over all segments."""
    rollout: Tensor
    """[B] int64, rollout of each row; -1 for a row that takes no part."""
    mask: Tensor
    """[B, T] bool, the response mask without the rows that take no part."""
    dtype: torch.dtype

    def to_tokens(self, per_rollout: Tensor) -> Tensor:
        """[B, T]: the number of each rollout on all its model tokens."""
        if len(per_rollout) == 0:
            return torch.zeros(self.mask.shape, dtype=self.dtype, device=self.mask.device)
        rows = per_rollout.to(self.dtype).to(self.mask.device)[self.rollout.clamp(min=0)]
        return select(rows[:, None].expand(self.mask.shape), self.mask)


def rollout_scores(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    *,
    valid: Tensor | None = None,
    rollout: Labels | None = None,
) -> RolloutScores:
    """Sum each row's rewards over its model tokens and merge segments (their mean), on the CPU.

    Shapes as in `AdvantageFn`.
    """
    mask = response_mask.bool()
    rewards = select(working(token_level_rewards), mask)
    row_score = rewards.double().sum(-1)
    rows = mask.any(-1) & row_score.isfinite()
    if valid is not None:
        rows = rows & valid.bool().to(rows.device)
    taken = rows.nonzero().flatten().tolist()
    groups = as_list(index, len(mask), "index")
    rollouts = list(range(len(mask))) if rollout is None else as_list(rollout, len(mask), "rollout")
    # A label such as 0..n-1 may repeat in another group, so a rollout is known by group and label.
    code = codes([(groups[i], rollouts[i]) for i in taken])
    segments = torch.bincount(code).double()
    number = len(segments)

    def total(x: Tensor) -> Tensor:
        return torch.zeros(number, dtype=torch.float64).index_add(0, code, x)

    first = {int(c): groups[i] for c, i in reversed(list(zip(code, taken, strict=True)))}
    score = total(row_score[rows].cpu()) / segments
    row_rollout = torch.full((len(mask),), -1)
    row_rollout[taken] = code
    return RolloutScores(
        scores=GroupScores(score, codes([first[r] for r in range(number)])),
        length=total(mask.sum(-1)[rows].double().cpu()),
        rollout=row_rollout.to(mask.device),
        mask=mask & rows[:, None],
        dtype=rewards.dtype,
    )

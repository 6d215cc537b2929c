"""Discounted sums over the model's tokens, without a Python loop over time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentgym.trainer.algorithms.masked import working

BLOCK = 64


@dataclass(frozen=True)
class Packed:
    """The model tokens of a batch: as rows [B, K] without gaps, or in one line [N].

    Observation tokens are cut out before anything is computed, so they cannot matter.

    Example:
        mask ``[[1, 0, 1, 0]]``: ``rows([[5, 9, 6, 9]])`` is ``[[5, 6]]``, ``line([[5, 6]])`` is ``[5, 6]``, and
        ``spread([5, 6])`` is ``[[5, 0, 6, 0]]``.
    """

    shape: torch.Size
    """(B, T)."""
    packed_shape: torch.Size
    """(B, K), K = most model tokens in a row."""
    source: Tensor
    """[N] flat positions of the model tokens in [B, T]."""
    target: Tensor
    """[N] flat positions of the same tokens in [B, K]."""

    @classmethod
    def of(cls, mask: Tensor) -> Packed:
        """Of a bool mask [B, T]."""
        counts = mask.sum(-1, keepdim=True)
        longest = int(counts.max()) if counts.numel() else 0
        filled = torch.arange(longest, device=mask.device) < counts
        return cls(mask.shape, filled.shape, mask.flatten().nonzero().squeeze(1), filled.flatten().nonzero().squeeze(1))

    def rows(self, x: Tensor) -> Tensor:
        """[B, T] to [B, K], zeros at the right end."""
        return _place(x.flatten().index_select(0, self.source), self.target, self.packed_shape)

    def line(self, x: Tensor) -> Tensor:
        """[B, K] to [N]."""
        return x.flatten().index_select(0, self.target)

    def spread(self, x: Tensor) -> Tensor:
        """[N] to [B, T], zeros outside the mask."""
        return _place(x, self.source, self.shape)


def _place(x: Tensor, where: Tensor, shape: torch.Size) -> Tensor:
    # Flat index_select and scatter: indexing with boolean masks takes ten times as long.
    return x.new_zeros(shape.numel()).scatter_(0, where, x).view(shape)


def pack(mask: Tensor, valid: Tensor | None, *tensors: Tensor) -> tuple[Packed, list[Tensor]]:
    """Cut the model tokens of each tensor [B, T] out into rows [B, K], in float32 or better.

    Rows that are not valid [B], or hold a number that is not finite on a model token, lose all their tokens.
    """
    mask = mask.bool()
    if valid is not None:
        mask = mask & valid.bool().to(mask.device)[:, None]
    packed = Packed.of(mask)
    rows = [packed.rows(working(x)) for x in tensors]
    finite = torch.stack([x.sum(-1).isfinite() for x in rows]).all(0)
    return (packed, rows) if bool(finite.all()) else pack(mask, finite, *tensors)


def suffix_sums(x: Tensor, factor: float) -> Tensor:
    """``y[:, i] = sum over j >= i of factor**(j - i) * x[:, j]`` for x [B, K] and a factor in 0..1.

    In blocks: within a block a product with a triangular matrix, over the blocks' totals the same again. Every power is
    at most 1, so nothing is ever divided by a vanishing one.
    """
    if factor == 1.0:
        return x.flip(-1).cumsum(-1).flip(-1)
    rows, length = x.shape
    blocks = -(-length // BLOCK)
    padded = x.new_zeros(rows, blocks * BLOCK)
    padded[:, :length] = x
    step = torch.arange(BLOCK, dtype=x.dtype, device=x.device)
    distance = step[:, None] - step[None, :]
    powers = torch.where(distance >= 0, factor ** distance.clamp(min=0), 0.0)
    sums = padded.view(rows, blocks, BLOCK) @ powers
    if blocks > 1:
        starts = suffix_sums(sums[:, :, 0], factor**BLOCK)
        sums[:, :-1] += starts[:, 1:, None] * factor ** (BLOCK - step)
    return sums.view(rows, blocks * BLOCK)[:, :length]

"""Discounted sums over the model's tokens, without a Python loop over time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentgym.trainer.algorithms.masked import working

BLOCK = 64


@dataclass(frozen=True)
class Packed:
    """The model tokens of a batch, in one line [N] or as rows without gaps [B, K], K = most model tokens in a row.

    Observation tokens are cut out before anything is computed, so they cannot matter.

    Example:
        mask ``[[1, 0, 1], [0, 1, 0]]``: ``take([[5, 9, 6], [9, 7, 9]])`` is the line ``[5, 6, 7]``, its ``rows`` are
        ``[[5, 6], [7, 0]]``, its ``following`` is ``[6, 0, 0]`` and its ``spread`` is ``[[5, 0, 6], [0, 7, 0]]``.
    """

    shape: torch.Size
    """(B, T)."""
    counts: Tensor
    """[B] model tokens of each row."""
    source: Tensor
    """[N] flat positions of the model tokens in [B, T]."""
    target: Tensor
    """[N] flat positions of the same tokens in [B, K]."""
    longest: int
    """K."""

    @classmethod
    def of(cls, mask: Tensor) -> Packed:
        """Of a bool mask [B, T]."""
        counts = mask.sum(-1)
        longest = int(counts.max()) if counts.numel() else 0
        source = mask.flatten().nonzero().squeeze(1)
        gaps = longest * torch.arange(len(counts), device=mask.device) - (counts.cumsum(0) - counts)
        target = torch.arange(len(source), device=mask.device) + gaps.repeat_interleave(counts)
        return cls(mask.shape, counts, source, target, longest)

    # index_select and scatter on flat tensors: indexing with boolean masks takes ten times as long.

    def take(self, x: Tensor) -> Tensor:
        """[B, T] to [N]."""
        return x.flatten().index_select(0, self.source)

    def spread(self, line: Tensor) -> Tensor:
        """[N] to [B, T], zeros outside the mask."""
        return line.new_zeros(self.shape.numel()).scatter_(0, self.source, line).view(self.shape)

    def rows(self, line: Tensor) -> Tensor:
        """[N] to [B, K], zeros at the right end."""
        size = len(self.counts) * self.longest
        return line.new_zeros(size).scatter_(0, self.target, line).view(len(self.counts), self.longest)

    def line(self, rows: Tensor) -> Tensor:
        """[B, K] to [N]."""
        return rows.flatten().index_select(0, self.target)

    def following(self, line: Tensor) -> Tensor:
        """[N] what the next model token of the same row holds; 0 at the last one."""
        shifted = torch.nn.functional.pad(line[1:], (0, 1))[: len(line)]
        shifted[self.counts.cumsum(0)[self.counts > 0] - 1] = 0.0
        return shifted


def pack(mask: Tensor, valid: Tensor | None, *tensors: Tensor) -> tuple[Packed, list[Tensor]]:
    """Cut the model tokens out of each tensor [B, T], into lines [N] in float32 or better.

    Rows that are not valid [B], or hold a number that is not finite on a model token, lose all their tokens.
    """
    mask = mask.bool()
    if valid is not None:
        mask = mask & valid.bool().to(mask.device)[:, None]
    packed = Packed.of(mask)
    lines = [packed.take(working(x)) for x in tensors]
    if all(bool(x.sum().isfinite()) for x in lines):
        return packed, lines
    finite = torch.ones(len(mask), dtype=torch.bool, device=mask.device)
    for x in lines:
        finite[packed.source[~x.isfinite()] // mask.shape[1]] = False
    packed = Packed.of(mask & finite[:, None])
    return packed, [packed.take(working(x)) for x in tensors]


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

"""What prompts and rows have in common, so that it is computed once, and read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]

MIN_SHARED = 16
"""Shorter common prefixes are computed again: copying and an extra forward would cost more."""


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Number of equal tokens at the start of two sequences."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    first = int(different.argmax()) if n else 0
    return first if n and different[first] else n


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """Prompts (by index) with their first ``length`` tokens in common; the first one computes them."""

    members: tuple[int, ...]
    length: int


def shared_groups(prompts: Sequence[Tokens]) -> list[SharedGroup]:
    """Split different prompts into groups that share at least `MIN_SHARED` tokens; single ones are left out.

    Sorted prompts that share a prefix are neighbours, so one pass finds the groups. The result depends on the
    prompts and their order alone.
    """
    groups: list[list[int]] = []
    lengths: list[int] = []
    for current in sorted(range(len(prompts)), key=lambda i: prompts[i].tolist()):
        shared = common_prefix(prompts[groups[-1][-1]], prompts[current]) if groups else 0
        if shared >= MIN_SHARED:
            groups[-1].append(current)
            lengths[-1] = min(lengths[-1], shared)
        else:
            groups.append([current])
            lengths.append(len(prompts[current]))
    return [
        SharedGroup(tuple(sorted(members)), length)
        for members, length in zip(groups, lengths, strict=True)
        if len(members) > 1
    ]


@dataclass(frozen=True, slots=True)
class SharedReads:
    """Rows (by index) in groups that have their first ``length`` tokens in common, and are read together."""

    groups: tuple[tuple[int, ...], ...]
    length: int

    @property
    def spared(self) -> int:
        """Columns that are not read: those of all rows but one of each group."""
        return self.length * sum(len(group) - 1 for group in self.groups)


def shared_reads(rows: Sequence[Tokens]) -> SharedReads:
    """The length, up to that of the shortest row, and the groups of rows equal so far that spare the most reads.

    The groups name each row once, in order of their first rows. The result depends on the rows and their order alone.
    """
    width = min(map(len, rows))
    table = np.stack([row[:width] for row in rows])
    # In the order of their bytes, rows that begin alike are neighbours.
    order = sorted(range(len(rows)), key=lambda i: table[i].tobytes())
    different = table[order[1:]] != table[order[:-1]]
    common = np.where(different.any(axis=1), different.argmax(axis=1), width)
    lengths = np.unique(np.append(common, 0))
    spared = lengths * (common >= lengths[:, None]).sum(axis=1)
    length = int(lengths[spared.argmax()])
    groups = np.split(np.array(order), np.flatnonzero(common < length) + 1)
    return SharedReads(tuple(sorted(tuple(sorted(group.tolist())) for group in groups)), length)

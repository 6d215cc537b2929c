"""What the prompts of an admission have in common, so that a shared prefix is computed once and copied."""

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

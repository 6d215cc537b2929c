"""What environments with generated tasks share: levels, and how many tasks each split has."""

from __future__ import annotations

import random
from collections.abc import Mapping

from agentgym.errors import ConfigError


def check_level(level: int | str, weights: Mapping[int, float]) -> int | str:
    """``level`` if it is ``"mix"`` or a level of ``weights``. Raises `ConfigError` otherwise."""
    if level != "mix" and level not in weights:
        raise ConfigError(f"level={level!r}: expected {', '.join(map(str, weights))} or 'mix'")
    return level


def draw_level(rng: random.Random, level: int | str, weights: Mapping[int, float]) -> int:
    """A level by weight for ``"mix"``, else the level itself. Draws from ``rng`` in both cases."""
    shares = weights if level == "mix" else {int(level): 1.0}
    (drawn,) = rng.choices(list(shares), weights=list(shares.values()))
    return drawn


def check_sizes(**sizes: int) -> dict[str, int]:
    """The sizes of splits. Raises `ConfigError` for one below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name}_size={size}: expected at least 1")
    return sizes


def size_of(sizes: Mapping[str, int], split: str) -> int:
    """The size of a split. Raises `ConfigError` for one that is not there."""
    if split not in sizes:
        raise ConfigError(f"split {split!r}: expected {' or '.join(map(repr, sizes))}")
    return sizes[split]

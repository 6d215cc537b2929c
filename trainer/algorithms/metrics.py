"""Metrics of micro-batches combined so that what is logged does not depend on the split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class MetricMeans:
    """Token-weighted means of loss metrics.

    Each metric of a loss is a mean over the mask-1 tokens of its call, so the mean over a mini-batch weights every
    call with its number of those tokens. Losses are not metrics: with `Totals` they are shares and are summed.

    Example:
        >>> means = MetricMeans()
        >>> means.add({"clip_fraction": 0.5}, tokens=2)
        >>> means.add({"clip_fraction": 0.1}, tokens=6)
        >>> means.result()
        {'clip_fraction': 0.2}

    Plain data: ranks send it to one another and `merge`.
    """

    sums: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, float | Tensor], tokens: float | Tensor) -> None:
        """Take in the metrics of one call over ``tokens`` mask-1 tokens (``response_mask.sum()``)."""
        weight = float(tokens)
        for name, value in metrics.items():
            number = value.item() if isinstance(value, Tensor) else value
            self.sums[name] = self.sums.get(name, 0.0) + number * weight
            self.tokens[name] = self.tokens.get(name, 0.0) + weight

    def merge(self, other: MetricMeans) -> None:
        """Take in what another rank or micro-batch collected."""
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.tokens[name] = self.tokens.get(name, 0.0) + other.tokens[name]

    def result(self) -> dict[str, float]:
        """Name to mean; 0.0 where no token was seen."""
        return {name: total / max(self.tokens[name], 1.0) for name, total in self.sums.items()}

"""Statistics of evaluations: means with intervals, what k attempts are worth, differences between two policies.

Pure functions of numbers. Samples of one task depend on each other, so every interval is clustered by task.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

CONFIDENCE = 0.95
Method = Literal["t", "bootstrap"]

EXACT_SUBSETS = 5_000
"""Up to so many subsets a majority vote is averaged over all of them, beyond over as many drawn ones."""
RESAMPLES = 2_000
"""Of a bootstrap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float
    """Equal to ``mean`` where a single cluster says nothing about the spread."""
    values: int
    clusters: int


def clustered_mean(
    clusters: Sequence[Sequence[float]], *, confidence: float = CONFIDENCE, method: Method = "t", seed: int = 0
) -> Estimate | None:
    """Mean over all values, with an interval that holds when values of one cluster depend on each other.

    ``t``: the cluster-robust standard error ``sqrt(G/(G-1) * sum_g (sum_i (x_gi - mean))^2) / N`` of G clusters and N
    values (Miller 2024, arXiv:2411.00640, eq. 4, with the usual small-sample factor), times the quantile of Student's t
    with G-1 degrees of freedom. ``bootstrap``: percentiles over resampled clusters.

    Args:
        clusters: the values of each task; empty clusters are left out.
        confidence: of the interval.
        method: how the interval is made.
        seed: of the bootstrap.

    Returns:
        None where there is no value.
    """
    filled = [cluster for cluster in clusters if cluster]
    values = [x for cluster in filled for x in cluster]
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    low = high = mean
    count = len(filled)
    if count > 1 and method == "t":
        squares = math.fsum(math.fsum(x - mean for x in cluster) ** 2 for cluster in filled)
        error = math.sqrt(squares * count / (count - 1)) / len(values)
        half = student_t_quantile(0.5 + confidence / 2, count - 1) * error
        low, high = mean - half, mean + half
    elif count > 1:
        low, high = _bootstrap(filled, confidence, seed)
    return Estimate(mean=mean, low=low, high=high, values=len(values), clusters=count)


def _bootstrap(clusters: Sequence[Sequence[float]], confidence: float, seed: int) -> tuple[float, float]:
    sums = np.array([math.fsum(cluster) for cluster in clusters])
    sizes = np.array([len(cluster) for cluster in clusters])
    drawn = np.random.default_rng(seed).integers(len(clusters), size=(RESAMPLES, len(clusters)))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return float(low), float(high)


def paired_difference(
    first: Mapping[str, Sequence[float]],
    second: Mapping[str, Sequence[float]],
    *,
    confidence: float = CONFIDENCE,
    method: Method = "t",
    seed: int = 0,
) -> Estimate | None:
    """Mean over the tasks that both have of (mean of ``second`` - mean of ``first``), each task counted once.

    Pairing takes the difficulty of the tasks out of the interval. None where no task is common.
    """
    common = [task for task, values in first.items() if values and second.get(task)]
    differences = [[_mean(second[task]) - _mean(first[task])] for task in common]
    return clustered_mean(differences, confidence=confidence, method=method, seed=seed)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k samples is right, given c right ones of n: ``1 - C(n-c, k) / C(n, k)``.

    Unbiased (Chen et al. 2021, arXiv:2107.03374). Raises ``ValueError`` unless ``0 <= c <= n`` and ``1 <= k <= n``.
    """
    _check_counts(n, c, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """pass^k, the chance that all of k samples are right: ``C(c, k) / C(n, k)`` (Yao et al. 2024, arXiv:2406.12045).

    Raises ``ValueError`` unless ``0 <= c <= n`` and ``1 <= k <= n``.
    """
    _check_counts(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def majority_at_k(answers: Sequence[Hashable], rewards: Sequence[float], k: int, *, seed: int = 0) -> float:
    """Expected reward of the answer that most of k samples give; of equally frequent ones the mean.

    Averaged over all subsets of k of the n samples, or over `EXACT_SUBSETS` drawn ones where there are more. An answer
    that got different rewards counts with their mean in the subset. Raises ``ValueError`` unless ``1 <= k <= n``.
    """
    n = len(answers)
    if len(rewards) != n:
        raise ValueError(f"{n} answers and {len(rewards)} rewards: expected one reward per answer")
    _check_counts(n, 0, k)
    if math.comb(n, k) <= EXACT_SUBSETS:
        subsets: Sequence[Sequence[int]] = list(combinations(range(n), k))
    else:
        generator = np.random.default_rng(seed)
        subsets = [generator.choice(n, size=k, replace=False).tolist() for _ in range(EXACT_SUBSETS)]
    return _mean([_vote([answers[i] for i in subset], [rewards[i] for i in subset]) for subset in subsets])


def _vote(answers: Sequence[Hashable], rewards: Sequence[float]) -> float:
    by_answer: dict[Hashable, list[float]] = {}
    for answer, reward in zip(answers, rewards, strict=True):
        by_answer.setdefault(answer, []).append(reward)
    most = max(map(len, by_answer.values()))
    return _mean([_mean(given) for given in by_answer.values() if len(given) == most])


def sample_sizes(n: int) -> list[int]:
    """The k that a report shows for n samples: powers of two, and n."""
    return sorted({1 << i for i in range(n.bit_length()) if 1 << i <= n} | ({n} if n else set()))


def student_t_quantile(p: float, freedom: int) -> float:
    """The value below which Student's t with ``freedom`` >= 1 degrees of freedom lies with probability ``p``.

    By bisection of the distribution function; exact to about 1e-10.
    """
    if not 0 < p < 1 or freedom < 1:
        raise ValueError(f"p={p}, freedom={freedom}: expected 0 < p < 1 and at least 1 degree of freedom")
    if p < 0.5:
        return -student_t_quantile(1 - p, freedom)
    high = 1.0
    while _student_t_cdf(high, freedom) < p:
        high *= 2
    low = 0.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if _student_t_cdf(middle, freedom) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _student_t_cdf(t: float, freedom: int) -> float:
    """For t >= 0: ``1 - I_x(f/2, 1/2) / 2`` with ``x = f / (f + t^2)``."""
    return 1 - _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Abramowitz and Stegun 26.5.8)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    tiny = 1e-300
    c, d = 1.0, 1 / max(abs(1 - (a + b) * x / (a + 1)), tiny)
    result = d
    for m in range(1, 1_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            result *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * result / a


def _check_counts(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n:
        raise ValueError(f"c={c} right of n={n} samples: expected 0 <= c <= n")
    if not 1 <= k <= n:
        raise ValueError(f"k={k} of n={n} samples: expected 1 <= k <= n; more cannot be known from {n} samples")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)

"""Statistics against hand-computed and reference values, and their invariances."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.statistics import (
    clustered_mean,
    majority_at_k,
    paired_difference,
    pass_at_k,
    pass_hat_k,
    sample_sizes,
    student_t_quantile,
)

COUNTS = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),
        (4, 1, 4, 1.0),
        (5, 2, 3, 0.9),
        (10, 3, 5, 0.9166667),
        (8, 0, 4, 0.0),
    ],
)
def test_pass_at_k_is_unbiased(n: int, c: int, k: int, expected: float) -> None:
    # I1
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 0, 6), (3, 4, 1), (3, -1, 1), (3, 1, 0)])
def test_counts_that_cannot_be_are_refused(n: int, c: int, k: int) -> None:
    # I1
    with pytest.raises(ValueError, match="expected"):
        pass_at_k(n, c, k)
    with pytest.raises(ValueError, match="expected"):
        pass_hat_k(n, c, k)


@settings(deadline=None)
@given(COUNTS)
def test_k_samples_are_worth_what_their_subsets_are(counts: tuple[int, int, int]) -> None:
    n, c, k = counts
    right = [i < c for i in range(n)]
    subsets = list(itertools.combinations(right, k))
    assert pass_at_k(n, c, k) == pytest.approx(statistics.fmean(any(s) for s in subsets), abs=1e-12)
    assert pass_hat_k(n, c, k) == pytest.approx(statistics.fmean(all(s) for s in subsets), abs=1e-12)
    assert pass_hat_k(n, c, k) <= c / n <= pass_at_k(n, c, k) + 1e-12


def test_the_majority_decides() -> None:
    answers = ["7", "7", "8", "9"]
    rewards = [1.0, 1.0, 0.0, 0.0]
    assert majority_at_k(answers, rewards, 1) == 0.5
    assert majority_at_k(answers, rewards, 4) == 1.0
    # Of the pairs: 77 wins; 78 and 79 (four of them) are ties; 89 loses.
    assert majority_at_k(answers, rewards, 2) == pytest.approx((1 + 4 * 0.5 + 0) / 6)
    # Of the triples: 778 and 779 win; 789 (two of them) is a tie of three.
    assert majority_at_k(answers, rewards, 3) == pytest.approx((1 + 1 + 2 / 3) / 4)


def test_a_wrong_majority_loses_what_the_mean_has() -> None:
    assert majority_at_k(["3", "3", "4"], [0.0, 0.0, 1.0], 3) == 0.0


def test_many_subsets_are_drawn() -> None:
    answers = ["a"] * 18 + ["b"] * 12
    rewards = [1.0] * 18 + [0.0] * 12
    exact = sum(math.comb(18, i) * math.comb(12, 15 - i) * float(i > 7) / math.comb(30, 15) for i in range(3, 16))
    assert majority_at_k(answers, rewards, 15) == pytest.approx(exact, abs=0.02)
    assert majority_at_k(answers, rewards, 15) == majority_at_k(answers, rewards, 15)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 1.0])), min_size=1, max_size=7), st.data())
def test_the_order_of_samples_does_not_matter(samples: list[tuple[str, float]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(samples)))
    shuffled = data.draw(st.permutations(samples))
    one = majority_at_k([a for a, _ in samples], [r for _, r in samples], k)
    other = majority_at_k([a for a, _ in shuffled], [r for _, r in shuffled], k)
    assert one == pytest.approx(other)
    assert majority_at_k([a for a, _ in samples], [r for _, r in samples], 1) == pytest.approx(
        statistics.fmean(r for _, r in samples)
    )


@pytest.mark.parametrize(
    ("p", "freedom", "expected"),
    [  # from printed tables
        (0.975, 1, 12.706205),
        (0.975, 2, 4.302653),
        (0.975, 4, 2.776445),
        (0.975, 10, 2.228139),
        (0.975, 29, 2.045230),
        (0.975, 100, 1.983972),
        (0.995, 5, 4.032143),
        (0.95, 7, 1.894579),
        (0.5, 3, 0.0),
        (0.025, 4, -2.776445),
        (0.975, 100_000, 1.959988),
    ],
)
def test_quantiles_of_students_t(p: float, freedom: int, expected: float) -> None:
    assert student_t_quantile(p, freedom) == pytest.approx(expected, abs=2e-6)


def test_independent_values_have_the_usual_interval() -> None:
    found = clustered_mean([[1.0], [0.0], [0.0], [1.0], [1.0]])
    assert found is not None
    error = math.sqrt((3 * 0.16 + 2 * 0.36) / 4 / 5)
    assert (found.mean, found.values, found.clusters) == (pytest.approx(0.6), 5, 5)
    assert found.high - 0.6 == pytest.approx(2.776445 * error, rel=1e-6)
    assert 0.6 - found.low == pytest.approx(found.high - 0.6)


def test_clusters_of_different_sizes_by_hand() -> None:
    found = clustered_mean([[1.0, 1.0, 0.0], [0.0]])
    assert found is not None
    # mean 0.5; sums of deviations 0.5 and -0.5; sqrt(2/1 * 0.5) / 4 = 0.25
    assert found.mean == 0.5
    assert found.high - 0.5 == pytest.approx(12.706205 * 0.25, rel=1e-6)


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=3), min_size=2, max_size=6))
def test_repeating_every_sample_does_not_narrow_the_interval(clusters: list[list[float]]) -> None:
    once, thrice = clustered_mean(clusters), clustered_mean([cluster * 3 for cluster in clusters])
    assert once is not None
    assert thrice is not None
    assert (thrice.mean, thrice.low, thrice.high) == pytest.approx((once.mean, once.low, once.high), abs=1e-9)


@pytest.mark.parametrize("method", ["t", "bootstrap"])
def test_the_interval_holds_the_truth_as_often_as_it_says(method: str) -> None:
    noise = random.Random(7)
    held = 0
    for trial in range(300):
        clusters = []
        for _ in range(25):
            chance = noise.choice([0.2, 0.5, 0.8])  # the task's; samples of one task share it
            clusters.append([float(noise.random() < chance) for _ in range(4)])
        found = clustered_mean(clusters, method=method, seed=trial)  # type: ignore[arg-type]
        assert found is not None
        held += found.low <= 0.5 <= found.high
    assert 0.91 <= held / 300 <= 0.98


def test_a_single_task_has_no_interval_and_nothing_has_no_mean() -> None:
    found = clustered_mean([[1.0, 0.0]])
    assert found is not None
    assert (found.low, found.mean, found.high) == (0.5, 0.5, 0.5)
    assert clustered_mean([]) is None
    assert clustered_mean([[], []]) is None


def test_a_paired_difference_takes_the_tasks_out() -> None:
    hard_and_easy = {f"t{i}": [float(i % 2)] for i in range(20)}
    better = {task: [min(1.0, values[0] + (0.5 if task == "t0" else 0.0))] for task, values in hard_and_easy.items()}
    found = paired_difference(hard_and_easy, {**better, "only here": [1.0]})
    assert found is not None
    assert found.mean == pytest.approx(0.025)
    assert found.clusters == 20
    assert found.high - found.low < 0.11  # unpaired it would be about 0.65
    assert paired_difference({"a": [1.0]}, {"b": [1.0]}) is None
    assert paired_difference({"a": []}, {"a": [1.0]}) is None


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 70))
def test_shown_sizes_end_with_all(n: int) -> None:
    sizes = sample_sizes(n)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, n) if n else sizes == []

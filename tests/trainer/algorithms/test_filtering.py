from __future__ import annotations

import math

import pytest

from agentgym.trainer.algorithms import FilterExhausted, GroupCollector, has_spread
from agentgym.trainer.algorithms.config import FilterConfig

ON = FilterConfig(enabled=True, max_gen_batches=3)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1.0, 0.0], True),
        ([1.0, 1.0], False),
        ([0.9, 0.9 + 1e-8], False),
        ([0.9, 0.9001], True),
        ([0.0, 0.0, 0.0], False),
        ([1.0], False),
        ([], False),
        ([1.0, None], False),
        ([1.0, None, 0.0], True),
        ([1.0, math.nan, 1.0], False),
        ([-1.0, 1.0], True),
    ],
)
def test_spread_needs_two_scores_that_differ(scores: list[float | None], expected: bool) -> None:
    assert has_spread(scores) is expected


def test_at_most_three_rounds_then_an_error_with_counts() -> None:  # C16
    collector: GroupCollector[str] = GroupCollector(2, ON)
    sampled = 0
    while not collector.finished:
        collector.add([("a", [1.0, 1.0]), ("b", [0.0, 0.0])])
        sampled += 2
    assert sampled == 6  # the data position: all prompts that were sampled
    with pytest.raises(
        FilterExhausted, match=r"0 of 2 groups had reward spread after 3 generation rounds \(6 had none"
    ):
        collector.take()


def test_a_skipped_step_is_reported_as_skipped() -> None:  # C16
    collector: GroupCollector[str] = GroupCollector(2, FilterConfig(enabled=True, when_exhausted="skip"))
    while not collector.finished:
        collector.add([("a", [1.0, 0.0])] if collector.rounds == 0 else [("b", [1.0, 1.0])])
    assert collector.take() is None
    assert collector.metrics() == {"rounds": 3.0, "kept": 1.0, "without_spread": 2.0, "skipped": 1.0}


def test_rounds_fill_up_to_exactly_the_target() -> None:
    collector: GroupCollector[str] = GroupCollector(3, ON)
    collector.add([("a", [1.0, 0.0]), ("b", [1.0, 1.0]), ("c", [0.0, 1.0])])
    assert collector.missing == 1
    collector.add([("d", [1.0, 0.0]), ("e", [1.0, 0.0])])
    assert collector.finished
    assert collector.take() == ["a", "c", "d"]
    assert collector.metrics() == {"rounds": 2.0, "kept": 4.0, "without_spread": 1.0, "skipped": 0.0}


def test_without_the_filter_one_round_passes_unchanged() -> None:
    collector: GroupCollector[str] = GroupCollector(2, FilterConfig())
    collector.add([("a", [1.0, 1.0]), ("b", [None, None])])
    assert collector.finished
    assert collector.take() == ["a", "b"]

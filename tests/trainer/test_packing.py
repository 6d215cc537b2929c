"""Micro-batch planning: the cap, the counts per rank, every row once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import ConfigError
from agentgym.trainer.packing import plan


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int, int]:
    groups = draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
    rows = draw(st.lists(st.tuples(st.integers(0, len(groups) - 1), st.integers(0, 80)), min_size=1, max_size=30))
    prompt = [groups[g] for g, _ in rows]
    response = [r for _, r in rows]
    longest = max(p + r for p, r in zip(prompt, response, strict=True))
    cap = draw(st.integers(longest, longest * 4))
    return prompt, response, [g for g, _ in rows], cap, draw(st.integers(1, 4))


@given(batches())
def test_every_row_once_under_the_cap_with_equal_counts_on_all_ranks(
    batch: tuple[list[int], list[int], list[int], int, int],
) -> None:
    prompt, response, groups, cap, ranks = batch
    planned = plan(range(len(prompt)), prompt, response, groups, cap=cap, ranks=ranks)
    assert len(planned) == ranks
    assert len({len(micros) for micros in planned}) == 1  # H1: no rank runs fewer collectives than another
    seen = sorted(row for micros in planned for micro in micros for row in micro.rows)
    assert seen == list(range(len(prompt)))
    for micros in planned:
        for micro in micros:
            computed = sum(prompt[p.rows[0]] + sum(response[r] for r in p.rows) for p in micro.pieces)
            assert micro.tokens == computed <= cap
            assert all(len({groups[r] for r in p.rows}) == 1 for p in micro.pieces)


def test_ranks_with_different_lengths_run_the_same_number_of_micro_batches() -> None:
    # H1
    planned = plan(range(6), [1] * 6, [99, 99, 99, 499, 499, 399], list(range(6)), cap=512, ranks=2)
    assert [len(micros) for micros in planned] == [2, 2]


def test_fewer_rows_than_ranks_gives_empty_micro_batches() -> None:
    # H2, C17
    planned = plan([0], [5], [5], [0], cap=100, ranks=3)
    assert [micro.rows for micros in planned for micro in micros] == [[0], [], []]


def test_one_group_is_split_over_ranks_and_each_part_pays_for_the_prompt() -> None:
    planned = plan(range(8), [100] * 8, [50] * 8, [0] * 8, cap=10_000, ranks=2)
    assert sorted(micro.tokens for micros in planned for micro in micros) == [300, 300]


def test_a_row_longer_than_the_cap_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_tokens_per_micro_batch=10 .* 12 tokens"):
        plan([0], [4], [8], [0], cap=10)

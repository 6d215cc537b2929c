from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.trainer.rollout.prefix import (
    MIN_SHARED,
    SharedGroup,
    SharedReads,
    common_prefix,
    shared_groups,
    shared_reads,
)


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 9, 3], 1), ([5], [6], 0)],
)
def test_common_prefix(a: list[int], b: list[int], shared: int) -> None:
    assert common_prefix(np.array(a, dtype=np.int64), np.array(b, dtype=np.int64)) == shared


def test_prompts_are_grouped_by_what_they_begin_with() -> None:
    system = [list(range(100, 130)), list(range(200, 220))]
    prompts = [
        np.array(ids, dtype=np.int64)
        for ids in (
            [*system[0], 1, 1],
            [*system[1], 5],
            [7, 7, 7],
            [*system[0], 1, 2],
            [*system[1], 6],
            [*system[0], 9],
        )
    ]
    assert shared_groups(prompts) == [SharedGroup((0, 3, 5), 30), SharedGroup((1, 4), 20)]


def test_short_common_prefixes_are_not_shared() -> None:
    start = list(range(MIN_SHARED - 1))
    assert shared_groups([np.array([*start, 80]), np.array([*start, 90])]) == []
    assert shared_groups([]) == []


def rows_of(*ids: list[int]) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    return [np.array(row, dtype=np.int64) for row in ids]


def test_rows_are_read_together_where_that_spares_most() -> None:
    system = list(range(10))
    samples = rows_of([*system, 20, 21, 22, 1], [*system, 30, 31, 32], [*system, 20, 21, 22], [*system, 30, 31, 32, 2])
    # Two pairs share 13 tokens: 26 are spared. All four share 10: 30 are.
    assert shared_reads(samples) == SharedReads(((0, 1, 2, 3),), 10)
    assert shared_reads(samples).spared == 30
    pairs = rows_of([0, *range(20), 1], [0, *range(30, 50)], [0, *range(20)], [0, *range(30, 50), 2])
    assert shared_reads(pairs) == SharedReads(((0, 2), (1, 3)), 21)


def test_a_short_row_bounds_what_is_read_together() -> None:
    assert shared_reads(rows_of([1, 2, 3, 4], [1, 2], [1, 2, 3, 4])) == SharedReads(((0, 1, 2),), 2)
    assert shared_reads(rows_of([7], [8], [9])).spared == 0


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=7))
def test_shared_reads_are_right_and_the_best(ids: list[list[int]]) -> None:
    reads = shared_reads(rows_of(*ids))
    assert sorted(row for group in reads.groups for row in group) == list(range(len(ids)))
    for group in reads.groups:
        assert len({tuple(ids[row][: reads.length]) for row in group}) == 1
    shortest = min(map(len, ids))
    assert reads.length <= shortest
    assert reads.spared == max(
        length * (len(ids) - len({tuple(row[:length]) for row in ids})) for length in range(shortest + 1)
    )

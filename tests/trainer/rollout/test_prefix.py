from __future__ import annotations

import numpy as np
import pytest

from agentgym.trainer.rollout.prefix import MIN_SHARED, SharedGroup, common_prefix, shared_groups


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

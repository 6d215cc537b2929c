from __future__ import annotations

import math

import pytest
import torch

from agentgym.trainer.algorithms.scan import Packed, pack, suffix_sums

T = torch.tensor


@pytest.mark.parametrize("factor", [0.0, 0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 200, 5000])
def test_suffix_sums_equal_the_loop(factor: float, length: int) -> None:
    x = torch.randn(2, length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    expected, accumulated = torch.zeros_like(x), torch.zeros(2, dtype=torch.float64)
    for t in reversed(range(length)):
        accumulated = x[:, t] + factor * accumulated
        expected[:, t] = accumulated
    torch.testing.assert_close(suffix_sums(x, factor), expected)


def test_packing_cuts_gaps_out_and_back_in() -> None:
    packed = Packed.of(T([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]]).bool())
    line = packed.take(T([[5.0, 9.0, 6.0, 9.0], [9.0, 9.0, 9.0, 9.0], [9.0, 1.0, 2.0, 3.0]]))
    assert line.tolist() == [5.0, 6.0, 1.0, 2.0, 3.0]
    assert packed.following(line).tolist() == [6.0, 0.0, 2.0, 3.0, 0.0]
    rows = packed.rows(line)
    assert rows.tolist() == [[5.0, 6.0, 0.0], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0]]
    assert torch.equal(packed.line(rows), line)
    assert packed.spread(line).tolist() == [[5.0, 0.0, 6.0, 0.0], [0.0] * 4, [0.0, 1.0, 2.0, 3.0]]


def test_rows_that_are_not_valid_or_not_finite_lose_their_tokens() -> None:
    x = T([[1.0, math.nan], [1.0, math.nan], [3.0, 4.0], [5.0, 6.0]])
    packed, (line,) = pack(T([[1, 0], [1, 1], [1, 1], [1, 1]]), T([True, True, True, False]), x)
    assert packed.spread(line).tolist() == [[1.0, 0.0], [0.0, 0.0], [3.0, 4.0], [0.0, 0.0]]

from __future__ import annotations

import pytest
import torch

from agentgym.trainer.rollout.kv_cache import KVCache, rounded_up, zeros

CPU = torch.device("cpu")


def marked(rows: int, tokens: int, start: int) -> torch.Tensor:
    """Keys [rows, 2, tokens, 3] that all differ."""
    count = rows * 2 * tokens * 3
    return torch.arange(start, start + count, dtype=torch.float32).view(rows, 2, tokens, 3)


def test_lengths_are_rounded_up_to_the_bucket() -> None:
    assert [rounded_up(n) for n in (1, 8, 9, 32, 33, 100)] == [8, 8, 16, 32, 40, 104]


def test_tokens_are_written_at_each_rows_own_position() -> None:
    cache = KVCache(1, 4, 60, CPU)
    cache.aim([1, 2, 3], torch.tensor([[5], [0], [33]]), 64)
    new = marked(3, 1, 1)
    keys, values = cache.update(new, -new, 0)
    assert keys.shape == (3, 2, 64, 3)
    for row, position in enumerate((5, 0, 33)):
        assert torch.equal(keys[row, :, position], new[row, :, 0])
        assert torch.equal(values[row, :, position], -new[row, :, 0])
    assert int((keys != 0).any(-1).any(1).sum()) == 3


def test_prefill_writes_any_rows_and_returns_them_in_order() -> None:
    cache = KVCache(1, 4, 60, CPU)
    new = marked(2, 3, 1)
    # The first token of row 1 is padding: it goes to the scratch column.
    cache.aim([3, 1], torch.tensor([[4, 5, 6], [cache.scratch, 0, 1]]), 32)
    keys, _ = cache.update(new, new, 0)
    assert torch.equal(keys[0, :, 4:7], new[0])
    assert torch.equal(keys[1, :, :2], new[1, :, 1:])
    assert keys.shape == (2, 2, 32, 3)
    assert int((keys != 0).any(-1).any(1).sum()) == 5


def test_the_scratch_column_is_beyond_the_longest_sequence() -> None:
    for length in (31, 32, 33):
        cache = KVCache(1, 1, length, CPU)
        assert cache.scratch >= length
        assert cache.columns == cache.scratch + 1 == rounded_up(length + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_starts_with_zeros_that_can_be_written(dtype: torch.dtype) -> None:
    made = zeros((3, 5, 7), dtype, CPU)
    assert made.shape == (3, 5, 7)
    assert made.dtype == dtype
    assert not made.any()
    made[1, 2] = 4
    assert float(made.float().sum()) == 28


def test_prefixes_are_copies_of_the_rows_first_columns() -> None:
    cache = KVCache(2, 4, 20, CPU)
    cache.aim(range(4), torch.arange(6).repeat(4, 1), 8)
    for layer in range(2):
        new = marked(4, 6, 1 + 1000 * layer)
        cache.update(new, -new, layer)
    keys, values = cache.prefixes([2, 0], 5)
    assert keys.shape == (2, 2, 2, 5, 3)
    assert cache.keys is not None
    assert torch.equal(keys[1, 0], cache.keys[1, 2, :, :5])
    assert torch.equal(keys[0, 1], cache.keys[0, 0, :, :5])
    assert torch.equal(values, -keys)
    cache.clear()
    assert keys.all()


def test_a_column_counts_what_keys_and_values_take() -> None:
    cache = KVCache(1, 2, 20, CPU)
    assert cache.column_bytes == 0
    cache.aim(range(2), torch.arange(4).repeat(2, 1), 8)
    new = marked(2, 4, 1)
    cache.update(new, new[..., :2], 0)
    assert cache.column_bytes == 2 * 4 * (3 + 2)

from __future__ import annotations

import pytest
import torch

from agentgym.trainer.rollout.kv_cache import KVCache, rounded_up, row_attention

CPU = torch.device("cpu")


def marked(rows: int, tokens: int, start: int) -> torch.Tensor:
    """Keys [rows, 2, tokens, 3] that all differ."""
    count = rows * 2 * tokens * 3
    return torch.arange(start, start + count, dtype=torch.float32).view(rows, 2, tokens, 3)


def test_lengths_are_rounded_up_to_the_bucket() -> None:
    assert [rounded_up(n) for n in (1, 32, 33, 100)] == [32, 32, 64, 128]


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


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 5])
def test_attention_equals_the_textbook_formula(key_heads: int, length: int) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 4, length, 8), torch.randn(3, key_heads, 9, 8), torch.randn(3, key_heads, 9, 8)
    mask = torch.rand(3, 1, length, 9) > 0.4
    mask[..., 0] = True
    output, _ = row_attention(torch.nn.Identity(), query, key, value, mask, scaling=0.5)
    key, value = (x.repeat_interleave(4 // key_heads, dim=1) for x in (key, value))
    weights = (query @ key.transpose(2, 3) * 0.5).masked_fill(~mask, float("-inf")).softmax(-1)
    torch.testing.assert_close(output, (weights @ value).transpose(1, 2))

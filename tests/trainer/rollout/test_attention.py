from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentgym.trainer.rollout.attention import SharedPrefix, row_attention
from agentgym.trainer.rollout.kv_cache import KVCache

CPU = torch.device("cpu")


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


@st.composite
def groupings(draw: st.DrawFn) -> list[list[int]]:
    """Rows 0 to n - 1 in groups of any sizes, in any order."""
    rows = draw(st.permutations(range(draw(st.integers(1, 9)))))
    cuts = sorted(draw(st.sets(st.integers(1, len(rows)))) | {0, len(rows)})
    return [list(rows[start:end]) for start, end in itertools.pairwise(cuts)]


@given(
    groups=groupings() | st.just([[0, 1, 2], [3, 4, 5]]),
    shared=st.integers(1, 6),
    own=st.integers(1, 5),
    key_heads=st.sampled_from([1, 2, 4]),
    scaling=st.sampled_from([None, 0.3]),
    seed=st.integers(0, 1000),
)
def test_a_prefix_read_once_gives_the_attention_of_one_read_by_every_row(
    groups: list[list[int]], shared: int, own: int, key_heads: int, scaling: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    rows, columns = sum(map(len, groups)), shared + own
    cache = KVCache(2, rows, columns, CPU)
    cache.aim(range(rows), torch.arange(columns).repeat(rows, 1), columns)
    for layer in range(2):
        keys, values = torch.randn(2, rows, key_heads, columns, 8)
        for group in groups:
            for states in (keys, values):
                states[group, :, :shared] = states[group[:1], :, :shared]
        keys, values = cache.update(keys, values, layer)
    module: Any = torch.nn.Identity()
    module.layer_idx = 1
    query = 3 * torch.randn(rows, 4, 1, 8)
    ends = torch.randint(shared, columns, (rows,))
    mask = torch.zeros(rows, 1, 1, columns).masked_fill(torch.arange(columns) > ends[:, None, None, None], -torch.inf)
    prefix = SharedPrefix.of(cache, groups, shared)
    together, _ = row_attention(module, query, keys, values, mask, scaling=scaling, shared_prefix=prefix)
    alone, _ = row_attention(module, query, keys, values, mask, scaling=scaling)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_groups_in_the_order_of_the_rows_need_no_gathering() -> None:
    cache = KVCache(1, 4, 8, CPU)
    cache.aim(range(4), torch.arange(3).repeat(4, 1), 8)
    cache.update(torch.randn(4, 1, 3, 2), torch.randn(4, 1, 3, 2), 0)
    assert SharedPrefix.of(cache, [[0, 1], [2, 3]], 2).slots is None
    prefix = SharedPrefix.of(cache, [[0, 1, 3], [2]], 2)
    assert prefix.slots is not None
    assert prefix.slots.tolist() == [0, 1, 3, 2, 0, 0]
    assert prefix.places is not None
    assert prefix.places.tolist() == [0, 1, 3, 2]

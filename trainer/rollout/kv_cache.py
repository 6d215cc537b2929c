"""Keys and values of all sessions in preallocated rows: a transformers ``Cache``, and the attention that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache

ATTENTION = "agentgym_rows"
"""Name of `row_attention` in transformers' attention registry."""

BUCKET = 32
"""Key lengths are rounded up to a multiple of this: fewer shapes, and at most 31 masked columns are read in vain."""

UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sliding_window")
"""Arguments of transformers' attention functions that change the result and that `row_attention` does not know."""


def rounded_up(length: int) -> int:
    """``length`` rounded up to a multiple of `BUCKET`."""
    return -(-length // BUCKET) * BUCKET


class KVCache(Cache):  # type: ignore[misc]
    """Keys and values ``[layer, row, head, position, dim]`` of ``rows`` sequences of up to ``max_length`` tokens.

    Right-padded: position p of a row holds token p of its sequence; what lies beyond its length is old and masked.
    One more column (`scratch`) takes what padding tokens write. Before each forward, `aim` says which rows and
    positions the new tokens have; ``update`` (called by the model, once a layer) writes them there and returns the
    rows up to the bucketed length. Memory is taken at the first forward, when the shapes are known.
    """

    def __init__(self, layers: int, rows: int, max_length: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self.rows = rows
        self.columns = rounded_up(max_length + 1)
        self.scratch = self.columns - 1
        self.device = device
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self._layers = layers
        self._length = 0
        self._rows: Sequence[int] = ()
        self._positions = torch.empty(0)
        self._select: Tensor | None = None
        self._flat: Tensor | None = None

    def aim(self, rows: Sequence[int], positions: Tensor, length: int) -> None:
        """Next forward: tokens for ``rows`` (n), written at ``positions`` [n, T]; keys up to ``length`` are read."""
        self._rows, self._positions, self._length = rows, positions, length
        self._flat = self._select = None
        if list(rows) != list(range(rows[0], rows[0] + len(rows))):
            self._select = torch.tensor(rows, device=self.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values [n, H, T, D] and return those of the rows, [n, H, length, D]."""
        if self.keys is None or self.values is None:
            self.keys, self.values = self._allocate(key_states), self._allocate(value_states)
        return self._layer(self.keys[layer_idx], key_states), self._layer(self.values[layer_idx], value_states)

    def _allocate(self, states: Tensor) -> Tensor:
        # Zeros, not empty: a masked column counts 0 times its value, which must not be NaN.
        shape = (self._layers, self.rows, states.shape[1], self.columns, states.shape[3])
        return torch.zeros(shape, dtype=states.dtype, device=self.device)

    def _layer(self, store: Tensor, states: Tensor) -> Tensor:
        # index_copy_ over flat (row, head, position) indices is 3 times as fast as indexed assignment at these sizes.
        store.view(-1, store.shape[-1]).index_copy_(0, self._indices(store), states.reshape(-1, states.shape[-1]))
        if self._select is not None:
            return store[:, :, : self._length].index_select(0, self._select)
        # Neighbouring rows are a view; the rows of a decode step always are.
        return store[self._rows[0] : self._rows[0] + len(self._rows), :, : self._length]

    def _indices(self, store: Tensor) -> Tensor:
        """Flat indices [n * H * T] of the new tokens, made once a forward."""
        if self._flat is None:
            heads = torch.arange(store.shape[1], device=self.device)
            rows = torch.tensor(self._rows, device=self.device)
            starts = (rows[:, None] * store.shape[1] + heads) * self.columns
            self._flat = (starts[:, :, None] + self._positions[:, None, :]).reshape(-1)
        return self._flat

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` columns of a row over those of another."""
        for store in (self.keys, self.values):
            if store is not None and length:
                store[:, target, :, :length] = store[:, source, :, :length]

    def swap(self, a: int, a_length: int, b: int, b_length: int) -> None:
        """Exchange two rows that hold ``a_length`` and ``b_length`` tokens."""
        for store in (self.keys, self.values):
            if store is not None:
                kept = store[:, a, :, :a_length].clone()
                store[:, a, :, :b_length] = store[:, b, :, :b_length]
                store[:, b, :, :a_length] = kept

    def clear(self) -> None:
        """Zero everything, so that no value of a broken forward (NaN) lives on."""
        for store in (self.keys, self.values):
            if store is not None:
                store.zero_()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: lengths differ by row, and positions and mask are always given."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that the next forward reads."""
        return self._length, 0


def row_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Attention of queries [n, Hq, T, D] over keys [n, Hk, L, D] under a mask [n, 1, T, L].

    The query heads that share a key head are folded into the query length, so that grouped keys are read once and
    never copied (repeating them took four times as long at 64 rows of 256 keys).

    Raises:
        NotImplementedError: the model asks for something that changes the attention weights.
    """
    for name in UNSUPPORTED:
        if name in extras and extras[name] is not None:
            raise NotImplementedError(f"attention with {name}={extras[name]}")
    rows, heads, length, _ = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(rows, key.shape[1], groups * length, -1)
        if length > 1 and attention_mask is not None:
            attention_mask = attention_mask.repeat(1, 1, groups, 1)
    output = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(rows, heads, length, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, row_attention)

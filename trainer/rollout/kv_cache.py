"""Keys and values of all sessions in preallocated rows: a transformers ``Cache``."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

BUCKET = 8
"""Key lengths are rounded up to a multiple of this: fewer shapes, and at most 7 masked columns are read in vain."""


def rounded_up(length: int) -> int:
    """``length`` rounded up to a multiple of `BUCKET`."""
    return -(-length // BUCKET) * BUCKET


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A large tensor of zeros; on a CPU in huge pages, where the system has them.

    Zeros, not anything: a masked column counts 0 times its value, which must not be NaN. A decode step reads a little
    of every row: with pages of 4 KiB the translation of addresses took a twelfth of the engine's time.
    """
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


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
        shape = (self._layers, self.rows, states.shape[1], self.columns, states.shape[3])
        return zeros(shape, states.dtype, self.device)

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

    @property
    def column_bytes(self) -> int:
        """Bytes of keys and values of one column of one row, in one layer; 0 before the first forward."""
        return sum(store[0, 0, :, 0].nbytes for store in (self.keys, self.values) if store is not None)

    def prefixes(self, rows: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """Copies of the first ``length`` columns of the rows: keys and values, [layer, row, head, length, dim] each."""
        assert self.keys is not None
        assert self.values is not None
        # Row by row: index_select of a part of the columns took ten times as long.
        stores = (self.keys[..., :length, :], self.values[..., :length, :])
        keys, values = (torch.stack([store[:, row] for row in rows], dim=1) for store in stores)
        return keys, values

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

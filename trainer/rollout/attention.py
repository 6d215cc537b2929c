"""The `torch` engine's attention over the rows of a KV cache; what rows have in common is read once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agentgym.trainer.rollout.kv_cache import KVCache

ATTENTION = "agentgym_rows"
"""Name of `row_attention` in transformers' attention registry."""

UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sliding_window")
"""Arguments of transformers' attention functions that change the result and that `row_attention` does not know."""


_attention: Callable[..., tuple[Tensor, Tensor]] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""What `scaled_dot_product_attention` calls on a CPU; it also returns the log-sum-exp of the scores, [n, H, T]."""


def visible(columns: Tensor, positions: Tensor) -> Tensor:
    """Which ``columns`` [L] tokens at ``positions`` [n, T] attend to: bool [n, 1, T, L]."""
    return (columns <= positions[:, :, None])[:, None]


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as what is added to scores. Attention makes it of a bool mask in every layer anew."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The first P columns of rows that begin alike, once for each of the G groups of such rows."""

    keys: Tensor
    """[layer, G, Hk, P, D]"""
    values: Tensor
    """[layer, G, Hk, P, D]"""
    slots: Tensor | None
    """[G * M]: row of each place, M for every group; groups with fewer rows have row 0 in the places that are left.
    None if that is the order of the rows."""
    places: Tensor | None
    """[n]: a place of each row. None if that is the order of the rows."""

    @property
    def length(self) -> int:
        """P."""
        return self.keys.shape[3]

    @classmethod
    def of(cls, cache: KVCache, groups: Sequence[Sequence[int]], length: int) -> SharedPrefix:
        """The prefixes of ``length`` columns of the groups, which name each row from 0 once; the first one is read."""
        keys, values = cache.prefixes([group[0] for group in groups], length)
        size = max(map(len, groups))
        slots = [row for group in groups for row in [*group, *[0] * (size - len(group))]]
        if slots == list(range(len(slots))):
            return cls(keys, values, None, None)
        places = {row: number * size + i for number, group in enumerate(groups) for i, row in enumerate(group)}
        return cls(
            keys,
            values,
            torch.tensor(slots, device=cache.device),
            torch.tensor([places[row] for row in range(len(places))], device=cache.device),
        )

    def attend(self, query: Tensor, layer: int, scaling: float | None) -> tuple[Tensor, Tensor]:
        """Attention of queries [n, Hk, Q, D] over the shared columns, and its log-sum-exp [n, Hk, Q]."""
        groups, queries = self.keys.shape[1], query.shape[2]
        placed = query if self.slots is None else query.index_select(0, self.slots)
        # [G * M, Hk, Q, D] as [G, Hk, M * Q, D]; without a copy where Q is 1.
        together = placed.view(groups, -1, *query.shape[1:]).transpose(1, 2).flatten(2, 3)
        output, normaliser = _attention(together, self.keys[layer], self.values[layer], scale=scaling)
        output = output.transpose(1, 2).reshape(-1, queries, *output.shape[1::2]).transpose(1, 2)
        normaliser = normaliser.transpose(1, 2).reshape(-1, queries, normaliser.shape[1]).transpose(1, 2)
        if self.places is None:
            return output, normaliser
        return output.index_select(0, self.places), normaliser.index_select(0, self.places)


def row_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    shared_prefix: SharedPrefix | None = None,
    **extras: object,
) -> tuple[Tensor, None]:
    """Attention of queries [n, Hq, T, D] over keys [n, Hk, L, D] under a mask [n, 1, T, L].

    The query heads that share a key head are folded into the query length, so that grouped keys are read once and
    never copied (repeating them took four times as long at 64 rows of 256 keys).

    Args:
        module: with ``layer_idx``, if there is a shared prefix.
        query: of the rows' new tokens.
        key: of the rows.
        value: of the rows.
        attention_mask: bool, or added to the scores. With a shared prefix it is added, and T is 1.
        scaling: of the scores; None: one over the root of D.
        shared_prefix: read in place of the first P columns of the rows, which it equals.
        extras: of transformers; those in `UNSUPPORTED` must be None.

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
    if shared_prefix is None:
        output = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    else:
        assert attention_mask is not None
        assert isinstance(module.layer_idx, int)
        start = shared_prefix.length
        shared, shared_normaliser = shared_prefix.attend(query, module.layer_idx, scaling)
        own, own_normaliser = _attention(
            query, key[:, :, start:], value[:, :, start:], attn_mask=attention_mask[..., start:], scale=scaling
        )
        share = torch.sigmoid(own_normaliser - shared_normaliser)[..., None]
        output = torch.lerp(shared, own, share.to(own.dtype))
    return output.reshape(rows, heads, length, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, row_attention)

"""Forward passes over packed sequences: log-probs, entropies and values of response tokens; shared prompts once.

Two layouts give the same numbers. *shared*: one packed row per micro-batch, where the responses to one prompt attend to
its keys and values; the attention runs through transformers' attention interface, the position ids are those of the
unpacked sequences. *padded*: one right-padded row per sequence, for models the first does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ATTENTION_NAME = "agentgym_shared_prompt"
SIMILAR = 0.75
"""Rows of one attention block have at least this share of its longest length."""
HEAD_ELEMENTS = 2**25
"""Logits computed at a time (elements): 128 MiB in float32."""

CACHED_ELEMENTS = 2**17
"""Elements of a pass that should not leave a core's cache."""


@dataclass(frozen=True, slots=True)
class ResponseBlock:
    """Responses of similar length, and the prompts they follow, as indices into the packed row.

    b responses padded to R, their prompts padded to P. Padding points at position 0 and is masked out or dropped.
    """

    index: Tensor
    """[b, R] long"""
    prompt_index: Tensor
    """[b, P] long"""
    key_mask: Tensor
    """[b, 1, R, P + R] bool: what a response position may attend to"""


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """Where the tokens of a packed row of N stand: first all prompts, then all responses.

    Attention runs over blocks of similar length, so that one long response does not make all others long.
    """

    prompts: tuple[Tensor, ...]
    """[g, P] long each: prompts of similar length, as indices into the packed row"""
    responses: tuple[ResponseBlock, ...]
    gather: Tensor
    """[N] long: position of each packed token in the flattened blocks (prompts, then responses)"""


@dataclass(frozen=True, slots=True)
class PackedMicroBatch:
    """Model input of one micro-batch. M is the number of response tokens that are asked for."""

    input_ids: Tensor
    """[1, N] or [B, L] long"""
    position_ids: Tensor
    """like input_ids"""
    attention_mask: Tensor | None
    """[B, L] long in the padded layout, None in the shared one"""
    layout: SharedLayout | None
    source: Tensor
    """[M] long: flat position whose hidden state predicts the token"""
    target: Tensor
    """[M] long: the token"""

    def to(self, device: torch.device) -> PackedMicroBatch:
        """The same on another device."""
        moved: PackedMicroBatch = _to(self, device)
        return moved


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_to(item, device) for item in value)
    if is_dataclass(value):
        moved = {field.name: _to(getattr(value, field.name), device) for field in fields(value)}
        return replace(value, **moved)  # type: ignore[type-var]
    return value


def pack_shared(pieces: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> PackedMicroBatch:
    """Pack (prompt ids [P], response ids [R] of each of its rows) pieces into one row with every prompt once.

    The targets are all response tokens, piece by piece, row by row.
    """
    prompts = [prompt for prompt, _ in pieces]
    responses = [response for _, members in pieces for response in members]
    prompt_of = torch.tensor([g for g, (_, members) in enumerate(pieces) for _ in members])
    p_len = torch.tensor([len(p) for p in prompts])
    r_len = torch.tensor([len(r) for r in responses])
    p_start = torch.cumsum(p_len, 0) - p_len
    r_start = torch.cumsum(r_len, 0) - r_len + p_len.sum()
    packed = torch.arange(int(p_len.sum() + r_len.sum()))
    r_offset = packed[p_len.sum() :] - r_start.repeat_interleave(r_len)
    p_offset = packed[: p_len.sum()] - p_start.repeat_interleave(p_len)
    last_prompt = (p_start + p_len - 1)[prompt_of].repeat_interleave(r_len)
    return PackedMicroBatch(
        input_ids=torch.cat([*prompts, *responses])[None],
        position_ids=torch.cat([p_offset, p_len[prompt_of].repeat_interleave(r_len) + r_offset])[None],
        attention_mask=None,
        layout=_shared_layout(p_start, p_len, r_start, r_len, prompt_of),
        source=torch.where(r_offset == 0, last_prompt, packed[p_len.sum() :] - 1),
        target=torch.cat(responses),
    )


def _shared_layout(p_start: Tensor, p_len: Tensor, r_start: Tensor, r_len: Tensor, prompt_of: Tensor) -> SharedLayout:
    order: list[Tensor] = []
    prompt_blocks, response_blocks = [], []
    offset = 0

    def place(index: Tensor, real: Tensor) -> None:
        """Note which flattened positions hold which packed tokens."""
        nonlocal offset
        order.append(torch.stack([index[real], offset + torch.nonzero(real.flatten())[:, 0]]))
        offset += index.numel()

    for rows in similar_lengths(p_len):
        index, real = _block(p_start[rows], p_len[rows])
        prompt_blocks.append(index)
        place(index, real)
    for rows in similar_lengths(r_len):
        index, real = _block(r_start[rows], r_len[rows])
        parents = prompt_of[rows]
        prompt_index, prompt_real = _block(p_start[parents], p_len[parents])
        width = index.shape[1]
        causal = torch.ones(width, width, dtype=torch.bool).tril().expand(len(rows), -1, -1)
        key_mask = torch.cat([prompt_real[:, None, :].expand(-1, width, -1), causal], dim=2)[:, None]
        response_blocks.append(ResponseBlock(index, prompt_index, key_mask))
        place(index, real)
    tokens, positions = torch.cat(order, dim=1)
    gather = torch.empty_like(positions)
    gather[tokens] = positions
    return SharedLayout(tuple(prompt_blocks), tuple(response_blocks), gather)


def _block(start: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Indices [rows, longest] of runs in the packed row, and which of them are real."""
    column = torch.arange(int(length.max()))
    real = column < length[:, None]
    return torch.where(real, start[:, None] + column, 0), real


def similar_lengths(length: Tensor) -> list[Tensor]:
    """Row numbers in groups, longest first, in which no row is shorter than `SIMILAR` of the longest (or 16 tokens)."""
    order = torch.argsort(length, descending=True, stable=True)
    groups: list[Tensor] = []
    start = 0
    sorted_length = length[order]
    while start < len(order):
        longest = int(sorted_length[start])
        stop = int((sorted_length >= min(SIMILAR * longest, longest - 16)).sum())
        groups.append(order[start:stop])
        start = stop
    return groups


def pack_padded(pieces: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> PackedMicroBatch:
    """The same targets as `pack_shared`, one right-padded row per response."""
    rows = [torch.cat([prompt, response]) for prompt, members in pieces for response in members]
    prompt_len = torch.tensor([len(prompt) for prompt, members in pieces for _ in members])
    lengths = torch.tensor([len(row) for row in rows])
    input_ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    column = torch.arange(input_ids.shape[1])
    real = column < lengths[:, None]
    wanted = real & (column >= prompt_len[:, None])
    flat = torch.nonzero(wanted.flatten())[:, 0]
    return PackedMicroBatch(
        input_ids=input_ids,
        position_ids=column.expand_as(input_ids).contiguous(),
        attention_mask=real.long(),
        layout=None,
        source=flat - 1,
        target=input_ids.flatten()[flat],
    )


def shared_prompt_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: SharedLayout,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention over a packed row: prompts causally, responses to their prompt and causally to themselves.

    Args:
        query: [1, H, N, D]; key, value: [1, H_kv, N, D].

    Returns:
        [1, N, H, D] and None (no attention weights).
    """
    sdpa = nn.functional.scaled_dot_product_attention
    q, k, v = query[0], key[0], value[0]
    grouped = q.shape[0] != k.shape[0]

    def rows(x: Tensor, index: Tensor) -> Tensor:
        return x[:, index].transpose(0, 1)  # [H, rows, len, D] -> [rows, H, len, D]

    outputs = [
        sdpa(rows(q, index), rows(k, index), rows(v, index), is_causal=True, scale=scaling, enable_gqa=grouped)
        for index in layout.prompts
    ]
    for block in layout.responses:
        keys = torch.cat([block.prompt_index, block.index], dim=1)
        outputs.append(
            sdpa(
                rows(q, block.index),
                rows(k, keys),
                rows(v, keys),
                attn_mask=block.key_mask,
                scale=scaling,
                enable_gqa=grouped,
            )
        )
    flat = torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outputs])
    return flat[layout.gather][None], None


def supports_shared_prompts(config: Any, model_class: Any) -> bool:
    """True for models whose layers are all plain full attention behind transformers' attention interface."""
    layer_types = getattr(config, "layer_types", None) or []
    if any(kind != "full_attention" for kind in layer_types):
        return False
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return False
    if getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        return False
    if getattr(config, "attention_dropout", 0.0):
        return False
    return bool(getattr(model_class, "_supports_attention_backend", False))


class PackedModel(nn.Module):
    """A transformer over packed sequences: the part that policy and value model share.

    It is the root module for FSDP, so what stands behind the backbone may run inside its own ``forward``.

    Args:
        lm: a transformers model with ``get_decoder()``.
        shared_prompts: use the shared layout (see `supports_shared_prompts`).
    """

    def __init__(self, lm: nn.Module, *, shared_prompts: bool) -> None:
        super().__init__()
        self.lm = lm
        self.shared_prompts = shared_prompts
        if shared_prompts:
            from transformers import AttentionInterface

            AttentionInterface.register(ATTENTION_NAME, shared_prompt_attention)
            self.lm.config._attn_implementation = ATTENTION_NAME  # type: ignore[union-attr]

    def pack(self, pieces: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> PackedMicroBatch:
        """Build the model input in this model's layout."""
        return pack_shared(pieces) if self.shared_prompts else pack_padded(pieces)

    def hidden(self, batch: PackedMicroBatch) -> Tensor:
        """[M, H]: the hidden states that each target is predicted from."""
        extra = {"layout": batch.layout} if batch.layout is not None else {}
        decoder: Any = self.lm.get_decoder()  # type: ignore[operator]
        hidden: Tensor = decoder(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
            use_cache=False,
            **extra,
        ).last_hidden_state
        return hidden.flatten(0, 1)[batch.source]


class PolicyModel(PackedModel):
    """A causal language model that answers with log-probs and entropies of given tokens."""

    def forward(self, batch: PackedMicroBatch, temperature: float, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        """Log-probs [M] and entropies [M] of the targets, float32, after temperature.

        Entropies carry a gradient only if asked to (an entropy bonus needs it, a metric does not).
        """
        selected = self.hidden(batch)
        head: Any = self.lm.get_output_embeddings()  # type: ignore[operator]
        chunk = max(1, HEAD_ELEMENTS // head.weight.shape[0])
        if len(selected) <= chunk:
            return head_log_probs(head, selected, batch.target, temperature, entropy_grad)
        parts = [
            checkpoint(head_log_probs, head, h, t, temperature, entropy_grad, use_reentrant=False)
            for h, t in zip(torch.split(selected, chunk), torch.split(batch.target, chunk), strict=True)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


class ValueModel(PackedModel):
    """The backbone of a causal language model with a head of one number: what a critic learns.

    The head starts at zero, so an untrained critic says 0 everywhere.

    Args:
        causal_lm: a transformers causal LM; its vocabulary head is left behind.
        shared_prompts: use the shared layout (see `supports_shared_prompts`).
    """

    def __init__(self, causal_lm: nn.Module, *, shared_prompts: bool) -> None:
        backbone: Any = causal_lm.get_decoder()  # type: ignore[operator]
        super().__init__(backbone, shared_prompts=shared_prompts)
        width = backbone.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, dtype=backbone.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: PackedMicroBatch) -> Tensor:
        """Values [M] before each target is sampled, float32."""
        values: Tensor = self.head(self.hidden(batch))
        return values.float().sum(dim=1)  # not a view: FSDP hooks the output itself


def head_log_probs(
    head: nn.Module, hidden: Tensor, target: Tensor, temperature: float, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """Log-probs [M] and entropies [M] of softmax(head(hidden) / temperature) in float32."""
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    log_z = torch.logsumexp(logits, dim=-1)
    log_prob = logits.gather(1, target[:, None])[:, 0] - log_z
    if entropy_grad:
        return log_prob, log_z - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)
    with torch.no_grad():  # rows at a time, so that they stay in the cache
        rows = torch.split(logits, max(1, CACHED_ELEMENTS // logits.shape[1]))
        entropy = log_z - torch.cat([(torch.softmax(row, dim=-1) * row).sum(dim=-1) for row in rows])
    return log_prob, entropy

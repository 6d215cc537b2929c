"""The policy's forward pass: log-probs and entropies of response tokens, with shared prompts computed once.

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
HEAD_ELEMENTS = 2**25
"""Logits computed at a time (elements): 128 MiB in float32."""


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """Where the tokens of a packed row stand. ``N`` tokens: first all prompts, then all responses.

    G prompts padded to P, B responses padded to R. Index tensors point into the packed row; padding points at its
    first position and is masked out or dropped.
    """

    prompt_index: Tensor
    """[G, P] long"""
    response_index: Tensor
    """[B, R] long"""
    prompt_of: Tensor
    """[B] long: row of ``prompt_index``"""
    key_mask: Tensor
    """[B, 1, R, P + R] bool: what a response position may attend to"""
    gather: Tensor
    """[N] long: position of each packed token in the padded blocks, flattened (prompts, then responses)"""


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


def _to(record: Any, device: torch.device) -> Any:
    moved = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            moved[field.name] = value.to(device)
        elif is_dataclass(value):
            moved[field.name] = _to(value, device)
    return replace(record, **moved)


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
    p_max, r_max = int(p_len.max()), max(int(r_len.max()), 1)
    p_range, r_range = torch.arange(p_max), torch.arange(r_max)
    p_real = p_range < p_len[:, None]
    r_real = r_range < r_len[:, None]
    prompt_index = torch.where(p_real, p_start[:, None] + p_range, 0)
    response_index = torch.where(r_real, r_start[:, None] + r_range, 0)
    causal = r_range[:, None] >= r_range
    key_mask = torch.cat(
        [p_real[prompt_of][:, None, :].expand(-1, r_max, -1), causal.expand(len(responses), -1, -1)], dim=2
    )[:, None]
    gather = torch.cat([torch.nonzero(p_real.flatten())[:, 0], torch.nonzero(r_real.flatten())[:, 0] + p_real.numel()])
    positions = torch.cat([p_range.expand(len(prompts), -1)[p_real], (p_len[prompt_of][:, None] + r_range)[r_real]])
    last_prompt = (p_start + p_len - 1)[prompt_of]
    source = torch.where(r_range == 0, last_prompt[:, None], r_start[:, None] + r_range - 1)[r_real]
    return PackedMicroBatch(
        input_ids=torch.cat([*prompts, *responses])[None],
        position_ids=positions[None],
        attention_mask=None,
        layout=SharedLayout(prompt_index, response_index, prompt_of, key_mask, gather),
        source=source,
        target=torch.cat(responses),
    )


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

    def blocks(x: Tensor, index: Tensor) -> Tensor:
        return x[:, index].transpose(0, 1)  # [H, rows, len, D] -> [rows, H, len, D]

    kp, vp = blocks(k, layout.prompt_index), blocks(v, layout.prompt_index)
    prompt_out = sdpa(blocks(q, layout.prompt_index), kp, vp, is_causal=True, scale=scaling, enable_gqa=grouped)
    kr = torch.cat([kp[layout.prompt_of], blocks(k, layout.response_index)], dim=2)
    vr = torch.cat([vp[layout.prompt_of], blocks(v, layout.response_index)], dim=2)
    response_out = sdpa(
        blocks(q, layout.response_index), kr, vr, attn_mask=layout.key_mask, scale=scaling, enable_gqa=grouped
    )
    flat = torch.cat([prompt_out.transpose(1, 2).flatten(0, 1), response_out.transpose(1, 2).flatten(0, 1)])
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


class PolicyModel(nn.Module):
    """A causal language model that answers with log-probs and entropies of given tokens.

    It is the root module for FSDP, so the vocabulary head may run in chunks inside its own ``forward``.

    Args:
        causal_lm: a transformers causal LM with ``.get_decoder()`` and ``.get_output_embeddings()``.
        shared_prompts: use the shared layout (see `supports_shared_prompts`).
    """

    def __init__(self, causal_lm: nn.Module, *, shared_prompts: bool) -> None:
        super().__init__()
        self.lm = causal_lm
        self.shared_prompts = shared_prompts
        if shared_prompts:
            from transformers import AttentionInterface

            AttentionInterface.register(ATTENTION_NAME, shared_prompt_attention)
            self.lm.config._attn_implementation = ATTENTION_NAME  # type: ignore[union-attr]

    def pack(self, pieces: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> PackedMicroBatch:
        """Build the model input in this model's layout."""
        return pack_shared(pieces) if self.shared_prompts else pack_padded(pieces)

    def forward(self, batch: PackedMicroBatch, temperature: float, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        """Log-probs [M] and entropies [M] of the targets, float32, after temperature.

        Entropies carry a gradient only if asked to (an entropy bonus needs it, a metric does not).
        """
        extra = {"layout": batch.layout} if batch.layout is not None else {}
        decoder: Any = self.lm.get_decoder()  # type: ignore[operator]
        hidden = decoder(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
            use_cache=False,
            **extra,
        ).last_hidden_state
        selected = hidden.flatten(0, 1)[batch.source]
        head: Any = self.lm.get_output_embeddings()  # type: ignore[operator]
        chunk = max(1, HEAD_ELEMENTS // head.weight.shape[0])
        if len(selected) <= chunk:
            return head_log_probs(head, selected, batch.target, temperature, entropy_grad)
        parts = [
            checkpoint(head_log_probs, head, h, t, temperature, entropy_grad, use_reentrant=False)
            for h, t in zip(torch.split(selected, chunk), torch.split(batch.target, chunk), strict=True)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def head_log_probs(
    head: nn.Module, hidden: Tensor, target: Tensor, temperature: float, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """Log-probs [M] and entropies [M] of softmax(head(hidden) / temperature) in float32."""
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    log_z = torch.logsumexp(logits, dim=-1)
    log_prob = logits.gather(1, target[:, None])[:, 0] - log_z
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = log_z - (torch.exp(logits - log_z[:, None]) * logits).sum(dim=-1)
    return log_prob, entropy

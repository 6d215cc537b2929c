"""Which models the `torch` engine can run exactly: those whose layers all have full attention over a plain KV cache."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from agentgym.errors import ConfigError, EnvError, boundary
from agentgym.trainer.rollout.attention import ATTENTION, SharedPrefix, added, visible
from agentgym.trainer.rollout.kv_cache import KVCache, rounded_up

REMEDY = "Use rollout=vllm for it, or a model whose layers all have full attention."


def check_model(model: Any, max_length: int, device: torch.device) -> bool:
    """Raise `ConfigError` unless the engine runs the model exactly; switches the model to the engine's attention.

    Returns:
        Whether the model is exact, too, where rows are read together (`agentgym.trainer.rollout.attention`).
    """
    kind = model.config.model_type
    if model.config.is_encoder_decoder or model._is_stateful:
        raise ConfigError(
            f"model type {kind!r} is recurrent, hybrid or an encoder-decoder: the torch engine keeps keys and values "
            f"of full attention only. {REMEDY}"
        )
    check_config(model.config, max_length)
    tokens = torch.arange(1, 9, device=device)[None] % model.config.vocab_size
    limit = 1e-3 if model.dtype == torch.float32 else 0.25
    what = f"a trial run of model type {kind!r} in the torch engine"
    try:
        with boundary(what), torch.inference_mode():
            expected = logprobs_alone(model, tokens)
            gap = trial_gap(model, tokens, expected, together=False)
    except EnvError as error:
        raise ConfigError(f"{error}. {REMEDY}") from error
    if not gap <= limit:
        raise ConfigError(
            f"model type {kind!r} does not give the same log-probs through the torch engine's cache: they differ by "
            f"{gap:.2g}, expected at most {limit:.2g} in {model.dtype}. {REMEDY}"
        )
    try:
        with boundary(what), torch.inference_mode():
            return trial_gap(model, tokens, expected, together=True) <= limit
    except EnvError:  # it takes no further arguments, its keys are wider than its values, or there is no kernel for it
        return False


def check_config(config: Any, max_length: int) -> None:
    """Raise `ConfigError` for a configuration with anything but full attention, or too few positions."""
    kind = config.model_type
    others = sorted({t for t in getattr(config, "layer_types", None) or () if t != "full_attention"})
    if others:
        raise ConfigError(
            f"model type {kind!r} has layers of type {', '.join(others)}: the torch engine keeps keys and values of "
            f"full attention only. {REMEDY}"
        )
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(config, name, None) is not None:
            raise ConfigError(
                f"model type {kind!r} has {name}={getattr(config, name)}: the torch engine has full attention only. "
                f"{REMEDY}"
            )
    rope = getattr(config, "rope_parameters", None) or {}
    if isinstance(rope, dict) and "rope_type" in rope and rope["rope_type"] in ("dynamic", "longrope"):
        raise ConfigError(
            f"model type {kind!r} has rope_type={rope['rope_type']!r}, whose positions depend on the longest row of a "
            f"batch: the torch engine would not be exact. {REMEDY}"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        raise ConfigError(
            f"max_length={max_length} is more than the {positions} positions of the model "
            f"(max_position_embeddings): lower it to {positions}"
        )


def logprobs_alone(model: Any, tokens: Tensor) -> Tensor:
    """Log-probs of the model by itself after each of the tokens [1, T]; switches it to the engine's attention then."""
    if model.config._attn_implementation == ATTENTION:
        model.set_attn_implementation("sdpa")
    expected: Tensor = model(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)
    model.set_attn_implementation(ATTENTION)
    return expected


def trial_gap(model: Any, tokens: Tensor, expected: Tensor, *, together: bool) -> float:
    """Largest difference of log-probs between ``expected`` and the model as the engine runs it.

    It is large where the model has a layer that the engine does not know, such as a recurrent state or a soft cap on
    attention logits; infinite where the model does not use the engine's cache.

    Args:
        model: to try, with the engine's attention.
        tokens: [1, 8].
        expected: log-probs after each of the tokens.
        together: read the first tokens as those that rows have in common.
    """
    device = tokens.device
    positions = torch.arange(8, device=device)[None]
    cache = KVCache(model.config.num_hidden_layers, 2, 8, device)
    columns = torch.arange(rounded_up(8), device=device)
    got = []
    for start, end in ((0, 6), (6, 7), (7, 8)):
        at = positions[:, start:end]
        extras = {"shared_prefix": SharedPrefix.of(cache, [[0]], 4)} if together and start else {}
        mask = visible(columns, at)
        if start:  # as in a decode step
            mask = added(mask, model.dtype)
        cache.aim([0], at, len(columns))
        got.append(
            model(
                input_ids=tokens[:, start:end],
                position_ids=at,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                **extras,
            ).logits
        )
    if cache.keys is None:
        return math.inf
    return float((torch.cat(got, dim=1).float().log_softmax(-1) - expected).abs().max())

"""Which model families the torch engine runs exactly, and that it refuses the others before anything starts."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from agentgym.errors import ConfigError
from agentgym.generation import SamplingParams
from agentgym.trainer.rollout import decoder
from agentgym.trainer.rollout.torch_engine import TorchEngine

SIZES = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 2,
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
}
"""Attention whose keys are wider than its values."""

ALONE = ("DeepseekV3", "DiffLlama")
"""Families whose rows cannot be read together; the second one rearranges the values that it reads."""


def make(family: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SIZES | settings))
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Llama", {"num_key_value_heads": 1, "head_dim": 16}),
        ("Qwen2", {"num_key_value_heads": 2}),
        ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
        ("Mistral", {"num_key_value_heads": 2, "sliding_window": None}),
        ("Olmo2", {"num_key_value_heads": 2}),
        ("Gemma", {"num_key_value_heads": 1, "head_dim": 16}),
        ("GPTNeoX", {}),
        ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 2, "sliding_window": None}),
        ("Phi", {}),
        ("SmolLM3", {"num_key_value_heads": 2, "no_rope_layers": [1, 0]}),
        ("DeepseekV3", LATENT),
        ("DiffLlama", {"num_key_value_heads": 2}),
    ],
)
async def test_families_with_full_attention_are_exact(
    monkeypatch: pytest.MonkeyPatch, family: str, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(decoder, "MIN_SPARED_BYTES", 1)
    alone = make(family, **settings)
    engine = TorchEngine(make(family, **settings), max_slots=3, max_length=100, num_threads=1)

    async def play(session: int) -> None:
        history = [7, 8, 9, *random.Random(session).choices(range(1, 120), k=2 + 9 * session)]
        for _ in range(2):
            generation = await engine.generate(
                history, SamplingParams(max_tokens=4 + session, seed=session), f"{session}"
            )
            ids = torch.tensor([[*history, *generation.token_ids]])
            with torch.inference_mode():
                logprobs = alone(input_ids=ids, use_cache=False).logits[0, len(history) - 1 : -1].log_softmax(-1)
            expected = logprobs.gather(-1, ids[0, len(history) :, None])[:, 0].tolist()
            assert generation.logprobs == pytest.approx(expected, abs=1e-4)
            history = [*ids[0].tolist(), 1, 2, 3]

    await asyncio.gather(*(play(session) for session in range(4)))
    assert (engine.stats()["shared_steps"] > 0) == (family not in ALONE)
    await engine.aclose()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sliding window": (lambda: make("Mistral", sliding_window=64), "sliding_window=64"),
    "layers of two kinds": (
        lambda: make("Gemma2", head_dim=8, num_key_value_heads=1, sliding_window=8),
        "'gemma2' has layers of type sliding_attention",
    ),
    "recurrent": (
        lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
        ),
        "'mamba' is recurrent, hybrid",
    ),
    "rope that depends on the batch": (
        lambda: make("Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
        "rope_type='dynamic'",
    ),
    "too few positions": (
        lambda: make("Llama", max_position_embeddings=64),
        "max_length=100 is more than the 64 positions",
    ),
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_other_models_are_refused_with_the_reason(kind: str) -> None:
    build, reason = REFUSED[kind]
    with pytest.raises(ConfigError, match=reason):
        TorchEngine(build(), max_slots=2, max_length=100)


@pytest.mark.parametrize(("slots", "length"), [(0, 10), (1, 1)])
def test_limits_that_hold_nothing_are_refused(slots: int, length: int) -> None:
    with pytest.raises(ConfigError, match=f"max_slots={slots}, max_length={length}"):
        TorchEngine(make("Llama"), max_slots=slots, max_length=length)


async def test_half_precision_models_run() -> None:
    alone = make("Llama").to(torch.bfloat16)
    engine = TorchEngine(make("Llama").to(torch.bfloat16), max_slots=2, max_length=64, num_threads=1)
    generation = await engine.generate([1, 2, 3], SamplingParams(max_tokens=6, seed=0), "s")
    ids = torch.tensor([[1, 2, 3, *generation.token_ids]])
    logprobs = alone(input_ids=ids, use_cache=False).logits[0, 2:-1].float().log_softmax(-1)
    expected = logprobs.gather(-1, ids[0, 3:, None])[:, 0].tolist()
    assert generation.logprobs == pytest.approx(expected, abs=0.1)
    await engine.aclose()


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_attention_that_the_engine_does_not_know_is_refused(name: str) -> None:
    """A soft cap of 50 would pass the trial run: it changes small logits by less than its limit."""
    model = make("Llama")
    for layer in model.model.layers:
        plain = layer.self_attn.forward
        layer.self_attn.forward = functools.partial(plain, **{name: 50.0})
    with pytest.raises(ConfigError, match=f"attention with {name}=50.0"):
        TorchEngine(model, max_slots=2, max_length=100)

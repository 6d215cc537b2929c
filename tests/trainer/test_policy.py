"""The shared-prompt forward pass against a plain one, value and gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen2Config, Qwen2ForCausalLM, Qwen3Config
from transformers.models.mistral import MistralForCausalLM
from transformers.models.qwen3 import Qwen3ForCausalLM

from agentgym.trainer import policy
from agentgym.trainer.policy import PolicyModel, head_log_probs, supports_shared_prompts

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def make(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SIZES))
    return Qwen3ForCausalLM(Qwen3Config(**SIZES))


def pieces(seed: int) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> torch.Tensor:
        return torch.randint(0, 97, (n,), generator=generator)

    return [(ids(11), [ids(5), ids(1), ids(9)]), (ids(4), [ids(7)]), (ids(1), [ids(2), ids(3)])]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_shared_prompts_give_the_log_probs_and_gradients_of_separate_rows(kind: str) -> None:
    lm = make(kind)
    plain, shared = copy.deepcopy(lm), lm
    plain.set_attn_implementation("sdpa")
    assert supports_shared_prompts(lm.config, type(lm))
    models = [PolicyModel(shared, shared_prompts=True), PolicyModel(plain, shared_prompts=False)]
    results = []
    for model in models:
        log_prob, entropy = model(model.pack(pieces(1)), 0.7, True)
        weights = torch.linspace(-1, 1, len(log_prob))
        (log_prob * weights + 0.1 * entropy).sum().backward()
        results.append((log_prob, entropy, [p.grad for p in model.parameters()]))
    (log_a, ent_a, grad_a), (log_b, ent_b, grad_b) = results
    assert torch.allclose(log_a, log_b, atol=2e-6)
    assert torch.allclose(ent_a, ent_b, atol=2e-6)
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(grad_a, grad_b, strict=True))


def test_targets_are_all_response_tokens_row_by_row_and_match_transformers() -> None:
    lm = make("llama")
    model = PolicyModel(copy.deepcopy(lm), shared_prompts=True)
    packed = model.pack(pieces(2))
    log_prob, _ = model(packed, 1.0, False)
    lm.set_attn_implementation("sdpa")
    expected = []
    for prompt, members in pieces(2):
        for response in members:
            logits = lm(torch.cat([prompt, response])[None]).logits[0].log_softmax(-1)
            expected.append(logits[len(prompt) - 1 : -1].gather(1, response[:, None])[:, 0])
    assert torch.equal(packed.target, torch.cat([r for _, members in pieces(2) for r in members]))
    assert torch.allclose(log_prob, torch.cat(expected), atol=2e-6)


def test_the_head_in_chunks_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = make("llama")
    model = PolicyModel(lm, shared_prompts=True)
    whole = model(model.pack(pieces(3)), 1.0, True)
    sum(whole).sum().backward()  # type: ignore[union-attr, arg-type]
    gradient = lm.lm_head.weight.grad.clone()
    lm.zero_grad()
    monkeypatch.setattr(policy, "HEAD_ELEMENTS", 97 * 4)
    chunks = model(model.pack(pieces(3)), 1.0, True)
    sum(chunks).sum().backward()  # type: ignore[union-attr, arg-type]
    assert torch.allclose(whole[0], chunks[0], atol=1e-6)
    assert torch.allclose(whole[1], chunks[1], atol=1e-6)
    assert torch.allclose(gradient, lm.lm_head.weight.grad, atol=1e-5)


def test_log_probs_are_those_of_the_sampled_distribution() -> None:
    # C14
    head = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.eye_(head.weight)
    log_prob, _ = head_log_probs(head, torch.tensor([[2.0, 0.0]]), torch.tensor([0]), 0.5, False)
    assert log_prob.item() == pytest.approx(-0.0181499, abs=1e-6)


def test_models_with_sliding_windows_use_padded_rows() -> None:
    config = MistralConfig(**SIZES, sliding_window=8)
    assert not supports_shared_prompts(config, MistralForCausalLM)
    assert supports_shared_prompts(MistralConfig(**SIZES, sliding_window=None), MistralForCausalLM)

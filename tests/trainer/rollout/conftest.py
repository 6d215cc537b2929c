"""A small random model, a byte tokenizer, and the engines that the contract tests go through."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentgym.trainer.rollout.scripted import ScriptedEngine
from agentgym.trainer.rollout.torch_engine import TorchEngine

VOCABULARY = 300


def random_llama(key_heads: int = 2, seed: int = 0, **settings: Any) -> Any:
    """A Llama of two layers whose logits are spread enough for greedy choices to be clear."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=key_heads,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        **settings,
    )
    return LlamaForCausalLM(config).eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and ``<|im_end|>`` as the end of a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    assert fast.eos_token_id == len(alphabet)
    return fast


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def llama() -> Callable[..., Any]:
    """Makes the small random model: ``llama(key_heads=2, seed=0)``."""
    return random_llama


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


MakeEngine = Callable[..., TorchEngine]


@pytest.fixture
async def make_engine(tokenizer: PreTrainedTokenizerFast) -> AsyncIterator[MakeEngine]:
    """Makes torch engines that are closed after the test; keywords go to the constructor."""
    made: list[TorchEngine] = []

    def make(model: Any = None, **settings: Any) -> TorchEngine:
        settings = {"max_slots": 8, "max_length": 256, "num_threads": 1, "tokenizer": tokenizer} | settings
        made.append(TorchEngine(model if model is not None else random_llama(), **settings))
        return made[-1]

    yield make
    for engine in made:
        await engine.aclose()


def make_torch(tokenizer: Any) -> TorchEngine:
    return TorchEngine(random_llama(), max_slots=4, max_length=256, num_threads=1, tokenizer=tokenizer)


def make_scripted(tokenizer: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda session, turn, prompt: f"{session}, turn {turn}: " + 20 * "la ", tokenizer=tokenizer)


ENGINES: dict[str, Callable[[Any], Any]] = {"torch": make_torch, "scripted": make_scripted}
"""Every engine that must hold the contract, by name."""


@pytest.fixture(params=list(ENGINES))
async def any_engine(request: pytest.FixtureRequest, tokenizer: Any) -> AsyncIterator[Any]:
    made = ENGINES[request.param](tokenizer)
    engine = await made if isinstance(made, Awaitable) else made
    yield engine
    await engine.aclose()

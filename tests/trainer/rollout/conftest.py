"""A small random model, a byte tokenizer, and the engines that the contract tests go through."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentgym.settings import VllmConfig
from agentgym.trainer.rollout.scripted import ScriptedEngine
from agentgym.trainer.rollout.torch_engine import TorchEngine
from agentgym.trainer.rollout.vllm_support import installed, made_for_gpus

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


class OnLoop:
    """An engine in an event loop of its own: tests, which have a loop each, can share it.

    Cancelling a call cancels it there.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.engine = make()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.engine, name)
        if not inspect.iscoroutinefunction(value):
            return value

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(value(*args, **kwargs), self._loop))

        return call

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.engine.aclose(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class EngineFarm:
    """Makes the engines of the contract tests; vLLM, which takes long to start, once for all tests."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self._vllm: OnLoop | None = None

    def model(self, seed: int = 0) -> Any:
        """The model that all engines run. vLLM has no kernels for heads narrower than 32."""
        return random_llama(seed=seed, head_dim=32)

    def on_loop(self, make: Callable[[], Any]) -> OnLoop:
        """An engine that tests with a loop each can share."""
        return OnLoop(make)

    async def torch(self) -> TorchEngine:
        return TorchEngine(self.model(), max_slots=4, max_length=256, num_threads=1, tokenizer=self.tokenizer)

    async def scripted(self) -> ScriptedEngine:
        return ScriptedEngine(
            lambda session, turn, prompt: f"{session}, turn {turn}: " + 20 * "la ", tokenizer=self.tokenizer
        )

    async def vllm(self) -> OnLoop:
        from agentgym.trainer.rollout.vllm_engine import VllmEngine
        from agentgym.trainer.rollout.vllm_setup import EngineOptions

        if installed() is None:
            pytest.skip("vLLM is not installed")
        if self._vllm is None or self._vllm.engine.closed:
            model = self.folder / "model"
            if not model.exists():
                self.model().save_pretrained(model)
                self.tokenizer.save_pretrained(model)
            gpu = torch.cuda.is_available() and made_for_gpus()
            options = EngineOptions(model=str(model), max_slots=16, max_length=256, gpu=gpu, settings=VllmConfig())
            self._vllm = OnLoop(lambda: VllmEngine(options))
            await self._vllm.ready()
        elif self._vllm.version:
            await self._vllm.update_weights(self.model().state_dict(), self._vllm.version + 1)
        return self._vllm

    def close(self) -> None:
        if self._vllm is not None:
            self._vllm.stop()


@pytest.fixture(scope="session")
def farm(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[EngineFarm]:
    made = EngineFarm(tmp_path_factory.mktemp("vllm"), tokenizer)
    yield made
    made.close()


VLLM = pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")])
"""vLLM's imports warn of much that is not ours."""

ENGINES = ["torch", VLLM, "scripted"]
"""Every engine that must hold the contract; the name is a method of `EngineFarm`."""

MODEL_ENGINES = ["torch", VLLM]
"""Those that run a model."""


async def _engine(name: str, farm: EngineFarm) -> AsyncIterator[Any]:
    engine = await getattr(farm, name)()
    yield engine
    if not isinstance(engine, OnLoop):
        await engine.aclose()


@pytest.fixture(params=ENGINES)
async def any_engine(request: pytest.FixtureRequest, farm: EngineFarm) -> AsyncIterator[Any]:
    async for engine in _engine(request.param, farm):
        yield engine


@pytest.fixture(params=MODEL_ENGINES)
async def model_engine(request: pytest.FixtureRequest, farm: EngineFarm) -> AsyncIterator[Any]:
    async for engine in _engine(request.param, farm):
        yield engine


@pytest.fixture
def reference(farm: EngineFarm) -> Callable[..., Any]:
    """The model of the engines, by seed: 0 is what they start with."""
    return farm.model

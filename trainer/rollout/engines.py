"""Rollout engines by name, and what the rollout worker needs of one besides generating."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from agentgym import registration
from agentgym.errors import ConfigError, did_you_mean
from agentgym.generation import Generator
from agentgym.rewards.config import RewardConfig
from agentgym.settings import EnvConfig, ModelConfig, RolloutConfig
from agentgym.trainer.cluster import Worker
from agentgym.trainer.model import load_causal_lm
from agentgym.trainer.rollout.scripted import ScriptedEngine, oracle_player
from agentgym.trainer.rollout.torch_engine import TorchEngine

ENGINES = ("torch", "scripted")


class Engine(Generator, Protocol):
    """A generator that a trainer can feed new weights."""

    def begin_batch(self, keys: Sequence[str], limit: int) -> None:
        """Announce the session keys to come, in order, of which at most ``limit`` are open at once."""

    def finish(self, key: str) -> None:
        """The session of that key will ask for nothing more."""

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Atomic with respect to requests; caches of older weights are invalid afterwards."""

    def stats(self) -> dict[str, float]:
        """Counters since the start."""

    async def aclose(self) -> None:
        """Stop. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSetup:
    """What training and evaluation tell a rollout worker."""

    plugins: Sequence[str]
    envs: Sequence[EnvConfig]
    """One, or those of a mixture."""
    model: ModelConfig
    rollout: RolloutConfig
    threads: int | None
    """CPU threads of the engine; None: all cores."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: Sequence[Worker] = ()
    """Workers that hold the reward model; empty: it is loaded where it is needed."""


def make_engine(setup: RolloutSetup, tokenizer: Any) -> Engine:
    """The engine that ``rollout.engine`` names."""
    settings = setup.rollout
    threads = setup.threads if setup.threads is not None else (os.cpu_count() or 1)
    if settings.engine == "torch":
        return TorchEngine(
            load_causal_lm(setup.model.path, dtype=setup.model.dtype, revision=setup.model.revision),
            tokenizer=tokenizer,
            max_slots=settings.max_slots,
            max_length=settings.max_prompt_length + settings.max_response_length,
            deterministic=settings.deterministic is not False,
            num_threads=threads,
        )
    if settings.engine == "scripted":
        made: list[Any] = [registration.make(env.name, **env.kwargs) for env in setup.envs]
        return ScriptedEngine(
            oracle_player([env.unwrapped for env in made], settings.parser, tokenizer), tokenizer=tokenizer
        )
    raise ConfigError(
        f"rollout.engine={settings.engine!r} is not available.{did_you_mean(settings.engine, ENGINES)} "
        f"Known: {', '.join(ENGINES)}"
    )

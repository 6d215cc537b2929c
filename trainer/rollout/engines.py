"""Rollout engines by name, and what the rollout worker needs of one besides generating."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from agentgym import registration
from agentgym.errors import ConfigError, did_you_mean
from agentgym.generation import Generator
from agentgym.rewards.config import RewardConfig
from agentgym.settings import EnvConfig, ModelConfig, RolloutConfig
from agentgym.trainer.cluster import Worker
from agentgym.trainer.model import load_causal_lm
from agentgym.trainer.model_path import resolve_model_path
from agentgym.trainer.rollout.router import EngineHandle, EngineRouter
from agentgym.trainer.rollout.scripted import ScriptedEngine, oracle_player
from agentgym.trainer.rollout.torch_engine import TorchEngine
from agentgym.trainer.rollout.vllm_actors import Place, RayEngines
from agentgym.trainer.rollout.vllm_engine import VllmEngine
from agentgym.trainer.rollout.vllm_setup import EngineOptions
from agentgym.trainer.rollout.vllm_support import check_vllm, made_for_gpus

ENGINES = ("torch", "vllm", "scripted")


class Engine(Generator, Protocol):
    """A generator that a trainer can feed new weights."""

    checksum: int | None
    """`agentgym.trainer.rollout.weights.checksum` of the weights it took last; None before, or where it has none."""

    async def ready(self) -> None:
        """Wait until requests can be served. Raises `InfraError` where that will not happen."""

    def begin_batch(self, keys: Sequence[str], limit: int) -> None:
        """Announce the session keys to come, in order, of which at most ``limit`` are open at once."""

    def finish(self, key: str) -> None:
        """The session of that key will ask for nothing more."""

    async def rest(self) -> None:
        """Free what the trainer needs until the next request or update."""

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
    places: Sequence[Place] = ()
    """Where the trainer computes, by rank, if the engines use the same GPUs."""
    trainer_gpus: int = 0
    """GPUs of the Ray cluster that are the trainer's alone."""

    @property
    def vllm_on_gpu(self) -> bool:
        """Whether this is vLLM, and the installed one is made for GPUs."""
        return self.rollout.engine == "vllm" and made_for_gpus()


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
    if settings.engine == "vllm":
        return make_vllm(setup, threads)
    if settings.engine == "scripted":
        made: list[Any] = [registration.make(env.name, **env.kwargs) for env in setup.envs]
        return ScriptedEngine(
            oracle_player([env.unwrapped for env in made], settings.parser, tokenizer), tokenizer=tokenizer
        )
    raise ConfigError(
        f"rollout.engine={settings.engine!r} is not available.{did_you_mean(settings.engine, ENGINES)} "
        f"Known: {', '.join(ENGINES)}"
    )


def make_vllm(setup: RolloutSetup, threads: int) -> EngineRouter:
    """vLLM engines behind a router: Ray actors where this is a Ray actor itself, else in this process."""
    settings = setup.rollout.vllm
    on_ray = in_ray_actor()
    check_vllm()
    gpus = len(setup.places)
    if not gpus and made_for_gpus():
        gpus = existing_gpus(on_ray) - setup.trainer_gpus
        if gpus < settings.tensor_parallel and setup.trainer_gpus:
            raise ConfigError(
                f"rollout.vllm.colocate=false: the trainer takes {setup.trainer_gpus} of {setup.trainer_gpus + gpus} "
                f"GPUs and leaves too few for an engine of {settings.tensor_parallel}: lower trainer.workers"
            )
    count = settings.engines if settings.engines is not None else max(1, gpus // settings.tensor_parallel)
    if gpus and count * settings.tensor_parallel > gpus:
        raise ConfigError(
            f"rollout.vllm.engines={count} x rollout.vllm.tensor_parallel={settings.tensor_parallel} is more than the "
            f"{gpus} GPUs there are for them: lower one of them"
        )
    transfer: Literal["ipc", "nccl"] | None = None
    if on_ray and gpus:
        transfer = "ipc" if setup.places else "nccl"
    options = EngineOptions(
        model=resolve_model_path(setup.model.path),
        revision=setup.model.revision,
        dtype=setup.model.dtype,
        max_slots=setup.rollout.max_slots,
        max_length=setup.rollout.max_prompt_length + setup.rollout.max_response_length,
        threads=max(1, threads // count),
        share=1 / count,
        gpu=gpus > 0,
        colocated=bool(setup.places),
        transfer=transfer,
        settings=settings,
    )

    def in_process(_number: int) -> EngineHandle:
        return VllmEngine(options)

    make: Callable[[int], EngineHandle] = in_process
    if on_ray:
        places = places_of_engines(setup.places, count, settings.tensor_parallel)
        make = RayEngines(options, gpus=settings.tensor_parallel if gpus and not places else 0, places=places)
    return EngineRouter(
        make,
        count,
        request_timeout=settings.request_timeout,
        start_timeout=settings.start_timeout,
        health_every=settings.health_every,
    )


def places_of_engines(places: Sequence[Place], count: int, tensor_parallel: int) -> list[list[Place]]:
    """The trainer's places shared out to ``count`` engines, those of one engine on one machine. Empty without places.

    Raises:
        ConfigError: no machine has as many places left as an engine needs.
    """
    if not places:
        return []
    by_node: dict[str, list[Place]] = {}
    for place in places:
        by_node.setdefault(place.node, []).append(place)
    chunks = [
        mine[start : start + tensor_parallel]
        for mine in by_node.values()
        for start in range(0, len(mine) - tensor_parallel + 1, tensor_parallel)
    ]
    if len(chunks) < count:
        raise ConfigError(
            f"rollout.vllm.engines={count} with rollout.vllm.tensor_parallel={tensor_parallel}: the trainer's machines "
            f"have {[len(mine) for mine in by_node.values()]} GPUs, room for {len(chunks)} engines; lower one of them"
        )
    return chunks[:count]


def in_ray_actor() -> bool:
    """Whether this process is a Ray actor, so that it may start others."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def existing_gpus(on_ray: bool) -> int:
    """GPUs of the Ray cluster, or of this machine."""
    if on_ray:
        import ray

        return int(ray.cluster_resources().get("GPU", 0))
    return torch.cuda.device_count()

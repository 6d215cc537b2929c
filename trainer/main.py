"""A training run from its configuration to its summary: folder, cluster, workers, the fit loop, and a clean end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from agentgym import plugins
from agentgym.atomic import write_atomically
from agentgym.config import dump_config, load_config
from agentgym.console import Console, RunSummary
from agentgym.errors import ConfigError
from agentgym.rewards.config import make_reward_manager
from agentgym.rewards.model import ModelManager
from agentgym.settings import ModelConfig
from agentgym.trainer import checkpoint, tracking
from agentgym.trainer.cluster import Cluster, InlineCluster, RayCluster, Worker
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.data import TaskSampler, load_curriculum
from agentgym.trainer.groups import (
    ActorGroup,
    CriticGroup,
    ModelGroup,
    ReferenceGroup,
    RewardModelGroup,
    RolloutGroup,
)
from agentgym.trainer.loggers import make_loggers
from agentgym.trainer.loop import Trainer
from agentgym.trainer.replay import Replay
from agentgym.trainer.rollout.engines import RolloutSetup
from agentgym.trainer.tasks import load_tasks

INTERRUPTED = 130
"""Exit code after Ctrl-C; a SIGTERM gives 143."""


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a request to stop, the second into `KeyboardInterrupt`."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        return 0 if self.signal is None else 128 + self.signal

    def install(self) -> dict[int, Any]:
        """Handle both signals; gives back the handlers that were there. Once more after Ray has put in its own."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.signal is not None:
                raise KeyboardInterrupt
            self.signal = number

        return {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle both signals inside the block; the old handlers come back after it."""
        old = self.install()
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def run(config: TrainConfig, console: Console) -> int:
    """Train as configured and return the exit code: 0, or 130 after Ctrl-C (143 after SIGTERM)."""
    start = time.monotonic()
    stop = StopRequest()
    folder, resumed_from = prepare_folder(config, console)
    reached = checkpoint.step_of(resumed_from) if resumed_from is not None else 0
    if config.trainer.total_steps is not None and reached >= config.trainer.total_steps:
        console.line(
            f"nothing to do: {folder} is at step {reached} of trainer.total_steps={config.trainer.total_steps}"
        )
        return 0
    with stop.installed(), ExitStack() as stack:
        console.line(f"run {folder}")
        trainer = build(config, folder, resumed_from, console, stop, stack)
        if trainer.step >= trainer.total_steps:
            console.line(f"nothing to do: {folder} is at step {trainer.step} of {trainer.total_steps}")
            return 0
        trainer.fit()
    for line in summarise(trainer, folder, time.monotonic() - start).lines():
        console.line(line)
    return stop.exit_code


def prepare_folder(config: TrainConfig, console: Console) -> tuple[Path, Path | None]:
    """The run's folder and the checkpoint to resume from (None for a new run, or one that never saved)."""
    settings = config.trainer
    if settings.resume is not None:
        folder = Path(settings.resume)
        if not (folder / "config.yaml").exists():
            raise ConfigError(f"trainer.resume={settings.resume!r}: no run folder there (it has no config.yaml)")
        record_changes(folder / "config.yaml", config, console)
        checkpoints = folder / "checkpoints"
        checkpoint.remove_leftovers(checkpoints)
        return folder, checkpoint.latest(checkpoints)
    model = Path(config.model.path).name
    name = settings.name if settings.name is not None else f"{config.env.name}-{model}-{config.algo.name}"
    folder = tracking.create_run_folder(settings.run_dir, name.replace("/", "-"))
    write_atomically(folder / "config.yaml", dump_config(config))
    return folder, None


def record_changes(path: Path, config: TrainConfig, console: Console) -> None:
    """Show and write what a resumed run changes. Raises `ConfigError` where that would make it another run."""
    recorded = load_config(TrainConfig, files=[path])
    for name, before, after in (
        ("env", recorded.env.name, config.env.name),
        ("model", recorded.model.path, config.model.path),
    ):
        if before != after:
            raise ConfigError(f"{name}={after}: the run to resume has {name}={before}; start a new run for another one")
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"resume": None})})
    old, new = flat(recorded.model_dump(mode="json")), flat(config.model_dump(mode="json"))
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    for key in changed:
        console.line(f"changed {key}: {old.get(key)} -> {new.get(key)}")
    if changed:
        write_atomically(path, dump_config(config))


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys."""
    result: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def build(
    config: TrainConfig,
    folder: Path,
    resumed_from: Path | None,
    console: Console,
    stop: StopRequest,
    stack: ExitStack,
) -> Trainer:
    """Start cluster and workers and put the trainer together; everything is taken down again by ``stack``."""
    tracking.write_environment(folder)
    train_tasks, val_tasks = load_tasks(config, console.line)
    sampler = TaskSampler(
        train_tasks,
        batch_size=config.data.batch_size,
        seed=config.data_seed,
        shuffle=config.data.shuffle,
        weights=config.env.weight,
        curriculum=load_curriculum(config.data.curriculum),
    )
    console.line("starting workers")
    cluster = make_cluster(config)
    stack.callback(cluster.close)
    stop.install()
    model = config.model if resumed_from is None else config.model.model_copy(update={"path": str(resumed_from)})
    room = models_per_gpu(config, cluster)
    actor, rollout = start_policy(config, model, cluster, stack, room)
    reference = ReferenceGroup(cluster, config, room=room, beside=actor) if config.algo.needs_reference else None
    critic = CriticGroup(cluster, config, room=room, beside=actor) if config.needs_critic else None
    groups: tuple[ModelGroup | None, ...] = (actor, reference, critic)
    for group in filter(None, groups):
        group.ready()
    resume_step = None
    if config.trainer.resume is not None:
        resume_step = checkpoint.step_of(resumed_from) if resumed_from is not None else -1
    loggers = make_loggers(config.trainer.loggers, folder, config.model_dump(mode="json"), resume_step=resume_step)
    log = tracking.RunLog(folder, loggers=loggers, resume_step=resume_step)
    stack.callback(log.close)
    log.vocabulary(vocabulary := actor.vocabulary())
    if isinstance(rollout, Replay):
        rollout.check(vocabulary)
    total_steps = config.num_steps(len(train_tasks))
    progress = stack.enter_context(console.progress(total_steps, done=max(0, resume_step or 0)))
    trainer = Trainer(
        config,
        actor=actor,
        rollout=rollout,
        reference=reference,
        critic=critic,
        sampler=sampler,
        val_tasks=val_tasks,
        log=log,
        progress=progress,
        stop=stop,
        total_steps=total_steps,
    )
    if resumed_from is not None:
        trainer.resume(resumed_from)
    return trainer


def start_policy(
    config: TrainConfig, model: ModelConfig, cluster: Cluster, stack: ExitStack, room: int
) -> tuple[ActorGroup, RolloutGroup | Replay]:
    """The workers that train ``model`` and those that play with it, or what stands in for them in a replay.

    ``room`` is how many models share the GPUs of the trained one.
    """
    current = config.model_copy(update={"model": model})
    if config.trainer.replay is not None:
        return ActorGroup(cluster, current, room=room), Replay(Path(config.trainer.replay))
    setup = RolloutSetup(
        plugins=config.plugins,
        envs=config.env.members(),
        model=model,
        rollout=config.rollout,
        threads=config.trainer.threads,
        reward=config.reward.shipped(),
        reward_model=start_reward_model(config, cluster),
    )
    actor: ActorGroup | None = None
    if cluster.gpus and setup.vllm_on_gpu and config.rollout.vllm.colocate:
        actor = ActorGroup(cluster, current, room=room)
        setup = replace(setup, places=actor.places())
    elif cluster.gpus:
        setup = replace(setup, trainer_gpus=config.trainer.workers * num_models(config) // room)
    rollout = RolloutGroup(cluster, setup, timeout=config.trainer.step_timeout)
    stack.callback(rollout.close)
    return actor if actor is not None else ActorGroup(cluster, current, room=room), rollout


def start_reward_model(config: TrainConfig, cluster: Cluster) -> list[Worker]:
    """Workers that hold the reward model, where one is configured."""
    manager = reward_model_of(config)
    return [] if manager is None else RewardModelGroup(cluster, manager, timeout=config.trainer.step_timeout).workers


def reward_model_of(config: TrainConfig) -> ModelManager | None:
    """The manager that scores with a model of its own; None where there is none."""
    manager = make_reward_manager(config.reward.shipped(), max_response_length=config.rollout.max_response_length)
    return manager if isinstance(manager, ModelManager) and manager.model is not None else None


def num_models(config: TrainConfig) -> int:
    """Models that are trained or asked for log-probs, each by ``trainer.workers`` processes."""
    return 1 + config.algo.needs_reference + config.needs_critic


def models_per_gpu(config: TrainConfig, cluster: Cluster) -> int:
    """How many models share each GPU of the trainer: all of them where there are too few GPUs, else one.

    Raises:
        ConfigError: there are fewer GPUs than trainer processes.
    """
    workers, models = config.trainer.workers, num_models(config)
    if not cluster.gpus and config.trainer.gpus is None:
        return 1
    if cluster.gpus < workers:
        raise ConfigError(
            f"trainer.{'workers' if config.trainer.gpus is None else 'gpus'}={workers}: every trainer process takes a "
            f"GPU, and there are {cluster.gpus}. Lower it, or leave it out on a machine without GPUs"
        )
    apart = config.rollout.engine == "vllm" and not config.rollout.vllm.colocate
    engines = (config.rollout.vllm.engines or 1) * config.rollout.vllm.tensor_parallel if apart else 0
    return models if workers * models + engines > cluster.gpus else 1


def make_cluster(config: TrainConfig) -> Cluster:
    """The cluster that ``trainer.cluster`` names."""
    if config.trainer.cluster == "inline":
        return InlineCluster()
    cpus = os.cpu_count() or 1
    workers = config.trainer.workers * num_models(config) + 1
    if config.rollout.engine == "vllm":
        workers += config.rollout.vllm.engines or 1
    if (manager := reward_model_of(config)) is not None:
        workers += manager.workers
    threads = config.trainer.threads if config.trainer.threads is not None else cpus
    return RayCluster(cpus=max(cpus, workers), threads=threads, plugins=plugins.loaded())


def summarise(trainer: Trainer, folder: Path, seconds: float) -> RunSummary:
    """What the run came to, and what to type next."""
    validated = [row["val/reward_mean"] for row in trainer.log.read_metrics() if "val/reward_mean" in row]
    finished = trainer.step >= trainer.total_steps
    command = f"agentgym eval model={folder}" if finished else f"agentgym train --resume {folder}"
    return RunSummary(
        run_dir=str(folder),
        steps=trainer.step,
        seconds=seconds,
        reward_before=validated[0] if len(validated) > 1 else None,
        reward_after=validated[-1] if validated else None,
        next_command=command,
    )

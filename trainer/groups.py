"""Typed faces of worker groups: what the fit loop calls, and where "go to definition" leads."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentgym.errors import ConfigError, InfraError
from agentgym.rewards.classifier import RewardClassifier
from agentgym.rewards.model import ModelManager
from agentgym.rewards.scorer import with_same_components
from agentgym.rollout import Rollout
from agentgym.runner import RolloutRequest
from agentgym.trainer.algorithms import Totals
from agentgym.trainer.batch import Batch
from agentgym.trainer.cluster import Cluster, Needs, Worker, wait
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.critic import CriticWorker
from agentgym.trainer.learner import MiniBatch
from agentgym.trainer.model import Vocabulary
from agentgym.trainer.packing import MicroBatch, plan
from agentgym.trainer.rollout.engines import RolloutSetup
from agentgym.trainer.rollout.vllm_actors import Place
from agentgym.trainer.rollout.worker import RolloutReport, RolloutWorker
from agentgym.trainer.weight_transfer import Backend
from agentgym.trainer.worker import ActorWorker, ModelWorker, PolicyWorker

logger = logging.getLogger(__name__)


class WorkerGroup:
    """Several workers of one class, called together.

    Args:
        cluster: where they live.
        worker_class: constructed as ``worker_class(rank, *args)``.
        needs: how many workers, and what each takes.
        name: for messages.
        beside: a group whose places with room these workers take.
        timeout: seconds after which a call that does not end is an error.
    """

    def __init__(
        self,
        cluster: Cluster,
        worker_class: type,
        args: tuple[Any, ...],
        needs: Needs,
        *,
        name: str,
        beside: WorkerGroup | None = None,
        timeout: float | None = None,
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.timeout = timeout
        places: Sequence[Worker] = beside.workers if beside is not None else ()
        self.workers: list[Worker] = cluster.spawn(worker_class, args, needs, places)

    def close(self) -> None:
        """End the workers at once and free their place."""
        self.cluster.release(self.workers)

    @property
    def ranks(self) -> int:
        return len(self.workers)

    def broadcast(self, method: str, *args: Any) -> list[Any]:
        """Call the method on every worker with the same arguments; results in rank order."""
        return self.scatter(method, [args] * self.ranks)

    def scatter(
        self, method: str, per_rank: Sequence[tuple[Any, ...]], stop: Callable[[], bool] | None = None
    ) -> list[Any]:
        """Call the method on each worker with its own arguments; results in rank order."""
        results = [worker.submit(method, *args) for worker, args in zip(self.workers, per_rank, strict=True)]
        return wait(results, what=f"{self.name}.{method}", timeout=self.timeout, stop=stop)


class ModelGroup:
    """The ranks of one model, and how a batch is spread over them.

    Args:
        cluster: where they live.
        config: of the run.
        room: models that share the GPUs of this one.
        beside: the model whose GPUs this one shares, if ``room`` is above 1.
    """

    worker_class: type[ModelWorker]
    name: str

    def __init__(
        self, cluster: Cluster, config: TrainConfig, *, room: int = 1, beside: ModelGroup | None = None
    ) -> None:
        self.config = config
        ranks = config.trainer.workers
        gpus = math.floor(1e4 / room) / 1e4 if cluster.gpus else 0.0  # Ray counts in ten-thousandths
        self.group: WorkerGroup = WorkerGroup(
            cluster,
            self.worker_class,
            (ranks, config),
            Needs(ranks=ranks, cpus=1.0, gpus=gpus, room=room),
            name=self.name,
            beside=beside.group if beside is not None and room > 1 else None,
            timeout=config.trainer.step_timeout,
        )
        host, port = wait([self.group.workers[0].submit("meeting_point")], what=f"{self.name}.meeting_point")[0]
        self._joined = [worker.submit("join", host, port) for worker in self.group.workers]

    def ready(self) -> None:
        """Wait until every rank has met the others and loaded the model."""
        wait(self._joined, what=f"{self.name}.join", timeout=self.config.trainer.step_timeout)

    def plan(self, batch: Batch, rows: Sequence[int]) -> list[list[MicroBatch]]:
        """Micro-batches of the given rows for each rank."""
        return plan(
            rows,
            batch["prompt_length"].tolist(),
            batch["response_length"].tolist(),
            batch["prompt_group"].tolist(),
            cap=self.config.trainer.max_tokens_per_micro_batch,
            ranks=self.group.ranks,
        )

    def _per_token(self, method: str, batch: Batch) -> Tensor:
        """What a worker method computes for its rows, put together: [B, R] float32."""
        shared = self.group.cluster.share(batch)
        out = torch.zeros(batch["response_ids"].shape)
        per_rank = self.plan(batch, range(len(batch)))
        for rows, values in self.group.scatter(method, [(shared, micro_batches) for micro_batches in per_rank]):
            out[rows] = values
        return out

    def _learn(
        self, batch: Batch, mini_batches: Sequence[Sequence[int]], lr: float, counted: Tensor
    ) -> dict[str, float]:
        """Update on every rank; ``counted`` [B, R] are the tokens that the denominators of the loss count."""
        shared = self.group.cluster.share(batch)
        per_rank: list[list[MiniBatch]] = [[] for _ in range(self.group.ranks)]
        for rows in mini_batches:
            totals = Totals.of(counted[torch.tensor(rows)])
            for rank, micro_batches in enumerate(self.plan(batch, rows)):
                per_rank[rank].append(MiniBatch(micro_batches, totals))
        metrics: dict[str, float] = self.group.scatter("update", [(shared, minis, lr) for minis in per_rank])[0]
        return metrics


class ReferenceGroup(ModelGroup):
    """The model before training; computes log-probs only."""

    worker_class = PolicyWorker
    name = "reference"

    def log_probs(self, batch: Batch) -> Tensor:
        """Log-probs of all response tokens under the current weights: [B, R] float32, 0.0 beyond each response."""
        return self._per_token("log_probs", batch)


class ActorGroup(ReferenceGroup):
    """The policy: computes log-probs, learns, hands out its weights, saves itself."""

    worker_class = ActorWorker
    name = "actor"

    def update(self, batch: Batch, mini_batches: Sequence[Sequence[int]], lr: float) -> dict[str, float]:
        """One optimizer step for each mini-batch (rows of ``batch``), in order. Returns the metrics ``actor/...``."""
        return self._learn(batch, mini_batches, lr, batch["loss_mask"])

    def weights(self) -> dict[str, Tensor]:
        """Full weights under Hugging Face names, on the CPU."""
        weights: dict[str, Tensor] = self.group.broadcast("state_dict")[0]
        return weights

    def vocabulary(self) -> Vocabulary:
        """What the model's token ids mean."""
        vocabulary: Vocabulary = self.group.broadcast("vocabulary")[0]
        return vocabulary

    def places(self) -> list[Place]:
        """Where each rank computes, by rank; only for ranks with GPUs."""
        places: list[Place] = self.group.broadcast("place")
        return places

    def send_weights(self, backend: Backend, engines: Sequence[Any], per_engine: int) -> None:
        """Give vLLM engines the weights, from GPU to GPU."""
        self.group.broadcast("send_weights", backend, engines, per_engine)

    def save(self, folder: Path) -> None:
        """Write ``model/`` and ``optimizer.pt`` into the folder."""
        self.group.broadcast("save", str(folder))

    def load_optimizer(self, folder: Path) -> None:
        """Take over the optimizer state of a checkpoint."""
        self.group.broadcast("load_optimizer", str(folder))


class CriticGroup(ModelGroup):
    """The value model: computes values, learns, saves itself."""

    worker_class = CriticWorker
    name = "critic"

    def values(self, batch: Batch) -> Tensor:
        """Values before each response token: [B, R] float32, 0.0 beyond each response."""
        return self._per_token("values", batch)

    def update(self, batch: Batch, mini_batches: Sequence[Sequence[int]], lr: float) -> dict[str, float]:
        """One optimizer step for each mini-batch (rows of ``batch``), in order. Returns the metrics ``critic/...``."""
        return self._learn(batch, mini_batches, lr, batch["loss_mask"] & batch["valid"][:, None])

    def save(self, folder: Path) -> None:
        """Write ``critic.pt`` into the folder."""
        self.group.broadcast("save", str(folder))

    def load(self, folder: Path) -> None:
        """Take over the critic of a checkpoint. Raises `ConfigError` where it has none."""
        if not (folder / "critic.pt").is_file():
            raise ConfigError(f"{folder} has no critic.pt: that run trained no critic, so it cannot go on with one")
        self.group.broadcast("load", str(folder))


class RewardModelGroup:
    """The reward model in workers of its own, for ``reward.manager=model``."""

    def __init__(self, cluster: Cluster, manager: ModelManager, *, timeout: float | None = None) -> None:
        assert manager.model is not None
        self.group = WorkerGroup(
            cluster,
            RewardClassifier,
            (manager.model, *manager.classifier_options),
            Needs(ranks=manager.workers, cpus=1.0),
            name="reward_model",
            timeout=timeout,
        )

    @property
    def workers(self) -> list[Worker]:
        """Handles to give to whoever scores."""
        return self.group.workers


class RolloutGroup:
    """The rollout workers: each has an engine, sessions, and its share of the requests."""

    def __init__(self, cluster: Cluster, setup: RolloutSetup, *, timeout: float | None = None) -> None:
        self.group = WorkerGroup(
            cluster, RolloutWorker, (setup,), Needs(ranks=1, cpus=1.0), name="rollout", timeout=timeout
        )
        self.per_engine = setup.rollout.vllm.tensor_parallel
        self.transfer: Backend | None = None
        if cluster.gpus and setup.vllm_on_gpu:
            self.transfer = "ipc" if setup.places else "nccl"

    def generate(self, requests: Sequence[RolloutRequest], stop: Callable[[], bool] | None = None) -> RolloutReport:
        """Play all requests; rollouts come back in the order of the requests.

        Raises:
            Interrupted: ``stop`` became true; open sessions have been released.
        """
        places = self._split(requests)
        shares = [[requests[place] for place in listed] for listed in places]
        try:
            reports: list[RolloutReport] = self.group.scatter("generate", [(share,) for share in shares], stop)
        except BaseException:
            self.cancel()
            raise
        rollouts: list[Rollout | None] = [None] * len(requests)
        for listed, report in zip(places, reports, strict=True):
            for place, rollout in zip(listed, report.rollouts, strict=True):
                rollouts[place] = rollout
        return RolloutReport.merge(reports, with_same_components([r for r in rollouts if r is not None]))

    def _split(self, requests: Sequence[RolloutRequest]) -> list[list[int]]:
        """Places of each worker's requests. A group stays together: it is scored as one, and shares its prompt."""
        groups = {group: number for number, group in enumerate(dict.fromkeys(request.group for request in requests))}
        ranks = [groups[request.group] % self.group.ranks for request in requests]
        return [[place for place, at in enumerate(ranks) if at == rank] for rank in range(self.group.ranks)]

    def cancel(self) -> None:
        """Stop what is played and release its sessions."""
        wait([worker.submit("cancel") for worker in self.group.workers], what="rollout.cancel", timeout=60)

    def sync_weights(self, actor: ActorGroup, version: int) -> None:
        """Give every engine the actor's weights; nothing is generated with older ones afterwards.

        From GPU to GPU where both have one, else through host memory.
        """
        if self.transfer is None:
            self.group.broadcast("update_weights", self.group.cluster.share(actor.weights()), version)
            return
        engines = [engine for listed in self.group.broadcast("begin_transfer") for engine in listed]
        reached: int | None = None
        try:
            actor.send_weights(self.transfer, engines, self.per_engine)
            reached = version
        finally:
            self.group.broadcast("end_transfer", reached)

    def close(self) -> None:
        """End all sessions and the engines."""
        try:
            wait([worker.submit("close") for worker in self.group.workers], what="rollout.close", timeout=60)
        except InfraError as error:  # the cluster ends the processes anyway
            logger.warning("%s", error)

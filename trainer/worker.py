"""The processes that hold the model: one shard each, FSDP2 on gloo (CPU) or nccl (GPU)."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from agentgym import plugins
from agentgym.trainer.algorithms import MetricMeans, Totals, aggregate_loss, get_policy_loss, kl_penalty
from agentgym.trainer.batch import Batch
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.model import load_causal_lm, load_tokenizer, save_model_folder
from agentgym.trainer.packing import MicroBatch
from agentgym.trainer.policy import PolicyModel, supports_shared_prompts

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One optimizer step: this rank's micro-batches and the counts of the whole mini-batch over all ranks."""

    micro_batches: list[MicroBatch]
    totals: Totals


@dataclass(slots=True)
class UpdateRecord:
    """What an update measures on one rank."""

    actor: MetricMeans = field(default_factory=MetricMeans)
    engine_gap: MetricMeans = field(default_factory=MetricMeans)
    """Distance between the engine's log-probs and the trainer's of the same tokens."""
    engine_gap_max: float = 0.0
    losses: list[float] = field(default_factory=list)
    """This rank's share, per optimizer step."""
    norms: list[float] = field(default_factory=list)
    """Gradient norm before clipping, per optimizer step."""

    def merge(self, other: UpdateRecord) -> None:
        """Take in another rank's record: means are weighted, shares summed, norms (which all ranks know) kept."""
        self.actor.merge(other.actor)
        self.engine_gap.merge(other.engine_gap)
        self.engine_gap_max = max(self.engine_gap_max, other.engine_gap_max)
        self.losses = [a + b for a, b in zip(self.losses, other.losses, strict=True)]

    def metrics(self, lr: float) -> dict[str, float]:
        """Flat names and numbers."""
        finite = [norm for norm in self.norms if math.isfinite(norm)]
        return {
            "actor/loss": sum(self.losses) / max(len(self.losses), 1),
            "actor/grad_norm": sum(finite) / max(len(finite), 1),
            "actor/skipped_updates": float(len(self.norms) - len(finite)),
            "actor/lr": lr,
            "rollout/logprob_gap_max": self.engine_gap_max,
            **{f"rollout/{name}": value for name, value in self.engine_gap.result().items()},
            **{f"actor/{name}": value for name, value in self.actor.result().items()},
        }


class ModelWorker:
    """A shard of a causal language model that computes log-probs. The reference is one; the actor adds learning.

    Made in two steps: rank 0 opens a store and says where (`meeting_point`), then all ranks `join` it. The port is the
    operating system's choice and stays bound, so nobody can take it in between.

    Args:
        rank: of ``world_size`` workers.
        world_size: how many share the model.
        config: of the run.
    """

    def __init__(self, rank: int, world_size: int, config: TrainConfig) -> None:
        self.rank = rank
        self.world_size = world_size
        self.config = config
        self.algo = config.algo.model_copy(update={"norm_length": config.norm_length})
        plugins.load(config.plugins)
        threads = config.trainer.threads if config.trainer.threads is not None else (os.cpu_count() or 1)
        torch.set_num_threads(max(1, threads // world_size))
        cuda = torch.cuda.is_available()
        if not cuda:
            # The backward pass of indexing adds in the order of the threads otherwise, and a resume would not be exact.
            torch.use_deterministic_algorithms(True, warn_only=True)
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._store: TCPStore | None = None

    def meeting_point(self) -> tuple[str, int]:
        """On rank 0: open the store and say where it is (host, port)."""
        host = socket.gethostbyname(socket.gethostname()) if self.world_size > 1 else "127.0.0.1"
        self._store = TCPStore(host, 0, self.world_size, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def join(self, host: str, port: int) -> None:
        """Meet the other ranks and load the model."""
        if not dist.is_initialized():
            timeout = timedelta(seconds=self.config.trainer.step_timeout)
            store = self._store
            if store is None:
                store = TCPStore(host, port, self.world_size, is_master=False, timeout=timeout)
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)
        self.model = self._build(self.config.model.path)

    def _build(self, path: str) -> PolicyModel:
        lm = load_causal_lm(path, dtype=self.config.model.dtype, revision=self.config.model.revision)
        self.lm_config = lm.config
        self.generation_config = lm.generation_config
        model = PolicyModel(lm, shared_prompts=supports_shared_prompts(lm.config, type(lm))).to(self.device)
        model.train()
        for layer in transformer_layers(lm):
            fully_shard(layer)
        fully_shard(model)
        return model

    def log_probs(self, batch: Batch, micro_batches: Sequence[MicroBatch]) -> tuple[list[int], Tensor]:
        """Log-probs of this rank's rows under the current weights: (rows, [len(rows), R] float32, 0.0 outside)."""
        width = batch["response_ids"].shape[1]
        rows: list[int] = []
        parts: list[Tensor] = []
        with torch.no_grad():
            for micro in micro_batches:
                log_prob, _ = self._forward(batch, micro, entropy_grad=False)
                rows.extend(micro.rows)
                parts.append(nn.functional.pad(log_prob, (0, width - log_prob.shape[1])).cpu())
        values = torch.cat(parts) if parts else torch.zeros((0, width))
        return rows, values[: len(rows)]

    def _forward(self, batch: Batch, micro: MicroBatch, *, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [rows, R'] of a micro-batch, zero beyond each response.

        An empty micro-batch still runs the model, on one token: collectives must match over the ranks.
        """
        pieces = micro_pieces(batch, micro)
        packed = self.model.pack(pieces).to(self.device)
        flat_log_prob, flat_entropy = self.model(packed, self.config.rollout.temperature, entropy_grad)
        lengths = torch.tensor([len(r) for _, members in pieces for r in members], device=self.device)
        real = torch.arange(int(lengths.max()), device=self.device) < lengths[:, None]
        zeros = torch.zeros(real.shape, dtype=flat_log_prob.dtype, device=self.device)
        return zeros.masked_scatter(real, flat_log_prob), zeros.masked_scatter(real, flat_entropy)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


class ActorWorker(ModelWorker):
    """The policy that learns."""

    def join(self, host: str, port: int) -> None:
        super().join(host, port)
        settings = self.config.trainer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        )
        self.loss_fn = get_policy_loss(self.algo.policy_loss)
        self.tokenizer = load_tokenizer(self.config.model.path, revision=self.config.model.revision)

    def update(self, batch: Batch, mini_batches: Sequence[MiniBatch], lr: float) -> dict[str, float]:
        """One optimizer step per mini-batch. Returns metrics, the same on every rank."""
        record = UpdateRecord()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for mini in mini_batches:
            loss = 0.0
            for i, micro in enumerate(mini.micro_batches):
                self.model.set_requires_gradient_sync(i + 1 == len(mini.micro_batches))  # type: ignore[operator]
                share = self._loss(batch, micro, mini.totals, record)
                # FSDP averages gradients over ranks; the shares of a loss are to be summed.
                torch.autograd.backward(share * self.world_size)
                loss += float(share.detach())
            record.norms.append(self._step())
            record.losses.append(loss)
        return self._merged(record).metrics(lr)

    def _loss(self, batch: Batch, micro: MicroBatch, totals: Totals, record: UpdateRecord) -> Tensor:
        """This micro-batch's share of the mini-batch loss."""
        algo = self.algo
        log_prob, entropy = self._forward(batch, micro, entropy_grad=algo.entropy_coef != 0.0)
        if not micro.rows:
            return torch.sum(log_prob) * 0.0
        rows = batch[torch.tensor(micro.rows)]
        width = log_prob.shape[1]

        def column(name: str) -> Tensor:
            values: Tensor = rows[name][:, :width]
            return values.to(self.device)

        mask, loss_mask = column("response_mask"), column("loss_mask")
        old = column("old_log_probs") if "old_log_probs" in rows.keys() else log_prob.detach()  # noqa: SIM118
        extra = {name: column(name) for name in algo.extra_loss_fields}
        weights = column("rollout_is_weights") if "rollout_is_weights" in rows.keys() else None  # noqa: SIM118
        loss, metrics = self.loss_fn(
            old,
            log_prob,
            column("advantages"),
            mask,
            algo.loss_agg_mode,
            algo,
            weights,
            loss_mask=loss_mask,
            totals=totals,
            **extra,
        )
        metrics = dict(metrics)
        mode = algo.loss_agg_mode or "token-mean"

        def aggregate(values: Tensor) -> Tensor:
            return aggregate_loss(values, mask, mode, loss_mask=loss_mask, totals=totals, norm_length=algo.norm_length)

        if algo.kl_loss.coef > 0.0:
            kl = kl_penalty(log_prob, column("ref_log_probs"), algo.kl_loss.kind)
            loss = loss + algo.kl_loss.coef * aggregate(kl)
            metrics["ref_kl"] = masked_mean(kl.detach(), mask)
        if algo.entropy_coef != 0.0:
            loss = loss - algo.entropy_coef * aggregate(entropy)
        metrics["entropy"] = masked_mean(entropy.detach(), mask)
        record.actor.add(metrics, mask.sum())
        gap = (old - column("rollout_log_probs")).abs() * mask
        record.engine_gap.add({"logprob_gap_mean": masked_mean(gap, mask)}, mask.sum())
        record.engine_gap_max = max(record.engine_gap_max, float(gap.max()))
        return loss

    def _step(self) -> float:
        """Clip, step, clear; skipped where the gradient is not finite."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.trainer.grad_clip)
        value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if math.isfinite(value):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value

    def _merged(self, record: UpdateRecord) -> UpdateRecord:
        """The record of all ranks together."""
        if self.world_size == 1:
            return record
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, record)
        for other in gathered[1:]:
            gathered[0].merge(other)
        merged: UpdateRecord = gathered[0]
        return merged

    def state_dict(self) -> dict[str, Tensor] | None:
        """Full weights under Hugging Face names, on rank 0; None elsewhere. Every rank must be asked."""
        state: dict[str, Any] = dict(get_model_state_dict(self.model, options=FULL))
        if self.rank != 0:
            return None
        tied = self._tied_names()
        return {name.removeprefix("lm."): value.contiguous() for name, value in state.items() if name not in tied}

    def save(self, folder: str) -> None:
        """Write ``model/`` and ``optimizer.pt``; rank 0 writes, every rank must be asked."""
        weights = self.state_dict()
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=FULL)
        if self.rank != 0:
            return
        assert weights is not None
        target = Path(folder)
        save_model_folder(target / "model", weights, self.lm_config, self.generation_config, self.tokenizer)
        torch.save(optimizer, target / "optimizer.pt")

    def load_optimizer(self, folder: str) -> None:
        """Take the optimizer's state from a checkpoint, whatever number of ranks wrote it."""
        state = torch.load(Path(folder) / "optimizer.pt", map_location="cpu", weights_only=True)
        set_optimizer_state_dict(self.model, self.optimizer, state, options=FULL)

    def _tied_names(self) -> set[str]:
        """Parameters that are another name for an input embedding; Hugging Face ties them again when loading."""
        if not getattr(self.lm_config, "tie_word_embeddings", False):
            return set()
        tied: Any = getattr(self.model.lm, "_tied_weights_keys", None) or {}
        return {f"lm.{name}" for name in tied}


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the mask; 0 where it is empty."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def micro_pieces(batch: Batch, micro: MicroBatch) -> list[tuple[Tensor, list[Tensor]]]:
    """(prompt ids, response ids of each row) of a micro-batch; a one-token dummy where it is empty."""
    if not micro.rows:
        return [(torch.zeros(1, dtype=torch.int64), [torch.zeros(1, dtype=torch.int64)])]
    prompts, responses = batch["prompt_ids"], batch["response_ids"]
    prompt_length, response_length = batch["prompt_length"].tolist(), batch["response_length"].tolist()
    return [
        (
            prompts[piece.rows[0], : prompt_length[piece.rows[0]]],
            [responses[row, : response_length[row]] for row in piece.rows],
        )
        for piece in micro.pieces
    ]


def transformer_layers(lm: nn.Module) -> list[nn.Module]:
    """The blocks that FSDP shards one by one: those that transformers says must not be split."""
    names = set(getattr(lm, "_no_split_modules", None) or [])
    return [module for module in lm.modules() if type(module).__name__ in names]

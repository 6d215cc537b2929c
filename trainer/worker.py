"""The processes that hold the model: one shard each, FSDP2 on gloo (CPU) or nccl (GPU)."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

from agentgym import plugins
from agentgym.trainer.algorithms import Totals, aggregate_loss, get_policy_loss, kl_penalty
from agentgym.trainer.batch import Batch
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.learner import FULL, Learner, MiniBatch, UpdateRecord, masked_mean
from agentgym.trainer.model import Vocabulary, load_causal_lm, load_tokenizer, save_model_folder
from agentgym.trainer.packing import MicroBatch
from agentgym.trainer.policy import PackedMicroBatch, PackedModel, PolicyModel, supports_shared_prompts
from agentgym.trainer.rollout.vllm_actors import Place
from agentgym.trainer.weight_transfer import Backend, TrainedWeights, WeightSender


class ModelWorker:
    """A shard of a model over packed sequences: what policy and critic share.

    Made in two steps: rank 0 opens a store and says where (`meeting_point`), then all ranks `join` it. The port is the
    operating system's choice and stays bound, so nobody can take it in between.

    Args:
        rank: of ``world_size`` workers.
        world_size: how many share the model.
        config: of the run.
    """

    model: PackedModel

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
        self._load()

    def _load(self) -> None:
        """Set ``self.model`` by `_shard`."""
        raise NotImplementedError

    def _causal_lm(self, path: str) -> Any:
        return load_causal_lm(path, dtype=self.config.model.dtype, revision=self.config.model.revision)

    def _shard(self, model: PackedModel) -> None:
        model = model.to(self.device)
        model.train()
        for layer in transformer_layers(model.lm):
            fully_shard(layer)
        fully_shard(model)
        self.model = model

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _pack(self, batch: Batch, micro: MicroBatch) -> tuple[PackedMicroBatch, Tensor]:
        """The model's input, and where its flat output stands in [rows, R'] (bool).

        An empty micro-batch still runs the model, on one token: collectives must match over the ranks.
        """
        pieces = micro_pieces(batch, micro)
        packed = self.model.pack(pieces).to(self.device)
        lengths = torch.tensor([len(r) for _, members in pieces for r in members], device=self.device)
        return packed, torch.arange(int(lengths.max()), device=self.device) < lengths[:, None]

    def _evaluate(
        self, batch: Batch, micro_batches: Sequence[MicroBatch], forward: Callable[[MicroBatch], Tensor]
    ) -> tuple[list[int], Tensor]:
        """``forward`` ([rows, R'] of a micro-batch) of this rank's rows without gradients: (rows, [len(rows), R])."""
        width = batch["response_ids"].shape[1]
        rows: list[int] = []
        parts: list[Tensor] = []
        with torch.no_grad():
            for micro in micro_batches:
                values = forward(micro)
                rows.extend(micro.rows)
                parts.append(nn.functional.pad(values, (0, width - values.shape[1])).cpu())
        result = torch.cat(parts) if parts else torch.zeros((0, width))
        return rows, result[: len(rows)]


class PolicyWorker(ModelWorker):
    """A causal language model that computes log-probs. The reference is one; the actor adds learning."""

    def _load(self) -> None:
        lm = self._causal_lm(self.config.model.path)
        self.lm_config = lm.config
        self.generation_config = lm.generation_config
        self._shard(PolicyModel(lm, shared_prompts=supports_shared_prompts(lm.config, type(lm))))

    def log_probs(self, batch: Batch, micro_batches: Sequence[MicroBatch]) -> tuple[list[int], Tensor]:
        """Log-probs of this rank's rows under the current weights: (rows, [len(rows), R] float32, 0.0 outside)."""
        return self._evaluate(batch, micro_batches, lambda micro: self._forward(batch, micro, entropy_grad=False)[0])

    def _forward(self, batch: Batch, micro: MicroBatch, *, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [rows, R'] of a micro-batch, zero beyond each response."""
        packed, real = self._pack(batch, micro)
        log_prob, entropy = self.model(packed, self.config.rollout.temperature, entropy_grad)
        zeros = torch.zeros(real.shape, dtype=log_prob.dtype, device=self.device)
        return zeros.masked_scatter(real, log_prob), zeros.masked_scatter(real, entropy)


class ActorWorker(PolicyWorker):
    """The policy that learns."""

    def _load(self) -> None:
        super()._load()
        settings = self.config.trainer
        self.learner = Learner(
            self.model,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            betas=settings.betas,
            grad_clip=settings.grad_clip,
            world_size=self.world_size,
        )
        self.loss_fn = get_policy_loss(self.algo.policy_loss)
        self.tokenizer = load_tokenizer(self.config.model.path, revision=self.config.model.revision)
        self.sender = WeightSender(TrainedWeights(self.model, self._tied_names()), self.rank)

    def update(self, batch: Batch, mini_batches: Sequence[MiniBatch], lr: float) -> dict[str, float]:
        """One optimizer step per mini-batch. Returns metrics, the same on every rank."""
        record = self.learner.learn(
            mini_batches, lambda micro, totals, record: self._loss(batch, micro, totals, record), lr
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return record.over_ranks(self.world_size).metrics("actor", lr) | {"memory/actor_gb": peak}

    def _loss(self, batch: Batch, micro: MicroBatch, totals: Totals, record: UpdateRecord) -> Tensor:
        """This micro-batch's share of the mini-batch loss."""
        algo = self.algo
        log_prob, entropy = self._forward(batch, micro, entropy_grad=algo.entropy_coef != 0.0)
        if not micro.rows:
            return torch.sum(log_prob) * 0.0
        columns = Columns(batch, micro, width=log_prob.shape[1], device=self.device)
        mask, loss_mask = columns["response_mask"], columns["loss_mask"]
        old = columns.get("old_log_probs")
        if old is None:  # the only step from these weights
            old = log_prob.detach()
        loss, metrics = self.loss_fn(
            old,
            log_prob,
            columns["advantages"],
            mask,
            algo.loss_agg_mode,
            algo,
            columns.get("rollout_is_weights"),
            loss_mask=loss_mask,
            totals=totals,
            **{name: columns[name] for name in algo.extra_fields},
        )
        metrics = dict(metrics)
        mode = algo.loss_agg_mode or "token-mean"

        def aggregate(values: Tensor) -> Tensor:
            return aggregate_loss(values, mask, mode, loss_mask=loss_mask, totals=totals, norm_length=algo.norm_length)

        if algo.kl_loss.coef > 0.0:
            kl = kl_penalty(log_prob, columns["ref_log_probs"], algo.kl_loss.kind)
            loss = loss + algo.kl_loss.coef * aggregate(kl)
            metrics["ref_kl"] = masked_mean(kl.detach(), mask)
        if algo.entropy_coef != 0.0:
            loss = loss - algo.entropy_coef * aggregate(entropy)
        metrics["entropy"] = masked_mean(entropy.detach(), mask)
        gap = (old - columns["rollout_log_probs"]).abs() * mask
        named = {f"actor/{name}": value for name, value in metrics.items()}
        record.means.add({**named, "rollout/logprob_gap_mean": masked_mean(gap, mask)}, mask.sum())
        record.maximum("rollout/logprob_gap_max", float(gap.max()))
        return loss

    def state_dict(self) -> dict[str, Tensor] | None:
        """Full weights under Hugging Face names, on rank 0; None elsewhere. Every rank must be asked."""
        state: dict[str, Any] = dict(get_model_state_dict(self.model, options=FULL))
        if self.rank != 0:
            return None
        tied = self._tied_names()
        return {name.removeprefix("lm."): value.contiguous() for name, value in state.items() if name not in tied}

    def place(self) -> Place:
        """Where this rank computes; it must be a Ray actor with a GPU."""
        import ray

        return Place(ray.get_runtime_context().get_node_id(), str(ray.get_gpu_ids()[0]))

    def send_weights(self, backend: Backend, engines: Sequence[Any], per_engine: int) -> None:
        """Give vLLM engines the weights, from GPU to GPU. Every rank must be asked."""
        self.sender.send(backend, engines, per_engine)

    def vocabulary(self) -> Vocabulary:
        """What the token ids of this model mean."""
        return Vocabulary.of(self.tokenizer, self.lm_config.get_text_config().vocab_size)

    def save(self, folder: str) -> None:
        """Write ``model/`` and ``optimizer.pt``; rank 0 writes, every rank must be asked."""
        weights = self.state_dict()
        optimizer = self.learner.state_dict()
        if self.rank != 0:
            return
        assert weights is not None
        target = Path(folder)
        save_model_folder(target / "model", weights, self.lm_config, self.generation_config, self.tokenizer)
        torch.save(optimizer, target / "optimizer.pt")

    def load_optimizer(self, folder: str) -> None:
        """Take the optimizer's state from a checkpoint, whatever number of ranks wrote it."""
        self.learner.load_state_dict(torch.load(Path(folder) / "optimizer.pt", map_location="cpu", weights_only=True))

    def _tied_names(self) -> set[str]:
        """Parameters that are another name for an input embedding; Hugging Face ties them again when loading."""
        if not getattr(self.lm_config, "tie_word_embeddings", False):
            return set()
        tied: Any = getattr(self.model.lm, "_tied_weights_keys", None) or {}
        return {f"lm.{name}" for name in tied}


class Columns:
    """The fields of a micro-batch's rows, as wide as its longest response, on the device of the model."""

    def __init__(self, batch: Batch, micro: MicroBatch, *, width: int, device: torch.device) -> None:
        self.rows = batch[torch.tensor(micro.rows)]
        self.width = width
        self.device = device

    def get(self, name: str) -> Tensor | None:
        """The field, or None where the batch has none of that name."""
        return self[name] if name in self.rows.keys() else None  # noqa: SIM118 - a TensorDict iterates rows

    def __getitem__(self, name: str) -> Tensor:
        """[rows, R'] of a field per token, [rows] of a field per row."""
        values: Tensor = self.rows[name]
        return (values[:, : self.width] if values.dim() > 1 else values).to(self.device)


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

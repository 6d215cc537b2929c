"""The critic: a value model that learns beside the policy, with an optimizer of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from agentgym.trainer.algorithms import Totals, value_loss
from agentgym.trainer.batch import Batch
from agentgym.trainer.learner import FULL, Learner, MiniBatch, UpdateRecord
from agentgym.trainer.packing import MicroBatch
from agentgym.trainer.policy import ValueModel, supports_shared_prompts
from agentgym.trainer.worker import Columns, ModelWorker


class CriticWorker(ModelWorker):
    """A shard of the value model.

    The value of a response token is what the critic expects before the token is sampled. Values stand on observation
    tokens too, but nothing reads them: neither the advantages nor the loss.
    """

    def _load(self) -> None:
        settings = self.config.critic
        lm = self._causal_lm(settings.path if settings.path is not None else self.config.model.path)
        self._shard(ValueModel(lm, shared_prompts=supports_shared_prompts(lm.config, type(lm))))
        self.learner = Learner(
            self.model,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            betas=self.config.trainer.betas,
            grad_clip=settings.grad_clip,
            world_size=self.world_size,
        )

    def values(self, batch: Batch, micro_batches: Sequence[MicroBatch]) -> tuple[list[int], Tensor]:
        """Values of this rank's rows: (rows, [len(rows), R] float32, 0.0 beyond each response)."""
        return self._evaluate(batch, micro_batches, lambda micro: self._forward(batch, micro))

    def update(self, batch: Batch, mini_batches: Sequence[MiniBatch], lr: float) -> dict[str, float]:
        """One optimizer step per mini-batch. Returns metrics, the same on every rank."""
        record = self.learner.learn(
            mini_batches, lambda micro, totals, record: self._loss(batch, micro, totals, record), lr
        )
        return record.over_ranks(self.world_size).metrics("critic", lr)

    def _forward(self, batch: Batch, micro: MicroBatch) -> Tensor:
        packed, real = self._pack(batch, micro)
        values = self.model(packed)
        return torch.zeros(real.shape, dtype=values.dtype, device=self.device).masked_scatter(real, values)

    def _loss(self, batch: Batch, micro: MicroBatch, totals: Totals, record: UpdateRecord) -> Tensor:
        """This micro-batch's share of the mini-batch loss. Rows without a reward have no return to learn."""
        values = self._forward(batch, micro)
        if not micro.rows:
            return torch.sum(values) * 0.0
        columns = Columns(batch, micro, width=values.shape[1], device=self.device)
        scored = columns["valid"][:, None]
        mask = columns["response_mask"] & scored
        loss, metrics = value_loss(
            values,
            columns["returns"],
            columns["values"],
            mask,
            self.algo.value_clip,
            "token-mean",
            loss_mask=columns["loss_mask"] & scored,
            totals=totals,
        )
        record.means.add({f"critic/{name}": value for name, value in metrics.items()}, mask.sum())
        return loss

    def save(self, folder: str) -> None:
        """Write ``critic.pt``: weights and optimizer, unsharded; rank 0 writes, every rank must be asked."""
        state = {
            "model": dict(get_model_state_dict(self.model, options=FULL)),
            "optimizer": self.learner.state_dict(),
        }
        if self.rank == 0:
            torch.save(state, Path(folder) / "critic.pt")

    def load(self, folder: str) -> None:
        """Take over ``critic.pt``, whatever number of ranks wrote it."""
        state = torch.load(Path(folder) / "critic.pt", map_location="cpu", weights_only=True)
        set_model_state_dict(self.model, state["model"], options=StateDictOptions(full_state_dict=True))
        self.learner.load_state_dict(state["optimizer"])

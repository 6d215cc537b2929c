"""What actor and critic share when they learn: mini-batches, AdamW over a sharded model, and what it measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from agentgym.trainer.algorithms import MetricMeans, Totals
from agentgym.trainer.packing import MicroBatch

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One optimizer step: this rank's micro-batches and the counts of the whole mini-batch over all ranks."""

    micro_batches: list[MicroBatch]
    totals: Totals


@dataclass(slots=True)
class UpdateRecord:
    """What an update measures on one rank."""

    means: MetricMeans = field(default_factory=MetricMeans)
    maxima: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    """This rank's share, per optimizer step."""
    norms: list[float] = field(default_factory=list)
    """Gradient norm before clipping, per optimizer step."""

    def maximum(self, name: str, value: float) -> None:
        """Note a value of which the largest counts."""
        self.maxima[name] = max(self.maxima.get(name, 0.0), value)

    def merge(self, other: UpdateRecord) -> None:
        """Take in another rank's record: means are weighted, shares summed, norms (which all ranks know) kept."""
        self.means.merge(other.means)
        for name, value in other.maxima.items():
            self.maximum(name, value)
        self.losses = [a + b for a, b in zip(self.losses, other.losses, strict=True)]

    def over_ranks(self, world_size: int) -> UpdateRecord:
        """The record of all ranks together. Every rank must ask."""
        if world_size == 1:
            return self
        gathered: list[Any] = [None] * world_size
        dist.all_gather_object(gathered, self)
        merged: UpdateRecord = gathered[0]
        for other in gathered[1:]:
            merged.merge(other)
        return merged

    def metrics(self, role: str, lr: float) -> dict[str, float]:
        """Flat names and numbers; ``role`` (``actor``, ``critic``) starts the names that are common to both."""
        finite = [norm for norm in self.norms if math.isfinite(norm)]
        return {
            f"{role}/loss": sum(self.losses) / max(len(self.losses), 1),
            f"{role}/grad_norm": sum(finite) / max(len(finite), 1),
            f"{role}/skipped_updates": float(len(self.norms) - len(finite)),
            f"{role}/lr": lr,
            **self.maxima,
            **self.means.result(),
        }


class Learner:
    """AdamW over a model that FSDP2 shards.

    Args:
        model: the root module.
        lr, weight_decay, betas: of AdamW.
        grad_clip: gradients are scaled down to this norm.
        world_size: ranks that share the model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        grad_clip: float,
        world_size: int,
    ) -> None:
        self.model = model
        self.grad_clip = grad_clip
        self.world_size = world_size
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=weight_decay)

    def learn(
        self,
        mini_batches: Sequence[MiniBatch],
        loss: Callable[[MicroBatch, Totals, UpdateRecord], Tensor],
        lr: float,
    ) -> UpdateRecord:
        """One optimizer step per mini-batch.

        Args:
            mini_batches: of this rank.
            loss: a micro-batch's share of its mini-batch's loss; also fills the record.
            lr: learning rate of these steps.
        """
        record = UpdateRecord()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for mini in mini_batches:
            total = 0.0
            for i, micro in enumerate(mini.micro_batches):
                self.model.set_requires_gradient_sync(i + 1 == len(mini.micro_batches))  # type: ignore[operator]
                share = loss(micro, mini.totals, record)
                # FSDP averages gradients over ranks; the shares of a loss are to be summed.
                torch.autograd.backward(share * self.world_size)
                total += float(share.detach())
            record.norms.append(self._step())
            record.losses.append(total)
        return record

    def _step(self) -> float:
        """Clip, step, clear; skipped where the gradient is not finite."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
        value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if math.isfinite(value):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value

    def state_dict(self) -> dict[str, Any]:
        """Full (unsharded) optimizer state, on the CPU. Every rank must ask."""
        return dict(get_optimizer_state_dict(self.model, self.optimizer, options=FULL))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a full state, whatever number of ranks wrote it."""
        set_optimizer_state_dict(self.model, self.optimizer, state, options=FULL)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the mask; 0 where it is empty."""
    return (values * mask).sum() / mask.sum().clamp(min=1)

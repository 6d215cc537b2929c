"""The learning rate as a function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from agentgym.trainer.config import TrainerConfig


def learning_rate(config: TrainerConfig, step: int, total_steps: int, *, peak: float | None = None) -> float:
    """Learning rate of step ``step`` (counted from 0).

    It rises linearly over ``warmup_steps`` steps and reaches its peak (``lr``, unless another one is given) with the
    last of them; then it is constant, or falls to 0 at the end of the run along a line or half a cosine.
    """
    lr = config.lr if peak is None else peak
    if step < config.warmup_steps:
        return lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return lr
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    if config.lr_schedule == "linear":
        return lr * (1.0 - progress)
    return lr * 0.5 * (1.0 + math.cos(math.pi * progress))

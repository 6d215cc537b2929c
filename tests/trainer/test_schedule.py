"""The learning rate."""

from __future__ import annotations

from typing import Any

import pytest

from agentgym.trainer.config import TrainerConfig
from agentgym.trainer.schedule import learning_rate


def rates(steps: int, **settings: Any) -> list[float]:
    config = TrainerConfig.model_validate({"lr": 1e-3, **settings})
    return [learning_rate(config, step, steps) for step in range(steps)]


def test_warm_up_reaches_the_peak_with_its_last_step() -> None:
    # G6: step 3 of a warm-up of 4 has 3/4 of the rate, however often the run was resumed
    assert rates(6, warmup_steps=4) == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_linear_falls_towards_zero() -> None:
    assert rates(4, lr_schedule="linear") == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


def test_cosine_is_at_half_in_the_middle() -> None:
    assert rates(10, lr_schedule="cosine")[5] == pytest.approx(0.5e-3)
    assert rates(12, lr_schedule="cosine", warmup_steps=2)[2] == pytest.approx(1e-3)

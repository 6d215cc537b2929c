from __future__ import annotations

import torch

from agentgym.trainer.algorithms import AlgorithmConfig, get_advantage, list_advantages
from agentgym.trainer.bench_advantages import bench_advantages, gae_by_loop


def test_every_estimator_and_the_loop_have_a_row() -> None:
    rows = bench_advantages(rows=8, tokens=16, repeats=1)
    assert [row["estimator"] for row in rows] == [*list_advantages(), "gae (Python loop)"]
    assert all(float(row["median_ms"]) > 0 and row["rows"] == 8 and row["tokens"] == 16 for row in rows)


def test_the_loop_computes_what_gae_computes() -> None:
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 4, 150)
    mask = (torch.rand(4, 150) < 0.7).float()
    config = AlgorithmConfig(gamma=0.99, lam=0.95, whiten=False)
    advantages, _ = get_advantage("gae")(rewards, mask, [0] * 4, values=values, config=config)
    torch.testing.assert_close(advantages, gae_by_loop(rewards, mask, values, config), rtol=1e-4, atol=1e-5)

"""How long the advantage estimators take."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from agentgym.trainer.algorithms import AlgorithmConfig, get_advantage
from agentgym.trainer.algorithms.registry import ADVANTAGES


def gae_by_loop(rewards: Tensor, mask: Tensor, values: Tensor, config: AlgorithmConfig) -> Tensor:
    """GAE as a Python loop over time [B, T], without whitening: what the vectorised form is measured against."""
    following = accumulated = torch.zeros(len(rewards))
    columns = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + config.gamma * following - values[:, t]
        m = mask[:, t]
        accumulated = m * (delta + config.gamma * config.lam * accumulated) + (1 - m) * accumulated
        following = m * values[:, t] + (1 - m) * following
        columns.append(accumulated)
    return torch.stack(columns[::-1], 1) * mask


def bench_advantages(rows: int = 64, tokens: int = 4096, repeats: int = 20) -> list[dict[str, float | str]]:
    """Time every estimator, and the loop form of GAE, on a random batch with 70 % model tokens.

    Returns:
        One row per estimator: name, median_ms, best_ms, rows, tokens, threads.
    """
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(rows, tokens, generator=generator) < 0.7).float()
    rewards = torch.zeros(rows, tokens)
    rewards[:, -1] = torch.rand(rows, generator=generator).round()
    mask[:, -1] = 1.0
    values = torch.randn(rows, tokens, generator=generator)
    index = [i // 8 for i in range(rows)]
    turns = torch.arange(tokens).div(512, rounding_mode="floor").expand(rows, tokens)
    config = AlgorithmConfig(gamma=0.99, lam=0.95)

    def run(name: str) -> Callable[[], object]:
        return lambda: get_advantage(name)(
            rewards,
            mask,
            index,
            values=values,
            reward_baselines=torch.zeros(rows),
            turn_index=turns,
            config=config,
        )

    jobs: dict[str, Callable[[], object]] = {name: run(name) for name in ADVANTAGES.names()}
    jobs["gae (Python loop)"] = lambda: gae_by_loop(rewards, mask, values, config)
    shape: dict[str, float | str] = {"rows": rows, "tokens": tokens, "threads": torch.get_num_threads()}
    return [{"estimator": name, **_timed(job, repeats), **shape} for name, job in jobs.items()]


def _timed(job: Callable[[], object], repeats: int) -> dict[str, float]:
    job()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - start)
    return {"median_ms": 1e3 * sorted(seconds)[repeats // 2], "best_ms": 1e3 * min(seconds)}

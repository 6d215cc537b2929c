"""Turns per second of the tool loop alone: sessions, parsing, tools, rendering, with an engine that costs nothing."""

from __future__ import annotations

import asyncio
import time

from agentgym.config import load_config
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.data import Draw
from agentgym.trainer.requests import training_requests
from agentgym.trainer.rollout.engines import RolloutSetup
from agentgym.trainer.rollout.worker import RolloutWorker


def run(*, rollouts: int = 512, passes: int = 3) -> list[dict[str, float | str]]:
    """Play ``calculator-math`` with the oracle's turns, ``passes`` times; returns one row per pass."""
    config = load_config(
        TrainConfig,
        overrides=["env=calculator-math", "rollout=scripted", "rollout.n=1", "algo.advantage=reinforce_plus_plus"],
    )
    setup = RolloutSetup(plugins=[], env=config.env, model=config.model, rollout=config.rollout, threads=1)
    return asyncio.run(_measure(config, setup, rollouts, passes))


async def _measure(
    config: TrainConfig, setup: RolloutSetup, rollouts: int, passes: int
) -> list[dict[str, float | str]]:
    worker = RolloutWorker(0, setup)
    ids = (await worker.task_ids("train"))[:rollouts]
    rows: list[dict[str, float | str]] = []
    for i in range(passes):
        draws = [Draw(task_id=task_id, number=n, epoch=0) for n, task_id in enumerate(ids)]
        start = time.perf_counter()
        report = await worker.generate(training_requests(config, draws, step=i))
        seconds = time.perf_counter() - start
        turns = sum(r.outcome.num_turns for r in report.rollouts)
        solved = sum(r.reward == 1.0 for r in report.rollouts)
        rows.append(
            {"pass": str(i + 1), "rollouts": len(ids), "solved": solved, "turns": turns, "turns_per_s": turns / seconds}
        )
    await worker.close()
    return rows

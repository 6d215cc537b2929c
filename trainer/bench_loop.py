"""Turns per second of the tool loop alone: sessions, parsing, tools, rendering, with an engine that costs nothing."""

from __future__ import annotations

import asyncio
import time

from agentgym import registration
from agentgym.config import load_config
from agentgym.runner import RolloutRunner
from agentgym.session import SessionManager
from agentgym.tokens import Renderer, get_parser
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.data import Draw
from agentgym.trainer.model import load_tokenizer
from agentgym.trainer.requests import training_requests
from agentgym.trainer.rollout.scripted import ScriptedEngine, texts
from agentgym.trainer.rollout.worker import relax_garbage_collection


def run(*, rollouts: int = 512, passes: int = 4) -> list[dict[str, float | str]]:
    """Play ``calculator-math`` with the oracle's turns, ``passes`` times; returns one row per pass."""
    return asyncio.run(_measure(rollouts, passes))


async def _measure(rollouts: int, passes: int) -> list[dict[str, float | str]]:
    config = load_config(TrainConfig, overrides=["env=calculator-math"])
    tokenizer = load_tokenizer(config.model.path)
    renderer, parser = Renderer(tokenizer), get_parser(config.rollout.parser)
    env = registration.make(config.env.name)
    tasks = env.tasks("train")[:rollouts]
    turns = {task.id: [parser.render(turn) for turn in env.oracle(task)] for task in tasks}
    env.close()
    draws = [Draw(env=config.env.name, task_id=task.id, number=number, epoch=0) for number, task in enumerate(tasks)]
    relax_garbage_collection()  # as in a rollout worker
    rows: list[dict[str, float | str]] = []
    for number in range(1, passes + 1):
        requests = [r for r in training_requests(config, draws, step=number) if r.sample == 0]
        engine = ScriptedEngine(texts({r.key: turns[r.task_id] for r in requests}), tokenizer=tokenizer)
        async with SessionManager(config.rollout.session_limit) as manager:
            runner = RolloutRunner(manager=manager, generator=engine, renderer=renderer, parser=parser)
            start = time.perf_counter()
            played = await asyncio.gather(*map(runner.run, requests))
            seconds = time.perf_counter() - start
        count = sum(rollout.outcome.num_turns for rollout in played)
        solved = sum(rollout.reward == 1.0 for rollout in played)
        rows.append(
            {
                "pass": str(number),
                "rollouts": len(played),
                "solved": solved,
                "turns": count,
                "turns_per_s": count / seconds,
            }
        )
    return rows

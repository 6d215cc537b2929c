"""The rollout worker: one engine, one session manager, and the loop that plays requests with them."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from agentgym import plugins
from agentgym.rewards.config import make_scorer
from agentgym.rewards.model import ModelManager
from agentgym.rewards.scorer import Scorer
from agentgym.rollout import Rollout
from agentgym.runner import RolloutRequest, RolloutRunner
from agentgym.sandbox import close_sandboxes
from agentgym.session import SessionManager
from agentgym.tokens import Renderer, get_parser
from agentgym.trainer.cluster import Worker
from agentgym.trainer.model import load_tokenizer
from agentgym.trainer.rollout.engines import Engine, RolloutSetup, make_engine
from agentgym.trainer.rollout.router import EngineRouter


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """What a call of `RolloutWorker.generate` gives back."""

    rollouts: list[Rollout]
    sessions_opened: int
    sessions_closed: int
    sessions_live: int
    engine: dict[str, float]
    """Counters of the engine for this call: tokens generated, prefilled and reused, decode steps."""

    @classmethod
    def merge(cls, reports: Sequence[RolloutReport], rollouts: list[Rollout]) -> RolloutReport:
        """One report of several workers; counters are summed."""
        engine: dict[str, float] = {}
        for report in reports:
            for name, value in report.engine.items():
                engine[name] = engine.get(name, 0.0) + value
        return cls(
            rollouts=rollouts,
            sessions_opened=sum(r.sessions_opened for r in reports),
            sessions_closed=sum(r.sessions_closed for r in reports),
            sessions_live=sum(r.sessions_live for r in reports),
            engine=engine,
        )


def relax_garbage_collection() -> None:
    """Collect less often, and never walk what is loaded by now.

    The libraries leave some hundred thousand objects that live as long as the process; walking them again and again
    took a quarter of the time of a turn.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def connect_reward_model(scorer: Scorer, workers: Sequence[Worker]) -> None:
    """Let the manager ``model`` score with these workers, in turn."""
    manager = scorer.manager
    if isinstance(manager, ModelManager):
        turns = itertools.cycle(workers)

        async def classify(pairs: Sequence[tuple[str, str]]) -> Sequence[float]:
            scores: Sequence[float] = await asyncio.wrap_future(next(turns).submit("score", list(pairs)))
            return scores

        manager.connect(classify)


class RolloutWorker:
    """Plays requests concurrently on one event loop, the engine computing in a thread of its own.

    Args:
        rank: of the rollout workers.
        setup: environment, model and engine.
    """

    def __init__(self, rank: int, setup: RolloutSetup) -> None:
        self.rank = rank
        self.setup = setup
        plugins.load(setup.plugins)
        settings = setup.rollout
        self.tokenizer = load_tokenizer(setup.model.path, revision=setup.model.revision)
        self.renderer = Renderer(self.tokenizer, template_kwargs=settings.template_kwargs)
        self.engine: Engine = make_engine(setup, self.tokenizer)
        self.manager = SessionManager.of(settings)
        self.runner = RolloutRunner(
            manager=self.manager,
            generator=self.engine,
            renderer=self.renderer,
            parser=get_parser(settings.parser),
            scorer=make_scorer(
                setup.reward, max_response_length=settings.max_response_length, decode=self.renderer.decode
            ),
        )
        if setup.reward_model and self.runner.scorer is not None:
            connect_reward_model(self.runner.scorer, setup.reward_model)
        self._tasks: set[asyncio.Task[Rollout]] = set()
        relax_garbage_collection()

    async def generate(
        self, requests: Sequence[RolloutRequest], finished: Callable[[Rollout], None] | None = None
    ) -> RolloutReport:
        """Play all requests; rollouts in the order of the requests. ``finished`` is told of each as it ends."""
        await self.engine.ready()
        before, engine_before = self.manager.stats(), self.engine.stats()
        if self.runner.scorer is not None:
            self.runner.scorer.expect(request.group for request in requests)
        self.engine.begin_batch([request.key for request in requests], self.setup.rollout.session_limit)
        tasks = [asyncio.create_task(self._play(request, finished)) for request in requests]
        self._tasks.update(tasks)
        try:
            rollouts = await asyncio.gather(*tasks)
        finally:
            await self.cancel()
            if self.setup.places:
                await self.engine.rest()
        after, engine_after = self.manager.stats(), self.engine.stats()
        return RolloutReport(
            rollouts=rollouts,
            sessions_opened=after.opened - before.opened,
            sessions_closed=after.closed - before.closed,
            sessions_live=after.live,
            engine={name: value - engine_before[name] for name, value in engine_after.items()} | self._checksum(),
        )

    def _checksum(self) -> dict[str, float]:
        return {} if self.engine.checksum is None else {"weights_checksum": float(self.engine.checksum)}

    async def _play(self, request: RolloutRequest, finished: Callable[[Rollout], None] | None) -> Rollout:
        try:
            rollout = await self.runner.run(request, lambda: self.engine.finish(request.key))
        finally:
            self.engine.finish(request.key)
        if finished is not None:
            finished(rollout)
        return rollout

    async def cancel(self) -> None:
        """Cancel what is played and wait until its sessions are released."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.difference_update(tasks)
        if self.runner.scorer is not None:
            self.runner.scorer.forget()

    async def update_weights(self, weights: dict[str, Tensor], version: int) -> None:
        """Load new weights between requests."""
        await self.engine.update_weights(weights, version)

    async def begin_transfer(self) -> list[Any]:
        """Hold requests back while the trainer's processes give weights to the engines; returns their addresses."""
        assert isinstance(self.engine, EngineRouter)
        return await self.engine.begin_transfer()

    async def end_transfer(self, version: int | None) -> None:
        """The engines have the weights of that version; None: it failed."""
        assert isinstance(self.engine, EngineRouter)
        await self.engine.end_transfer(version)

    async def close(self) -> None:
        """Cancel, close the session manager, stop the engine."""
        await self.cancel()
        await self.manager.aclose()
        await close_sandboxes()
        if self.runner.scorer is not None:
            await self.runner.scorer.aclose()
        await self.engine.aclose()

"""Plays one task and always comes back with a `Rollout`: the same code for training, validation and evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentgym.errors import AgentGymError, EnvError, boundary
from agentgym.generation import Generator
from agentgym.loops.base import LoopSampling, make_agent_loop, stamp
from agentgym.rewards.scorer import Episode, Scorer
from agentgym.rollout import Rollout
from agentgym.session import Session, SessionManager
from agentgym.tokens.output import AgentLoopOutput
from agentgym.types import RolloutStatus

if TYPE_CHECKING:
    from agentgym.tokens import Renderer, ToolParser

MAX_ATTEMPTS = 2
"""A rollout that fails for reasons of infrastructure is tried once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One task to play once. Plain data: it travels to rollout workers."""

    key: str
    """Unique among the rollouts in flight; the engine keeps the KV cache under it."""
    env_id: str
    task_id: str
    group: str
    sample: int
    sampling: LoopSampling
    agent_loop: str | Mapping[str, Any] = "tool_agent"
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    split: str = "train"
    seed: int | None = None
    """Of the environment's ``reset``; the same for all samples of a group."""
    max_turns: int | None = None
    max_user_turns: int | None = None


class RolloutRunner:
    """Opens a session for a request, lets the loop play it, and records how it ended.

    Failures are data: a fault of the environment or of the infrastructure becomes a rollout whose reward is None. Only
    cancellation is raised, after the session has been released.

    Args:
        manager: owns sessions and their limit.
        generator: the engine.
        renderer: of the model's tokenizer.
        parser: of the model's tool calls.
        scorer: gives rollouts their reward instead of the environment's terminal score; None: that one stands.
    """

    def __init__(
        self,
        *,
        manager: SessionManager,
        generator: Generator,
        renderer: Renderer,
        parser: ToolParser,
        scorer: Scorer | None = None,
    ) -> None:
        self.manager = manager
        self.generator = generator
        self.renderer = renderer
        self.parser = parser
        self.scorer = scorer

    async def run(self, request: RolloutRequest, played: Callable[[], None] | None = None) -> Rollout:
        """Play the request, once more if the infrastructure failed; then have it scored.

        Args:
            request: what to play.
            played: called when nothing more is asked of the engine.
        """
        for attempt in range(1, MAX_ATTEMPTS + 1):
            episode = await self._attempt(request, attempt)
            if episode.rollout.status is not RolloutStatus.FAILED_INFRA:
                break
        if played is not None:
            played()
        return await episode.scored(self.scorer)

    async def _attempt(self, request: RolloutRequest, attempt: int) -> Episode:
        start = time.monotonic()
        segments: list[AgentLoopOutput] = []
        session = self.manager.open(
            request.env_id,
            seed=request.seed,
            options={"task_id": request.task_id, "split": request.split},
            max_turns=request.max_turns,
            max_user_turns=request.max_user_turns,
            env_kwargs=request.env_kwargs,
        )
        try:
            async with session:
                segments = await self._play(request, session)
        except AgentGymError:
            pass  # the session's outcome says what happened; a failure is data
        finally:
            await self.generator.release(request.key)
        rollout = Rollout(
            env_id=request.env_id,
            task_id=request.task_id,
            group=request.group,
            sample=request.sample,
            outcome=session.outcome,
            segments=segments,
            conversation=list(session.conversation),
            seconds=time.monotonic() - start,
            attempts=attempt,
            split=request.split,
            seed=request.seed,
            data_source="" if session.task is None else session.task.data_source,
        )
        return Episode.of(rollout, session)

    async def _play(self, request: RolloutRequest, session: Session) -> list[AgentLoopOutput]:
        name = request.agent_loop
        if session.task is not None and session.task.agent_name is not None:
            name = session.task.agent_name
        loop = make_agent_loop(name, generator=self.generator, renderer=self.renderer, parser=self.parser)
        if hasattr(session.env, "token_cutter"):
            session.env.token_cutter = self.renderer.cutter
        if self.scorer is not None:
            self.scorer.prepare(session)
        with boundary(f"agent loop {name!r}", task_id=request.task_id):
            outputs = await loop.run(request.sampling, session, request.key)
            if not session.done:
                raise EnvError(
                    f"agent loop {name!r} returned before its session was done; it must step until session.done "
                    f"or call session.truncate(...)",
                    task_id=request.task_id,
                )
        return stamp(outputs, session)

"""Plays the (task, sample) pairs of an evaluation: agents through sessions, models through the rollout worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from agentgym import agents
from agentgym.errors import AgentGymError, ConfigError, boundary
from agentgym.evaluation.endpoint import EndpointAgent, EndpointRefused, api_key, base_url
from agentgym.evaluation.rows import Key
from agentgym.evaluation_config import EvalConfig
from agentgym.loops.base import derive_seed
from agentgym.rewards.config import make_scorer
from agentgym.rewards.scorer import Episode, Scorer
from agentgym.rollout import Rollout
from agentgym.runner import MAX_ATTEMPTS
from agentgym.session import Session, SessionManager
from agentgym.types import RolloutStatus

Finished = Callable[[Rollout], None]
Act = Callable[[Session, MutableMapping[str, float]], Awaitable[None]]
"""Plays an open session to its end and may add metrics."""


async def play(config: EvalConfig, todo: Sequence[Key], finished: Finished) -> None:
    """Play all of ``todo``; ``finished`` is told of each rollout as it ends.

    Raises:
        ConfigError: the endpoint refuses the evaluation's key, model or address.
    """
    agent = None if config.agent in (None, *agents.BUILT_IN) else agents.load_agent(str(config.agent))
    if config.endpoint.url is None and config.agent is None:
        await _play_model(config, todo, finished)
        return
    if config.endpoint.url is None and agent is not None and agents.needs_endpoint(agent):
        through_proxy = {"rollout": config.rollout.model_copy(update={"agent_loop": external_loop(config.agent)})}
        await _play_model(config.model_copy(update=through_proxy), todo, finished)
        return
    async with AsyncExitStack() as stack:
        await _play_sessions(config, todo, _act(config, agent, stack), finished)


def _act(config: EvalConfig, agent: agents.Agent | None, stack: AsyncExitStack) -> Act:
    """What plays a session: the configured agent, or the model behind the endpoint."""
    if agent is None and config.agent is None:
        from agentgym.tokens import get_parser

        player = EndpointAgent(config.model.path, config.endpoint, config.rollout, get_parser(config.rollout.parser))
        stack.push_async_callback(player.aclose)
        return player.play
    function = agent or {"oracle": agents.play_oracle, "noop": agents.play_nothing}[str(config.agent)]
    given: list[Any] = []
    if agent is not None and agents.needs_endpoint(agent):
        assert config.endpoint.url is not None
        url, key = base_url(config.endpoint.url), api_key(config.endpoint)
        given.append(agents.Endpoint(base_url=url, api_key=key, model=config.model.path))

    async def act(session: Session, metrics: MutableMapping[str, float]) -> None:
        task_id = None if session.task is None else session.task.id
        with boundary(f"agent {config.agent!r}", task_id=task_id):
            await agents.finish(session, await session.guard(function(session, *given)))

    return act


def external_loop(agent: str | None) -> dict[str, Any]:
    """The loop in which an agent asks the model through a recording endpoint."""
    return {"name": "external", "agent": agent}


async def _play_sessions(config: EvalConfig, todo: Sequence[Key], act: Act, finished: Finished) -> None:
    settings = config.rollout
    async with (
        SessionManager.of(settings) as manager,
        AsyncExitStack() as stack,
    ):
        scorer = make_scorer(config.reward, max_response_length=settings.max_response_length)
        if scorer is not None:
            stack.push_async_callback(scorer.aclose)
            scorer.expect(task_id for task_id, _ in todo)

        async def one(key: Key) -> None:
            for attempt in range(1, MAX_ATTEMPTS + 1):
                episode = await _attempt(config, manager, key, act, attempt, scorer)
                if episode.rollout.status is not RolloutStatus.FAILED_INFRA:
                    break
            finished(await episode.scored(scorer))

        try:
            async with asyncio.TaskGroup() as group:
                for key in todo:
                    group.create_task(one(key))
        except* ConfigError as errors:
            # One wrong key fails every rollout: the first says it all.
            raise errors.exceptions[0] from None


async def _attempt(
    config: EvalConfig, manager: SessionManager, key: Key, act: Act, attempt: int, scorer: Scorer | None
) -> Episode:
    task_id, sample = key
    start = time.monotonic()
    metrics: dict[str, float] = {}
    session = manager.open(
        config.env.name,
        seed=env_seed(config, task_id),
        options={"task_id": task_id, "split": config.split},
        max_turns=config.env.max_turns,
        max_user_turns=config.env.max_user_turns,
        env_kwargs=config.env.kwargs,
    )
    try:
        async with session:
            if scorer is not None:
                scorer.prepare(session)
            await act(session, metrics)
    except EndpointRefused:
        raise
    except AgentGymError:
        if session.status is None:
            raise
    rollout = Rollout(
        env_id=config.env.name,
        task_id=task_id,
        group=task_id,
        sample=sample,
        outcome=session.outcome,
        conversation=list(session.conversation),
        seconds=time.monotonic() - start,
        attempts=attempt,
        metrics=metrics,
        split=config.split,
        seed=env_seed(config, task_id),
        data_source="" if session.task is None else session.task.data_source,
    )
    return Episode.of(rollout, session)


async def _play_model(config: EvalConfig, todo: Sequence[Key], finished: Finished) -> None:
    """Through the same engine and loop as in training."""
    from agentgym.trainer.requests import loop_sampling, request
    from agentgym.trainer.rollout.engines import RolloutSetup
    from agentgym.trainer.rollout.worker import RolloutWorker

    setup = RolloutSetup(
        plugins=config.plugins,
        envs=config.env.members(),
        model=config.model,
        rollout=config.rollout,
        threads=config.threads,
        reward=config.reward.shipped(),
    )
    worker = RolloutWorker(0, setup)
    requests = [
        request(
            config.env,
            config.rollout,
            key=f"{task_id}/{sample}",
            task_id=task_id,
            group=task_id,
            sample=sample,
            split=config.split,
            env_seed=env_seed(config, task_id),
            sampling=loop_sampling(config.rollout, seed=derive_seed(config.seed, "eval", task_id, sample)),
        )
        for task_id, sample in todo
    ]
    try:
        await worker.generate(requests, finished)
    finally:
        await worker.close()


def env_seed(config: EvalConfig, task_id: str) -> int:
    """The environment's seed for a task: the same in every evaluation with this seed."""
    return derive_seed(config.seed, "env", task_id) % 2**31

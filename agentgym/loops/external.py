"""`external`: an agent of the user's, written in any framework, plays the episode through a recording endpoint."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from agentgym.agents import Endpoint, finish, load_agent, needs_endpoint
from agentgym.errors import AgentGymError, ConfigError, SessionTimeout, boundary
from agentgym.generation import Generator
from agentgym.loops.base import AgentLoop, LoopSampling, register_agent_loop
from agentgym.session import Session
from agentgym.tokens.output import AgentLoopOutput
from agentgym.types import RolloutStatus

if TYPE_CHECKING:
    from agentgym.tokens import Renderer, ToolParser


@register_agent_loop("external")
class ExternalLoop(AgentLoop):
    """Starts ``agent(session, endpoint)`` and records what it asks the model, in as many segments as it takes.

    The endpoint is an OpenAI-compatible server for this rollout alone, on a free port of this machine. The agent either
    steps the session itself or returns its final answer, which is stepped for it. Sampling is the trainer's, whatever
    the agent asks for; it may ask for fewer tokens. A request beyond the token budget is refused with the code
    ``context_length_exceeded``; if the agent ends because of that, the rollout is truncated.

    Args:
        agent: ``my_module:my_agent`` or ``my_file.py:my_agent``, an async function of ``(session, endpoint)``.

    Example:
        ``rollout.agent_loop={name: external, agent: my_file.py:my_agent}``
    """

    def __init__(self, *, generator: Generator, renderer: Renderer, parser: ToolParser, agent: str) -> None:
        super().__init__(generator=generator, renderer=renderer, parser=parser)
        self.place = agent
        self.agent = load_agent(agent)
        if not needs_endpoint(self.agent):
            raise ConfigError(f"agent={agent!r}: expected a function of (session, endpoint), to have a model to ask")

    async def run(self, sampling: LoopSampling, session: Session, key: str) -> list[AgentLoopOutput]:
        from agentgym.proxy.recorder import Recorder
        from agentgym.proxy.server import ProxyServer

        recorder = Recorder(
            generator=self.generator,
            renderer=self.renderer,
            parser=self.parser,
            key=key,
            sampling=sampling,
            fixed=True,
        )
        secret = secrets.token_urlsafe(16)

        def only_this(given: str) -> Recorder:
            if given != secret:
                raise ConfigError("this endpoint belongs to another agent: use the base_url and api_key it was given")
            return recorder

        task_id = None if session.task is None else session.task.id
        async with ProxyServer(model="policy", make_recorder=only_this).serve() as base_url:
            endpoint = Endpoint(base_url=base_url, api_key=secret, model="policy")
            try:
                with boundary(f"agent {self.place!r}", task_id=task_id):
                    await finish(session, await session.guard(self.agent(session, endpoint)))
            except SessionTimeout:
                pass  # the session has its status; what was sampled so far is kept
            except AgentGymError:
                if recorder.lost is not None:
                    raise recorder.lost from None
                if session.done or not recorder.exhausted:
                    raise
                await session.truncate(RolloutStatus.TRUNCATED_TOKENS)
        return recorder.outputs()

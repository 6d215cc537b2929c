"""`single_turn`: one prompt, one answer."""

from __future__ import annotations

from agentgym.errors import SessionTimeout
from agentgym.loops.base import AgentLoop, LoopSampling, register_agent_loop
from agentgym.session import Session
from agentgym.tokens.output import AgentLoopOutput
from agentgym.types import RolloutStatus


@register_agent_loop("single_turn")
class SingleTurnLoop(AgentLoop):
    """Samples one turn and hands it to the session; an environment that wants more turns sees a truncated episode."""

    async def run(self, sampling: LoopSampling, session: Session, key: str) -> list[AgentLoopOutput]:
        trace = await self.open_prompt(sampling, session)
        if session.done:
            return [trace.output()]
        try:
            request = sampling.for_turn(0, sampling.max_response_length, self.renderer.stop_token_ids)
            generation = await self.generate(trace, request, session, key)
            trace.add_model(generation, 0)
            await session.step(self.read_turn(generation, session, 0))
            if not session.done:
                cut = generation.finish_reason == "length"
                await session.truncate(RolloutStatus.TRUNCATED_TOKENS if cut else RolloutStatus.TRUNCATED_TURNS)
        except SessionTimeout:
            pass  # the session has its status; what was sampled so far is kept
        return [trace.output()]

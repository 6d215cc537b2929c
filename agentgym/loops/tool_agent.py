"""`tool_agent`: the multi-turn loop, written as a state machine.

    PENDING -> GENERATING -> PROCESSING_TOOLS | INTERACTING -> GENERATING ... -> TERMINATED

PENDING renders the first prompt. GENERATING samples one turn. PROCESSING_TOOLS (a turn with calls, or malformed ones)
and INTERACTING (a turn of words) hand the turn to the session, whose environment executes it, and append its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from agentgym.errors import SessionTimeout
from agentgym.loops.base import AgentLoop, LoopSampling, Trace, register_agent_loop
from agentgym.session import Session
from agentgym.tokens.output import AgentLoopOutput
from agentgym.types import AssistantTurn, RolloutStatus


class State(Enum):
    """Where a rollout stands."""

    PENDING = auto()
    GENERATING = auto()
    PROCESSING_TOOLS = auto()
    INTERACTING = auto()
    TERMINATED = auto()


@dataclass(slots=True)
class Progress:
    """What one rollout carries from state to state."""

    sampling: LoopSampling
    session: Session
    key: str
    segments: list[Trace] = field(default_factory=list)
    turn: AssistantTurn | None = None
    sampled_ids: Sequence[int] = ()
    turns: int = 0

    @property
    def trace(self) -> Trace:
        """The segment that grows."""
        return self.segments[-1]

    @property
    def budget(self) -> int:
        """Response tokens left, model and environment tokens of all segments counted."""
        return self.sampling.max_response_length - sum(len(s.response_ids) for s in self.segments)


@register_agent_loop("tool_agent")
class ToolAgentLoop(AgentLoop):
    """Generates, lets the environment answer, and goes on until the session is done or a budget is used up."""

    async def run(self, sampling: LoopSampling, session: Session, key: str) -> list[AgentLoopOutput]:
        progress = Progress(sampling, session, key)
        handlers = {
            State.PENDING: self.pending,
            State.GENERATING: self.generating,
            State.PROCESSING_TOOLS: self.answering,
            State.INTERACTING: self.answering,
        }
        state = State.PENDING
        try:
            while state is not State.TERMINATED:
                state = await handlers[state](progress)
        except SessionTimeout:
            pass  # the session has its status; what was sampled so far is kept
        return [trace.output() for trace in progress.segments]

    async def pending(self, progress: Progress) -> State:
        """Render the first prompt."""
        progress.segments.append(await self.open_prompt(progress.sampling, progress.session))
        return State.TERMINATED if progress.session.done else State.GENERATING

    async def generating(self, progress: Progress) -> State:
        """Sample one turn with at most the tokens that are left."""
        budget = progress.budget
        if budget <= 0:
            await progress.session.truncate(RolloutStatus.TRUNCATED_TOKENS)
            return State.TERMINATED
        sampling = progress.sampling.for_turn(progress.turns, budget, self.renderer.stop_token_ids)
        generation = await self.generate(progress.trace, sampling, progress.session, progress.key)
        progress.trace.add_model(generation, progress.turns)
        progress.sampled_ids = generation.token_ids
        progress.turn = self.read_turn(generation, progress.session, progress.turns)
        progress.turns += 1
        calls = progress.turn.tool_calls or progress.turn.errors
        return State.PROCESSING_TOOLS if calls else State.INTERACTING

    async def answering(self, progress: Progress) -> State:
        """Let the environment execute the turn, and append its answer."""
        session, turn = progress.session, progress.turn
        assert turn is not None
        before = list(session.conversation)
        result = await session.step(turn)
        if session.done:
            return State.TERMINATED
        increment = self.renderer.extend(
            before, session.conversation[len(before)], result.observation, session.tools, progress.sampled_ids
        )
        if increment.new_prompt is not None:
            return await self._start_segment(progress, increment.new_prompt, increment.reason)
        # An observation that does not fit is dropped whole: half of one would break the template.
        if len(increment.appended_end) + len(increment.ids) > progress.budget:
            await session.truncate(RolloutStatus.TRUNCATED_TOKENS)
            return State.TERMINATED
        progress.trace.add_fixed(increment.appended_end, "template", progress.turns - 1)
        progress.trace.add_fixed(increment.ids, "environment", progress.turns - 1)
        return State.GENERATING

    async def _start_segment(self, progress: Progress, prompt_ids: list[int], reason: str) -> State:
        """The template rewrote the history: what was sampled stays as it is, the next turn has a prompt of its own."""
        limit = progress.sampling.max_prompt_length + progress.sampling.max_response_length - progress.budget
        if len(prompt_ids) > limit:
            await progress.session.truncate(RolloutStatus.TRUNCATED_TOKENS)
            return State.TERMINATED
        progress.segments.append(Trace(prompt_ids, new_segment=reason))
        return State.GENERATING

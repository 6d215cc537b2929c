"""`Recorder`: the chat requests of one session as exact token sequences.

A request repeats the whole conversation. Where it continues one that the recorder answered, only what is new is
rendered and appended (mask 0), as an agent loop does; the ids that the engine sampled stay as they are (mask 1). Where
it does not (the agent rewrote its history, started a second conversation, or changed its tools) a new segment begins.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agentgym.errors import AgentGymError, ConfigError, InfraError
from agentgym.generation import Generation, Generator
from agentgym.loops.base import LoopSampling, Trace
from agentgym.messages import assistant_message, from_openai_messages, text_of
from agentgym.tokens.output import AgentLoopOutput
from agentgym.types import AssistantTurn, Message, ToolCall

if TYPE_CHECKING:
    from agentgym.tokens import Renderer, ToolParser

Tools = list[dict[str, Any]]
REWRITTEN = "the agent's request does not continue a recorded conversation"


class ContextExceeded(AgentGymError):
    """The conversation does not fit into what is left of the token budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a request asks for; None where it says nothing."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An answered request."""

    message: Message
    finish_reason: str
    """``stop``, ``length`` or ``tool_calls``."""
    prompt_ids: Sequence[int]
    """The whole history that the engine continued."""
    generation: Generation


@dataclass(slots=True)
class Branch:
    """A conversation that can be continued, and the segment that records it."""

    trace: Trace
    messages: list[Message]
    """Up to the last answer."""
    tools: Tools
    sampled_ids: Sequence[int]


class Recorder:
    """Answers the requests of one session, one after the other, and records them.

    Args:
        generator: the engine.
        renderer: of the model's tokenizer.
        parser: of the model's tool calls.
        key: the engine's name for the session.
        sampling: limits, and the sampling of requests that ask for nothing else.
        fixed: ``sampling`` holds whatever a request asks for, except that it may ask for fewer tokens: training learns
            from the distribution that it sampled.
    """

    def __init__(
        self,
        *,
        generator: Generator,
        renderer: Renderer,
        parser: ToolParser,
        key: str,
        sampling: LoopSampling,
        fixed: bool = False,
    ) -> None:
        self.generator = generator
        self.renderer = renderer
        self.parser = parser
        self.key = key
        self.sampling = sampling
        self.fixed = fixed
        self.turns = 0
        self.exhausted = False
        """A request did not fit into the budget."""
        self.lost: InfraError | None = None
        """The engine was lost while it answered."""
        self._branches: list[Branch] = []
        self._lock = asyncio.Lock()

    async def complete(self, messages: Sequence[Mapping[str, Any]], tools: Tools, wishes: Wishes) -> Completion:
        """Answer one request.

        Raises:
            ConfigError: the messages are none that a model answers.
            ContextExceeded: they do not fit.
            InfraError: the engine was lost.
        """
        conversation = read_messages(messages)
        async with self._lock:
            try:
                return await self._complete(conversation, tools, wishes)
            except ContextExceeded:
                self.exhausted = True
                raise
            except InfraError as error:
                self.lost = error
                raise

    def outputs(self) -> list[AgentLoopOutput]:
        """The segments so far, in the order in which they began."""
        return [branch.trace.output() for branch in self._branches]

    @property
    def conversation(self) -> list[Message]:
        """The longest conversation."""
        return max((branch.messages for branch in self._branches), key=len, default=[])

    async def _complete(self, messages: list[Message], tools: Tools, wishes: Wishes) -> Completion:
        branch = self._continued(messages, tools)
        trace, ended, added = self._prepare(branch, messages, tools)
        budget = self._budget - len(ended) - len(added)
        if budget <= 0:
            raise ContextExceeded(
                f"the conversation has used all but {self._budget} of {self.sampling.max_response_length} tokens "
                f"(max_response_length), and the new messages take {len(ended) + len(added)}"
            )
        prompt_ids = [*trace.ids, *ended, *added]
        generation = await self.generator.generate(prompt_ids, self._params(wishes, budget), self.key)
        # Nothing is recorded before the engine has answered: an aborted request leaves no trace.
        trace.add_fixed(ended, "template", max(0, self.turns - 1))
        trace.add_fixed(added, "environment", max(0, self.turns - 1))
        trace.add_model(generation, self.turns)
        message, reason = self._read(generation, tools)
        self.turns += 1
        answered = Branch(trace, [*messages, message], tools, generation.token_ids)
        if branch is not None and branch.trace is trace:
            self._branches[self._branches.index(branch)] = answered
        else:
            self._branches.append(answered)
        return Completion(message=message, finish_reason=reason, prompt_ids=prompt_ids, generation=generation)

    def _prepare(
        self, branch: Branch | None, messages: list[Message], tools: Tools
    ) -> tuple[Trace, Sequence[int], Sequence[int]]:
        """The segment to append to, and the ids to append before the engine goes on: end of turn, new messages."""
        if branch is None:
            reason = REWRITTEN if self._branches else ""
            return self._new_segment(self.renderer.prompt(messages, tools or None), reason), [], []
        known = len(branch.messages)
        # The answer as it was given, not as the agent repeats it: its calls have the ids that the engine's turn has.
        increment = self.renderer.extend(
            branch.messages[:-1], branch.messages[-1], messages[known:], tools or None, branch.sampled_ids
        )
        if increment.new_prompt is not None:
            return self._new_segment(increment.new_prompt, increment.reason), [], []
        return branch.trace, increment.appended_end, increment.ids

    def _new_segment(self, prompt_ids: list[int], reason: str) -> Trace:
        limit = self.sampling.max_prompt_length + self.sampling.max_response_length - self._budget
        if len(prompt_ids) > limit:
            raise ContextExceeded(f"the prompt has {len(prompt_ids)} tokens, {limit} fit (max_prompt_length)")
        return Trace(prompt_ids, new_segment=reason)

    @property
    def _budget(self) -> int:
        """Response tokens left, those of all segments counted."""
        return self.sampling.max_response_length - sum(len(b.trace.response_ids) for b in self._branches)

    def _continued(self, messages: list[Message], tools: Tools) -> Branch | None:
        """The recorded conversation that ``messages`` continue; of several the longest."""
        canonical = [_canonical(message) for message in messages]
        found: Branch | None = None
        for branch in self._branches:
            known = [_canonical(message) for message in branch.messages]
            if tools == branch.tools and len(known) < len(canonical) and canonical[: len(known)] == known:
                found = branch if found is None or len(known) > len(found.messages) else found
        return found

    def _params(self, wishes: Wishes, budget: int) -> Any:
        limit = budget if wishes.max_tokens is None else min(budget, wishes.max_tokens)
        params = self.sampling.for_turn(self.turns, limit, self.renderer.stop_token_ids)
        if self.fixed:
            return replace(params, stop=[*params.stop, *wishes.stop])
        return replace(
            params,
            temperature=params.temperature if wishes.temperature is None else wishes.temperature,
            top_p=params.top_p if wishes.top_p is None else wishes.top_p,
            seed=params.seed if wishes.seed is None else wishes.seed,
            stop=[*params.stop, *wishes.stop],
        )

    def _read(self, generation: Generation, tools: Tools) -> tuple[Message, str]:
        """The answer as a message. A malformed call, or one that the limit cut, stays text: it is not to be run."""
        text = self.renderer.decode(generation.token_ids)
        parsed = self.parser.parse(self.renderer.thinking_prefix + text, tools) if tools else None
        if generation.finish_reason == "length" or parsed is None or parsed.errors or not parsed.tool_calls:
            return {"role": "assistant", "content": self.renderer.thinking_prefix + text}, generation.finish_reason
        calls = [
            ToolCall(name=call.name, arguments=call.arguments, id=f"call{self.turns % 100:02d}{i % 1000:03d}")
            for i, call in enumerate(parsed.tool_calls)
        ]
        return assistant_message(AssistantTurn(content=parsed.content, tool_calls=calls)), "tool_calls"


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages of a request. Raises `ConfigError` for what no model can answer."""
    if not messages or messages[-1].get("role") == "assistant":
        raise ConfigError("messages: expected at least one, the last of another role than 'assistant'")
    return from_openai_messages(messages)


def _canonical(message: Message) -> str:
    """What must be equal for two messages to be the same: frameworks change ids, empty content and white space."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return json.dumps([message["role"], text_of(message).strip(), calls], sort_keys=True, default=str)

"""What every agent loop shares: its tools of the trade, the record it fills, and how loops are found by name."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from agentgym.errors import ConfigError, TokenAlignmentError
from agentgym.generation import Generation, Generator, SamplingParams
from agentgym.plugins import scan
from agentgym.registry import Registry, import_target
from agentgym.session import Session
from agentgym.tokens.output import AgentLoopOutput, Span, SpanKind
from agentgym.types import AssistantTurn, RolloutStatus, ToolCall

if TYPE_CHECKING:
    from agentgym.tokens import Renderer, ToolParser

LoopType = TypeVar("LoopType", bound="type[AgentLoop]")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSampling:
    """How a whole rollout is sampled. Lengths are in tokens.

    ``max_response_length`` counts model and environment tokens of all turns; ``max_turn_tokens`` bounds one turn.
    """

    max_prompt_length: int
    max_response_length: int
    max_turn_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: Sequence[str] = ()
    seed: int | None = None
    """Seed of the rollout; each turn derives its own from it."""

    def for_turn(self, turn: int, budget: int, stop_token_ids: Sequence[int]) -> SamplingParams:
        """Parameters of one request: at most ``budget`` tokens, its own seed."""
        limit = budget if self.max_turn_tokens is None else min(budget, self.max_turn_tokens)
        seed = None if self.seed is None else derive_seed(self.seed, turn)
        return SamplingParams(
            max_tokens=limit,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=stop_token_ids,
            stop=self.stop,
            seed=seed,
        )


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on every part and on nothing else (no process, no order of calls)."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(slots=True)
class Trace:
    """The token record of one segment while it grows."""

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    response_logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    new_segment: str = ""
    """Why the segment begins here: the reason why the template rewrote the history; empty for the first one."""

    @property
    def ids(self) -> list[int]:
        """Prompt and response: the whole history that the engine is asked to continue."""
        return self.prompt_ids + self.response_ids

    def add_model(self, generation: Generation, turn: int) -> None:
        """Append what the engine sampled: mask 1, its log-probs."""
        if len(generation.token_ids) != len(generation.logprobs):
            raise TokenAlignmentError(
                f"the engine returned {len(generation.token_ids)} ids and {len(generation.logprobs)} log-probs; "
                f"expected one log-prob per id"
            )
        self._add(generation.token_ids, 1, generation.logprobs, "model", turn, generation.weight_version)

    def add_fixed(self, ids: Sequence[int], kind: SpanKind, turn: int) -> None:
        """Append ids that nobody sampled: mask 0, log-prob 0.0."""
        self._add(ids, 0, [0.0] * len(ids), kind, turn, None)

    def _add(
        self,
        ids: Sequence[int],
        mask: int,
        logprobs: Sequence[float],
        kind: SpanKind,
        turn: int,
        version: int | None,
    ) -> None:
        if not ids:
            return
        start = len(self.response_ids)
        self.response_ids.extend(ids)
        self.response_mask.extend([mask] * len(ids))
        self.response_logprobs.extend(logprobs)
        span = Span(start=start, stop=len(self.response_ids), kind=kind, turn=turn, weight_version=version)
        self.spans.append(span)

    def output(self) -> AgentLoopOutput:
        """The finished record; reward and status are stamped on by the runner, which knows the outcome."""
        return AgentLoopOutput(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            response_mask=self.response_mask,
            response_logprobs=self.response_logprobs,
            spans=self.spans,
            extra_fields={"new_segment": self.new_segment} if self.new_segment else {},
        )


class AgentLoop(ABC):
    """Drives one session to its end with a token generator.

    Args:
        generator: the engine.
        renderer: turns messages into token ids for this model.
        parser: reads tool calls from the model's text.
    """

    def __init__(self, *, generator: Generator, renderer: Renderer, parser: ToolParser) -> None:
        self.generator = generator
        self.renderer = renderer
        self.parser = parser

    @abstractmethod
    async def run(
        self, sampling: LoopSampling, session: Session, key: str
    ) -> AgentLoopOutput | Sequence[AgentLoopOutput]:
        """Play the open session until it is done.

        Args:
            sampling: limits, temperature and seed of this rollout.
            session: an open session.
            key: the engine's name for this rollout (its KV cache is kept under it).

        Returns:
            The token record; several, in order, where the template rewrites history. The loop must leave the session
            done.
        """

    async def generate(self, trace: Trace, sampling: SamplingParams, session: Session, key: str) -> Generation:
        """One request under the session's wall clock, checked against its limit."""
        generation = await session.guard(self.generator.generate(trace.ids, sampling, key))
        if len(generation.token_ids) > sampling.max_tokens:
            raise TokenAlignmentError(
                f"the engine returned {len(generation.token_ids)} tokens, {sampling.max_tokens} were asked for"
            )
        return generation

    def read_turn(self, generation: Generation, session: Session, turn: int) -> AssistantTurn:
        """Parse sampled ids into the turn that the environment executes."""
        text = self.renderer.decode(generation.token_ids)
        parsed = self.parser.parse(self.renderer.thinking_prefix + text, session.tools)
        calls = [
            ToolCall(name=call.name, arguments=call.arguments, id=f"call{turn % 100:02d}{i % 1000:03d}")
            for i, call in enumerate(parsed.tool_calls)
        ]
        return AssistantTurn(
            content=parsed.content,
            tool_calls=calls,
            errors=parsed.errors,
            finish_reason=generation.finish_reason,
            raw=text,
        )

    async def open_prompt(self, sampling: LoopSampling, session: Session) -> Trace:
        """The first prompt. Where it is longer than the limit the session is truncated: an empty response row."""
        trace = Trace(self.renderer.prompt(session.conversation, session.tools))
        if len(trace.prompt_ids) > sampling.max_prompt_length:
            await session.truncate(RolloutStatus.TRUNCATED_TOKENS)
        return trace


agent_loops: Registry[type[AgentLoop]] = Registry("agent loop", scan)


def register_agent_loop(name: str, *, override: bool = False) -> Callable[[LoopType], LoopType]:
    """Decorator: make an `AgentLoop` class available as ``rollout.agent_loop=NAME`` and as a row's ``agent_name``."""

    def decorate(cls: LoopType) -> LoopType:
        agent_loops.register(name, cls, override=override)
        return cls

    return decorate


def make_agent_loop(
    which: str | Mapping[str, Any], *, generator: Generator, renderer: Renderer, parser: ToolParser
) -> AgentLoop:
    """An agent loop by registered name, or with arguments of its own: ``{"name": "external", **kwargs}`` for a
    registered one, ``{"_target_": "module:Class", **kwargs}`` for any."""
    cls, kwargs = find_agent_loop(which)
    return cls(generator=generator, renderer=renderer, parser=parser, **kwargs)


def find_agent_loop(which: str | Mapping[str, Any]) -> tuple[type[AgentLoop], dict[str, Any]]:
    """The class and the arguments of `make_agent_loop`."""
    if isinstance(which, str):
        return agent_loops.get(which), {}
    kwargs = dict(which)
    name, target = kwargs.pop("name", None), kwargs.pop("_target_", None)
    if isinstance(name, str) and target is None:
        return agent_loops.get(name), kwargs
    if not isinstance(target, str) or name is not None:
        raise ConfigError(
            f"agent loop {dict(which)!r}: expected a name, or a mapping with either 'name' or '_target_', a text"
        )
    cls = import_target(target, what=f"agent loop {target!r}")
    if not (isinstance(cls, type) and issubclass(cls, AgentLoop)):
        raise ConfigError(f"agent loop {target!r} is {cls!r}, expected a subclass of AgentLoop")
    return cls, kwargs


def stamp(outputs: AgentLoopOutput | Sequence[AgentLoopOutput], session: Session) -> list[AgentLoopOutput]:
    """The loop's records with the session's outcome on each of them."""
    outcome = session.outcome
    listed = [outputs] if isinstance(outputs, AgentLoopOutput) else list(outputs)
    return [
        replace(
            output,
            reward=outcome.reward,
            reward_components=outcome.reward_components,
            turn_scores=outcome.turn_scores,
            tool_rewards=outcome.tool_rewards,
            num_turns=outcome.num_turns,
            status=outcome.status,
            metrics={**outcome.metrics, **output.metrics},
        )
        for output in listed
    ]

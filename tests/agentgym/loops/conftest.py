"""An environment, a renderer of the shipped tokenizer, and an engine that plays given turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import agentgym
from agentgym import Task, ToolEnv, function_tool
from agentgym.generation import Generation, SamplingParams
from agentgym.loops import LoopSampling, make_agent_loop
from agentgym.rollout import Rollout
from agentgym.runner import RolloutRequest, RolloutRunner
from agentgym.session import SessionManager
from agentgym.tokens import Renderer, get_parser
from agentgym.trainer.model import load_tokenizer

CALL = '<tool_call>\n{"name": "say", "arguments": {"text": "%s"}}\n</tool_call>'


@function_tool
def say(text: str) -> str:
    """Says it.

    Args:
        text: what to say.
    """
    return text


class Talk(ToolEnv):
    """The answer 42 is right; ``say`` answers with what it is given."""

    tools = (say,)

    def tasks(self, split: str) -> list[Task]:
        names = {"0": None, "one": "single_turn"}
        return [Task(id=f"{split}-{n}", prompt="Say 42.", agent_name=agent) for n, agent in names.items()]

    def score(self, task: Task, answer: str) -> float:
        return float("42" in answer)


agentgym.register("talk-test", Talk, max_turns=6, override=True)


class Played:
    """A generator that returns given turns, in order, and remembers what it was asked.

    A turn is a text (encoded with an end token), or ids and a finish reason. Log-probs are -0.5.
    """

    def __init__(self, renderer: Renderer, turns: Sequence[str | tuple[Sequence[int], str]]) -> None:
        self.renderer = renderer
        self.turns = list(turns)
        self.prompts: list[list[int]] = []
        self.asked: list[SamplingParams] = []
        self.released: list[str] = []
        self.version = 7

    def ids(self, text: str) -> list[int]:
        return [*self.renderer.encode(text), self.renderer.stop_tokens["<|im_end|>"]]

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, session_id: str) -> Generation:
        self.prompts.append(list(prompt_ids))
        self.asked.append(sampling)
        turn = self.turns[len(self.prompts) - 1]
        ids, reason = (self.ids(turn), "stop") if isinstance(turn, str) else turn
        if len(ids) > sampling.max_tokens:
            ids, reason = ids[: sampling.max_tokens], "length"
        return Generation(
            token_ids=list(ids),
            logprobs=[-0.5] * len(ids),
            finish_reason=reason,  # type: ignore[arg-type]
            weight_version=self.version,
        )

    async def release(self, session_id: str) -> None:
        self.released.append(session_id)


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return Renderer(load_tokenizer("tiny"))


Play = Callable[..., Any]


@pytest.fixture
def play(renderer: Renderer) -> Play:
    """``await play(turns, max_response_length=..)`` -> (rollout, generator)."""

    async def run(
        turns: Sequence[str | tuple[Sequence[int], str]], *, task: str = "train-0", **limits: Any
    ) -> tuple[Rollout, Played]:
        generator = Played(renderer, turns)
        parser = get_parser("hermes")
        sampling = dataclasses.replace(LoopSampling(max_prompt_length=400, max_response_length=400, seed=1), **limits)
        async with SessionManager(limit=4) as manager:
            runner = RolloutRunner(manager=manager, generator=generator, renderer=renderer, parser=parser)
            request = RolloutRequest(
                key="k", env_id="talk-test", task_id=task, group="g", sample=0, seed=1, sampling=sampling
            )
            rollout = await runner.run(request)
        assert manager.stats().live == 0
        return rollout, generator

    return run


__all__ = ["CALL", "Played", "Talk", "make_agent_loop"]

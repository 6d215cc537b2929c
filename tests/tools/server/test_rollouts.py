"""A tool server that is lost in the middle of a rollout: the rollout is played again, or fails as infrastructure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import agentgym
from agentgym import Task, ToolEnv
from agentgym.generation import Generation, SamplingParams
from agentgym.loops import LoopSampling
from agentgym.rollout import Rollout
from agentgym.runner import RolloutRequest, RolloutRunner
from agentgym.session import SessionManager
from agentgym.tokens import Renderer, get_parser
from agentgym.tools.server import remote_tools
from agentgym.tools.server.process import ServerProcess
from agentgym.tools.server.remote import _process
from agentgym.trainer.metrics import of_rollouts
from agentgym.trainer.model import load_tokenizer
from agentgym.types import RolloutStatus

FILE = Path(__file__).with_name("served_tools.py")


class Remote(ToolEnv):
    """Its tools are those of a server process."""

    def __init__(self) -> None:
        super().__init__()
        self.tools = remote_tools("process", files=[FILE])

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(id=split, prompt="Say 42.")]

    def score(self, task: Task, answer: str) -> float:
        return float("42" in answer)


@pytest.fixture
def process() -> Iterator[ServerProcess]:
    agentgym.register("remote-tools-test", Remote, max_turns=4, override=True)
    found = _process((FILE.resolve(),), "", False, None).locator
    assert isinstance(found, ServerProcess)
    found.start()
    yield found
    found.close()


class Played:
    """A generator that plays given turns, whatever it is asked."""

    def __init__(self, renderer: Renderer, turns: Sequence[str]) -> None:
        self.renderer = renderer
        self.turns = list(turns)

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, session_id: str) -> Generation:
        ids = [*self.renderer.encode(self.turns.pop(0)), self.renderer.stop_tokens["<|im_end|>"]]
        return Generation(token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason="stop", weight_version=1)

    async def release(self, session_id: str) -> None:
        """Holds nothing."""


def call(tool: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


async def play(*turns: str) -> Rollout:
    renderer = Renderer(load_tokenizer("tiny"))
    sampling = LoopSampling(max_prompt_length=4000, max_response_length=1000, seed=1)
    async with SessionManager(limit=4, open_timeout=120) as manager:
        runner = RolloutRunner(
            manager=manager, generator=Played(renderer, turns), renderer=renderer, parser=get_parser("hermes")
        )
        rollout = await runner.run(
            RolloutRequest(
                key="k", env_id="remote-tools-test", task_id="train", group="g", sample=0, seed=1, sampling=sampling
            )
        )
    assert manager.stats().live == 0
    return rollout


async def test_the_rollout_is_played_again_with_a_new_server(process: ServerProcess, tmp_path: Path) -> None:
    first = process.pid
    die = call("die", once=str(tmp_path / "died"))
    rollout = await play(call("count"), die, call("count"), die, "42")
    assert (rollout.outcome.status, rollout.outcome.reward, rollout.attempts) == (RolloutStatus.COMPLETED, 1.0, 2)
    contents = [message["content"] for message in rollout.conversation if message["role"] == "tool"]
    assert contents == ["starts at 0\n1", "alive"]
    assert process.pid != first


async def test_a_server_that_dies_each_time_is_a_failed_rollout_and_never_a_reward_of_0(process: ServerProcess) -> None:
    rollout = await play(call("die"), call("die"), "42")
    assert (rollout.outcome.status, rollout.outcome.reward) == (RolloutStatus.FAILED_INFRA, None)
    assert (rollout.outcome.error_type, rollout.attempts) == ("InfraError", 2)
    assert "is lost" in (rollout.outcome.error or "")
    metrics = of_rollouts([rollout])
    assert metrics["rollout/failed"] == 1.0
    assert metrics["errors/InfraError"] == 1.0
    await asyncio.to_thread(process.close)

"""The tools python, bash and files in sessions of an environment with real sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from agentgym import SessionManager, ToolEnv
from agentgym.errors import ConfigError, InfraError
from agentgym.registration import EnvSpec
from agentgym.session import Session
from agentgym.tools.bash import BashTool
from agentgym.tools.files import FilesTool
from agentgym.tools.python import PythonTool
from agentgym.tools.sandbox.namespace import NamespaceBackend
from agentgym.tools.sandbox.pool import close_shared_pools, shared_stats
from agentgym.types import AssistantTurn, RolloutStatus, Task, ToolCall


class Desk(ToolEnv):
    tools = (PythonTool({"timeout": 0.7}), BashTool({"timeout": 0.7}), FilesTool({"max_bytes": 20}))

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(id=f"{split}-0", prompt="Do something.")]

    def score(self, task: Task, answer: str) -> float:
        return 1.0


SPEC = EnvSpec(id="agentgym/desk-v0", entry_point=Desk)


@pytest.fixture(params=["process", "namespace"])
def kwargs(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "namespace" and (reason := NamespaceBackend().unavailable()) is not None:
        pytest.skip(f"sandbox backend namespace: {reason}")
    return {"sandbox": {"backend": request.param, "pool_size": 0}}


@pytest.fixture
async def manager() -> AsyncIterator[SessionManager]:
    async with SessionManager() as manager:
        yield manager
    assert [stats.live for stats in shared_stats()] in ([], [0])
    await close_shared_pools()


async def call(session: Session, name: str, **arguments: Any) -> str:
    result = await session.step(AssistantTurn(tool_calls=(ToolCall(name=name, arguments=arguments, id="call00001"),)))
    return str(result.observation[-1]["content"])


async def test_state_and_files_are_shared_by_the_tools_of_a_session(
    manager: SessionManager, kwargs: Mapping[str, Any]
) -> None:
    async with manager.open(SPEC, env_kwargs=kwargs) as session:
        assert shared_stats() == []  # no reset starts a sandbox
        assert await call(session, "python", code="x = 40") == "(no output)"
        assert await call(session, "python", code="x + 2") == "42"
        assert await call(session, "files", action="write", path="notes/a.txt", content="Zürich\n") == (
            "wrote 8 bytes to notes/a.txt"
        )
        assert await call(session, "bash", command="cd notes && cat a.txt") == "Zürich"
        assert await call(session, "bash", command="basename $PWD; (exit 3)") == "notes\n[exit code 3]"
        assert await call(session, "files", action="list") == "notes  (folder)"
        assert await call(session, "files", action="list", path="notes") == "a.txt  8 bytes"
        assert await call(session, "files", action="read", path="notes/a.txt") == "Zürich\n"
        assert "a path must not contain '..'" in await call(session, "files", action="read", path="../x")
        await call(session, "files", action="write", path="long", content="0123456789" * 3)
        text = await call(session, "files", action="read", path="long")
        assert text == "01234567890123456789\n[only the first 20 bytes are shown]"
        await call(session, "bash", command="head -c 10 /dev/zero > ~/zero")
        assert "not a text file" in await call(session, "files", action="read", path="zero")
        await session.step(AssistantTurn(content="done"))
        assert session.outcome.reward == 1.0
    assert [(stats.used, stats.live) for stats in shared_stats()] == [(1, 0)]


async def test_the_model_is_told_what_became_of_its_state(manager: SessionManager, kwargs: Mapping[str, Any]) -> None:
    async with manager.open(SPEC, env_kwargs=kwargs) as session:
        await call(session, "python", code="x = 1")
        text = await call(session, "python", code="while True: pass")
        assert text.endswith("KeyboardInterrupt\n[stopped after 0.7 s; variables are kept]")
        text = await call(session, "python", code="import os; os._exit(2)")
        assert text == "[the call ended early: the python interpreter exited with code 2; variables were lost]"
        text = await call(session, "bash", command="exit 4")
        assert "the bash interpreter exited with code 4; variables and the working directory were lost]" in text
        await session.step(AssistantTurn(content="done"))
        assert session.outcome.metrics["tool/python/lost"] == 1.0


async def test_episodes_do_not_see_each_other(manager: SessionManager, kwargs: Mapping[str, Any]) -> None:  # D8
    async def play(number: int) -> list[str]:
        async with manager.open(SPEC, env_kwargs=kwargs) as session:
            await call(session, "python", code=f"x = {number}")
            await asyncio.sleep(0.01)
            return [await call(session, "python", code="x"), await call(session, "files", action="list")]

    assert await asyncio.gather(*(play(i) for i in range(4))) == [[str(i), "(empty folder)"] for i in range(4)]
    async with manager.open(SPEC, env_kwargs=kwargs) as session:
        assert "NameError" in await call(session, "python", code="x")


async def test_a_cancelled_session_leaves_no_sandbox(manager: SessionManager, kwargs: Mapping[str, Any]) -> None:
    begun = asyncio.Event()

    async def play() -> None:
        async with manager.open(SPEC, env_kwargs=kwargs) as session:
            await call(session, "python", code="x = 1")
            begun.set()
            await call(session, "bash", command="sleep 60")

    task = asyncio.create_task(play())
    await asyncio.wait_for(begun.wait(), 60)
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [stats.live for stats in shared_stats()] == [0]
    assert manager.stats().live == 0


async def test_tools_without_a_sandbox_say_what_is_missing(manager: SessionManager) -> None:
    async with manager.open(SPEC) as session:
        with pytest.raises(ConfigError, match=r"tool 'python' needs a sandbox.*env\.sandbox=auto"):
            await call(session, "python", code="1")


async def test_a_host_that_loses_the_sandbox_fails_the_rollout(
    manager: SessionManager, kwargs: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentgym.tools.sandbox.client.BOOT", "raise SystemExit('no worker here')")
    session = manager.open(SPEC, env_kwargs=kwargs)
    with pytest.raises(InfraError, match="was lost: the worker did not start: no worker here"):
        async with session:
            await call(session, "python", code="1")
    assert session.status is RolloutStatus.FAILED_INFRA


def test_gymnasium_steps_an_environment_with_a_sandbox(kwargs: Mapping[str, Any]) -> None:
    env = Desk(**kwargs)
    env.reset(seed=0)
    turn = AssistantTurn(tool_calls=(ToolCall(name="python", arguments={"code": "6 * 7"}, id="call00001"),))
    observation, reward, terminated, truncated, _ = env.step(turn)
    assert [message["content"] for message in observation] == ["42"]
    assert (reward, terminated, truncated) == (0.0, False, False)
    env.close()

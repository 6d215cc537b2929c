"""The contract of sandboxes: settings, and the lazy sandbox of an episode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from agentgym.errors import ConfigError, InfraError, SessionClosed, ToolError
from agentgym.sandbox import (
    FileEntry,
    Language,
    LazySandbox,
    RunResult,
    SandboxConfig,
    read_sandbox_config,
    sandbox_backends,
)


def test_settings_can_be_a_name_a_mapping_or_a_model() -> None:
    assert read_sandbox_config(None) is None
    assert read_sandbox_config("namespace") == SandboxConfig(backend="namespace")
    assert read_sandbox_config({"memory_mb": 256}) == SandboxConfig(memory_mb=256)
    config = SandboxConfig(pids=32)
    assert read_sandbox_config(config) is config
    assert (config.backend, config.network) == ("auto", "none")


@pytest.mark.parametrize(
    ("value", "message"),
    [("dokcer", "backend"), ({"memory": 1}, "memory"), ({"pids": 1}, "pids"), ({"network": "host"}, "network")],
)
def test_wrong_settings_are_named(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_sandbox_config(value)  # type: ignore[arg-type]


def test_the_backends_are_these() -> None:
    assert sandbox_backends.names() == ["docker", "namespace", "process"]


class Toy:
    """A sandbox that remembers; ``lose`` destroys it."""

    backend = "toy"

    def __init__(self, number: int) -> None:
        self.id = str(number)
        self.lost = False
        self.closed = 0

    def ensure_alive(self) -> None:
        if self.lost:
            raise ToolError("lost")

    async def run(self, language: Language, code: str, *, timeout: float) -> RunResult:
        if code == "lose":
            self.lost = True
            return RunResult(output="", status="lost", state_lost=True)
        return RunResult(output=self.id, status="ok")

    async def write_file(self, path: str, data: bytes) -> None: ...

    async def read_file(self, path: str, *, limit: int) -> bytes:
        return b""

    async def list_files(self, path: str = ".") -> list[FileEntry]:
        return []

    async def run_trusted(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float) -> RunResult:
        return RunResult(output="", status="ok")

    async def close(self) -> None:
        self.closed += 1


class Source:
    def __init__(self, delay: float = 0.0, failures: int = 0) -> None:
        self.made: list[Toy] = []
        self.delay = delay
        self.failures = failures

    async def open(self) -> Toy:
        await asyncio.sleep(self.delay)
        if self.failures:
            self.failures -= 1
            raise InfraError("no room")
        self.made.append(Toy(len(self.made)))
        return self.made[-1]


async def test_a_sandbox_opens_at_its_first_use_and_only_once() -> None:
    source = Source(delay=0.01)
    lazy = LazySandbox(SandboxConfig(), source)
    assert not lazy.opened
    results = await asyncio.gather(*(lazy.run("python", "x", timeout=1) for _ in range(5)))
    assert [result.output for result in results] == ["0"] * 5
    await lazy.close()
    await lazy.close()
    assert [toy.closed for toy in source.made] == [1]
    with pytest.raises(SessionClosed):
        await lazy.get()


async def test_one_that_was_never_used_is_never_opened() -> None:
    source = Source()
    lazy = LazySandbox(SandboxConfig(), source)
    await lazy.close()
    assert source.made == []


async def test_a_failed_start_is_tried_again_at_the_next_use() -> None:
    lazy = LazySandbox(SandboxConfig(), Source(failures=1))
    with pytest.raises(InfraError, match="no room"):
        await lazy.get()
    assert (await lazy.run("python", "x", timeout=1)).output == "0"


async def test_after_a_loss_that_was_told_there_is_a_fresh_one() -> None:
    source = Source()
    lazy = LazySandbox(SandboxConfig(), source)
    assert (await lazy.run("python", "lose", timeout=1)).status == "lost"
    assert (await lazy.run("python", "x", timeout=1)).output == "1"
    assert [toy.closed for toy in source.made] == [1, 0]


async def test_a_loss_between_two_calls_is_told_once() -> None:
    source = Source()
    lazy = LazySandbox(SandboxConfig(), source)
    await lazy.run("python", "x", timeout=1)
    source.made[0].lost = True
    with pytest.raises(ToolError, match="lost"):
        await lazy.get()
    assert (await lazy.get()).id == "1"


async def test_closing_twice_cancelled_still_closes() -> None:  # D2
    source = Source(delay=0.05)
    lazy = LazySandbox(SandboxConfig(), source)
    await lazy.get()
    closing = asyncio.create_task(lazy.close())
    await asyncio.sleep(0)
    closing.cancel()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert source.made[0].closed == 1


async def test_a_sandbox_that_cannot_be_destroyed_is_reported() -> None:
    source = Source()
    lazy = LazySandbox(SandboxConfig(), source)
    await lazy.get()

    async def stuck() -> None:
        await asyncio.sleep(0)
        raise InfraError("the daemon is gone")

    source.made[0].close = stuck  # type: ignore[method-assign]
    closing = asyncio.create_task(lazy.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await closing
    assert str(cancelled.value.__cause__) == "the daemon is gone"
    with pytest.raises(InfraError, match="the daemon is gone"):
        await lazy.close()

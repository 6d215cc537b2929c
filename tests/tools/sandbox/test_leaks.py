"""Nothing is left: no container, process, mount, temp folder, descriptor or task, whatever ends a session."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from agentgym.errors import AgentGymError, InfraError
from agentgym.sandbox import (
    Channel,
    LazySandbox,
    SandboxBackend,
    SandboxConfig,
    WorkerSettings,
    sandbox_backends,
)
from agentgym.sandbox_labels import ENVIRONMENT_KEY, FOLDER_PREFIX, OWNER_KEY, Labels, Owner
from agentgym.tools.sandbox.daemon import Daemon
from agentgym.tools.sandbox.docker import DockerBackend, DockerChannel
from agentgym.tools.sandbox.local import LocalChannel
from agentgym.tools.sandbox.pool import SandboxPool
from agentgym.tools.sandbox.reaper import reap

BACKENDS = [pytest.param("docker", marks=pytest.mark.docker), "namespace", "process"]


@dataclass(frozen=True)
class Traces:
    """What sandboxes of one owner can leave on this machine."""

    containers: frozenset[str]
    processes: frozenset[int]
    folders: frozenset[str]
    mounts: int
    descriptors: int

    def __bool__(self) -> bool:
        return bool(self.containers or self.processes or self.folders)


def traces(daemon: Daemon | None, owner: Owner | None = None) -> Traces:
    """Of the owner (this process by default); mounts and descriptors are always those of this process."""
    word = (owner or Owner.current()).word
    found = daemon.labelled(OWNER_KEY) if daemon is not None else {}
    if daemon is not None:
        daemon.close()  # its connections are descriptors too
    return Traces(
        containers=frozenset(name for name, labels in found.items() if labels[OWNER_KEY] == word),
        processes=frozenset(marked_processes(word)),
        folders=frozenset(path.name for path in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}{word}*")),
        mounts=len(Path("/proc/self/mountinfo").read_text().splitlines()),
        descriptors=len(os.listdir("/proc/self/fd")),
    )


def marked_processes(word: str) -> list[int]:
    mark = f"{ENVIRONMENT_KEY}={word}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes() and b"Z" not in (entry / "stat").read_bytes().split()[2:3]:
                    found.append(int(entry.name))
    return found


@pytest.fixture(params=BACKENDS)
def any_backend(request: pytest.FixtureRequest) -> str:
    """Each backend, if it works here."""
    name: str = request.param
    if (reason := sandbox_backends.get(name)().unavailable()) is not None:
        pytest.skip(f"sandbox backend {name}: {reason}")
    return name


# -- sessions that end in every way ------------------------------------------------------------------------------------


class Unreliable:
    """A backend whose starts fail at times, before and after something was started."""

    def __init__(self, inner: SandboxBackend, dice: random.Random) -> None:
        self.name = inner.name
        self.inner = inner
        self.dice = dice

    def unavailable(self) -> str | None:
        return self.inner.unavailable()

    def check(self, config: SandboxConfig) -> None:
        self.inner.check(config)

    def worker_settings(self, config: SandboxConfig, labels: Labels) -> WorkerSettings:
        return self.inner.worker_settings(config, labels)

    async def launch(self, config: SandboxConfig, labels: Labels) -> Channel:
        fate = self.dice.random()
        if fate < 0.05:
            raise InfraError("the start failed")
        channel = await self.inner.launch(config, labels)
        if fate < 0.1:
            await kill_from_outside(channel)
        return channel

    async def aclose(self) -> None:
        await self.inner.aclose()


def break_daemon(daemon: Daemon, dice: random.Random) -> None:
    """Some answers of the daemon are errors: of starts that did happen, and of removals that did not."""
    from docker.errors import APIError

    api = daemon.client.api
    start, remove = api.start, api.remove_container

    def start_or_not(name: str) -> None:
        start(name)
        if dice.random() < 0.05:
            raise APIError("the daemon stumbled")

    def remove_or_not(name: str, **options: bool) -> None:
        if dice.random() < 0.1:
            raise APIError("the daemon stumbled")
        remove(name, **options)

    api.start, api.remove_container = start_or_not, remove_or_not


async def kill_from_outside(channel: Channel) -> None:
    if isinstance(channel, DockerChannel):
        await asyncio.create_subprocess_exec("docker", "kill", channel.name, stdout=-3, stderr=-3)
    elif isinstance(channel, LocalChannel):
        with contextlib.suppress(ProcessLookupError):
            os.kill(channel._process.pid, signal.SIGKILL)


async def one_session(pool: SandboxPool, dice: random.Random) -> str:
    """Returns how it ended."""
    sandbox = LazySandbox(pool.config, pool)
    try:
        return await play(sandbox, dice)
    finally:
        with contextlib.suppress(InfraError):  # the daemon refused; the pool tries again when it is closed
            await sandbox.close()


async def play(sandbox: LazySandbox, dice: random.Random) -> str:
    try:
        fate = dice.random()
        await sandbox.run("python", "x = 1", timeout=20.0)
        if fate < 0.2:
            return (await sandbox.run("bash", "sleep 100 & sleep 100", timeout=0.2)).status
        if fate < 0.3:
            await kill_from_outside((await sandbox.get()).channel)  # type: ignore[attr-defined]
        if fate < 0.4:
            await sandbox.run("python", "import os; os.kill(os.getpid(), 9)", timeout=20.0)
        if fate < 0.5:
            await sandbox.run("bash", "setsid sleep 100 >/dev/null 2>&1 &", timeout=20.0)
        result = await sandbox.run("python", "print(x)", timeout=20.0)
        return result.status
    except AgentGymError as error:
        return type(error).__name__


async def churn(name: str, sessions: int) -> None:
    dice = random.Random(name)
    inner = sandbox_backends.get(name)()
    daemon = inner.daemon if isinstance(inner, DockerBackend) else None
    config = SandboxConfig.model_validate({"backend": name, "pool_size": 2, "limit": 8, "memory_mb": 256})

    before = traces(daemon)
    if daemon is not None:
        break_daemon(daemon, dice)
    pool = SandboxPool(config, Unreliable(inner, dice))
    running: set[asyncio.Task[str]] = set()
    ends: list[str] = []
    for number in range(sessions):
        task = asyncio.create_task(one_session(pool, dice), name=f"session {number}")
        running.add(task)
        if dice.random() < 0.3:
            asyncio.get_running_loop().call_later(dice.random(), task.cancel)
        if len(running) >= 8:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            ends += ["cancelled" if task.cancelled() else task.result() for task in done]
    if running:
        done, _ = await asyncio.wait(running)
        ends += ["cancelled" if task.cancelled() else task.result() for task in done]
    await pool.aclose()

    stats = pool.stats()
    assert (stats.live, stats.ready) == (0, 0)
    assert stats.opened == stats.closed > 0
    assert len(ends) == sessions
    assert "ok" in ends
    assert asyncio.all_tasks() == {asyncio.current_task()}
    after = traces(daemon)
    assert replace(after, descriptors=before.descriptors) == before
    assert after.descriptors <= before.descriptors + 2  # the event loop keeps a pair for child processes


async def test_no_session_leaves_anything(any_backend: str) -> None:  # D1, D2, D10
    await churn(any_backend, 12 if any_backend == "docker" else 60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_two_thousand_sessions_leave_nothing(any_backend: str) -> None:
    await churn(any_backend, 2000)


async def test_a_start_that_is_cancelled_leaves_nothing(any_backend: str) -> None:  # D1
    backend = sandbox_backends.get(any_backend)()
    daemon = backend.daemon if isinstance(backend, DockerBackend) else None
    config = SandboxConfig.model_validate({"backend": any_backend})
    for delay in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4):
        launch = asyncio.create_task(backend.launch(config, Labels()))
        await asyncio.sleep(delay)
        launch.cancel()
        try:
            channel = await launch
        except asyncio.CancelledError:
            continue
        await channel.kill()
    assert not traces(daemon)


# -- owners that are killed --------------------------------------------------------------------------------------------

OWNER = """
import asyncio, json, signal, sys
from agentgym.sandbox import SandboxConfig
from agentgym.sandbox_labels import Owner
from agentgym.tools.sandbox.pool import SandboxPool

async def main(name):
    task = asyncio.current_task()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    pool = SandboxPool(SandboxConfig(backend=name, pool_size=1))
    try:
        sandbox = await pool.open()
        print(json.dumps(Owner.current().word), flush=True)
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        count = 0
        while await reader.readline():
            await sandbox.run("python", "x = 0" if count == 0 else "x += 1", timeout=20)
            result = await sandbox.run("python", "print(x)", timeout=20)
            print(json.dumps(result.output), flush=True)
            count += 1
    finally:
        await pool.aclose()

asyncio.run(main(sys.argv[1]))
"""


class OwnerProcess:
    """Another process that holds a sandbox and a ready one."""

    def __init__(self, backend: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, backend],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        owner = Owner.parse(self._answer())
        assert owner is not None
        self.owner = owner

    def call(self) -> str:
        """Count in the sandbox; 0 at the first call."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._answer().strip()

    def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.process.wait(30)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        answer: str = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture
async def daemon(any_backend: str) -> AsyncIterator[Daemon | None]:
    """Where there may be containers."""
    daemon = Daemon() if any_backend == "docker" else None
    yield daemon
    if daemon is not None:
        daemon.close()


def test_sigterm_leaves_nothing(any_backend: str, daemon: Daemon | None) -> None:  # D4
    owner = OwnerProcess(any_backend)
    try:
        assert owner.call() == "0"
        assert traces(daemon, owner.owner)
        owner.end(signal.SIGTERM)
        assert not traces(daemon, owner.owner)
    finally:
        owner.close()


@pytest.mark.parametrize("way", ["reap", "start"])
def test_what_sigkill_leaves_is_reaped_and_a_living_sibling_is_not(
    any_backend: str, daemon: Daemon | None, way: str
) -> None:  # D4
    killed, sibling = OwnerProcess(any_backend), OwnerProcess(any_backend)
    try:
        assert (killed.call(), sibling.call()) == ("0", "0")
        killed.end(signal.SIGKILL)
        if way == "reap":
            subprocess.run([sys.executable, "-m", "agentgym", "sandbox", "reap"], check=True, capture_output=True)
        else:
            reap(daemon)  # what the first sandbox of a process does on a thread
        assert not traces(daemon, killed.owner)
        assert traces(daemon, sibling.owner)
        assert sibling.call() == "1"
    finally:
        killed.close()
        sibling.close()

"""``agentgym bench sandbox``: what sandboxes cost, beside what people use instead.

One run gives one table; compare rows of the same run. Times are medians unless a column says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from agentgym.sandbox import SandboxBackend, SandboxConfig, sandbox_backends
from agentgym.tools.sandbox.docker import DockerBackend, DockerChannel
from agentgym.tools.sandbox.image import DEFAULT_IMAGE
from agentgym.tools.sandbox.local import LocalChannel
from agentgym.tools.sandbox.pool import PooledSandbox, SandboxPool

Row = dict[str, float | int | str]

STARTS = 5
OPENS = 20
CALLS = 500
SESSIONS = 64
MANY = 500
CALLS_EACH = 20
SUSTAINED_SECONDS = 10.0
SUSTAINED_OPENERS = 4
_TIMEOUT = 30.0


def run() -> list[Row]:
    """One row per backend that works here, then those of ``docker run``, ``docker exec`` and a fresh interpreter."""
    rows: list[Row] = []
    for name in ("docker", "namespace", "process"):
        backend = sandbox_backends.get(name)()
        if (reason := backend.unavailable()) is None:
            rows.append(asyncio.run(backend_row(backend)))
        else:
            rows.append({"what": name, "note": reason[:60]})
        if name == "namespace" and reason is None:
            rows.append(asyncio.run(live_sessions(backend, MANY)))
    return rows + comparison_rows()


async def backend_row(backend: SandboxBackend, *, sessions: int = SESSIONS) -> Row:
    """Measure one backend.

    Args:
        backend: that works here.
        sessions: that are open at the same time for calls/s and memory.
    """
    return {
        "what": backend.name,
        "cold_start_ms": await _cold_start(backend),
        **await _pool_opens(backend),
        **await _calls(backend),
        **await _many_sessions(backend, sessions),
        "opens_per_s": await _sustained_opens(backend),
    }


async def live_sessions(backend: SandboxBackend, count: int) -> Row:
    """Very many sessions at the same time."""
    return {"what": f"{backend.name}, {count} live", **await _many_sessions(backend, count)}


def comparison_rows() -> list[Row]:
    """Latency of one trivial Python call by other means."""
    rows: list[Row] = []
    if DockerBackend().unavailable() is None:
        image = [DEFAULT_IMAGE, "python3", "-c", "x = 1"]
        rows.append(_command_row("docker run", ["docker", "run", "--rm", "--network", "none", *image]))
        name = f"agentgym-bench-{os.getpid()}"
        hold = ["docker", "run", "--rm", "-d", "--name", name, DEFAULT_IMAGE, "sleep", "300"]
        subprocess.run(hold, check=True, capture_output=True)
        try:
            rows.append(_command_row("docker exec", ["docker", "exec", name, "python3", "-c", "x = 1"]))
        finally:
            subprocess.run(["docker", "rm", "-f", name], check=False, capture_output=True)
    rows.append(_command_row("fresh interpreter", [sys.executable, "-I", "-c", "x = 1"]))
    return rows


def _command_row(what: str, command: list[str]) -> Row:
    times = []
    for _ in range(STARTS + 1):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return {"what": what, "call_p50_ms": 1e3 * statistics.median(times[1:])}


def _config(backend: SandboxBackend, **settings: Any) -> SandboxConfig:
    return SandboxConfig.model_validate({"backend": backend.name, "limit": 4096, **settings})


@contextlib.asynccontextmanager
async def _pool(backend: SandboxBackend, **settings: Any) -> AsyncIterator[SandboxPool]:
    pool = SandboxPool(_config(backend, **settings), backend)
    try:
        yield pool
    finally:
        await pool.aclose()


async def _cold_start(backend: SandboxBackend) -> float:
    """Milliseconds from nothing to the first answer."""
    times = []
    async with _pool(backend, pool_size=0) as pool:
        for _ in range(STARTS):
            start = time.perf_counter()
            sandbox = await pool.open()
            await sandbox.run("python", "x = 0", timeout=_TIMEOUT)
            times.append(time.perf_counter() - start)
            await sandbox.close()
    return 1e3 * statistics.median(times)


async def _pool_opens(backend: SandboxBackend) -> Row:
    """Opens that find a ready sandbox."""
    times = []
    size = 4
    async with _pool(backend, pool_size=size) as pool:
        await (await pool.open()).close()  # the first use starts the filling
        for _ in range(OPENS):
            while pool.stats().ready < size:  # noqa: ASYNC110 - a benchmark: the pool has no such event
                await asyncio.sleep(0.01)
            start = time.perf_counter()
            sandbox = await pool.open()
            times.append(time.perf_counter() - start)
            await sandbox.close()
    return {"pool_open_ms": 1e3 * statistics.median(times)}


async def _calls(backend: SandboxBackend) -> Row:
    async with _pool(backend, pool_size=0) as pool:
        sandbox = await pool.open()
        await sandbox.run("python", "x = 0", timeout=_TIMEOUT)
        times = []
        for _ in range(CALLS):
            start = time.perf_counter()
            await sandbox.run("python", "x += 1", timeout=_TIMEOUT)
            times.append(time.perf_counter() - start)
        await sandbox.close()
    times.sort()
    return {"call_p50_ms": 1e3 * times[len(times) // 2], "call_p99_ms": 1e3 * times[int(len(times) * 0.99)]}


async def _many_sessions(backend: SandboxBackend, count: int) -> Row:
    """Calls per second over all sessions together, and what one takes of the machine's memory."""
    async with _pool(backend, pool_size=0) as pool:
        sandboxes: list[PooledSandbox] = []
        for start in range(0, count, 16):
            opened = await asyncio.gather(*(pool.open() for _ in range(min(16, count - start))))
            sandboxes += opened
        await _each(sandboxes, lambda sandbox: sandbox.run("python", "x = 0", timeout=_TIMEOUT))

        async def work(sandbox: PooledSandbox) -> None:
            for _ in range(CALLS_EACH):
                await sandbox.run("python", "x += 1", timeout=_TIMEOUT)

        begin = time.perf_counter()
        await _each(sandboxes, work)
        seconds = time.perf_counter() - begin
        memory = sum([await _memory_mb(sandbox) for sandbox in sandboxes])
        await _each(sandboxes, lambda sandbox: sandbox.close())
    return {"calls_per_s": count * CALLS_EACH / seconds, "memory_mb": memory / count, "sessions": count}


async def _sustained_opens(backend: SandboxBackend) -> float:
    """Sessions per second that are opened, used once and closed, while the pool refills."""
    count = 0
    async with _pool(backend, pool_size=4) as pool:
        end = time.perf_counter() + SUSTAINED_SECONDS

        async def churn() -> None:
            nonlocal count
            while time.perf_counter() < end:
                sandbox = await pool.open()
                await sandbox.run("python", "x = 0", timeout=_TIMEOUT)
                await sandbox.close()
                count += 1

        start = time.perf_counter()
        await asyncio.gather(*(churn() for _ in range(SUSTAINED_OPENERS)))
        return count / (time.perf_counter() - start)


async def _each(sandboxes: list[PooledSandbox], call: Callable[[PooledSandbox], Awaitable[object]]) -> None:
    await asyncio.gather(*(call(sandbox) for sandbox in sandboxes))


async def _memory_mb(sandbox: PooledSandbox) -> float:
    """Of all processes of a sandbox, with the shim of a container; shared pages count by their share (PSS)."""
    channel = sandbox.channel
    if isinstance(channel, DockerChannel):
        root = _parent(await channel.first_process())
    else:
        assert isinstance(channel, LocalChannel)
        root = channel.pid
    return sum(_proportional_mb(pid) for pid in _tree(root))


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _tree(pid: int) -> list[int]:
    pids = [pid]
    for parent in pids:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
    return pids


def _proportional_mb(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0

"""The pool: fresh sandboxes only, one limit, nothing left behind; also on a backend that misbehaves."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentgym.errors import ConfigError, InfraError, SessionClosed, ToolError
from agentgym.sandbox import Channel, LazySandbox, SandboxConfig, sandbox_backends
from agentgym.sandbox_labels import ENVIRONMENT_KEY, FOLDER_PREFIX, Labels, Owner
from agentgym.tools.sandbox.pool import (
    MAX_LAUNCHES,
    PooledSandbox,
    SandboxPool,
    close_shared_pools,
    shared_pool,
    shared_stats,
)
from agentgym.tools.sandbox.process import ProcessBackend


def config(**settings: object) -> SandboxConfig:
    return SandboxConfig.model_validate({"backend": "process", "pool_size": 0, **settings})


def leftovers() -> list[str]:
    """Processes and folders of sandboxes that this process owns."""
    word = Owner.current().word
    found = [path.name for path in Path("/tmp").glob(f"{FOLDER_PREFIX}{word}*")]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                if f"{ENVIRONMENT_KEY}={word}".encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text())
            except OSError:
                continue
    return found


async def until(condition: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def value(sandbox: PooledSandbox, code: str) -> str:
    return (await sandbox.run("python", code, timeout=20)).output


@pytest.fixture(params=["process", "namespace"])
def local(request: pytest.FixtureRequest) -> str:
    reason = sandbox_backends.get(request.param)().unavailable()
    if reason is not None:
        pytest.skip(f"sandbox backend {request.param}: {reason}")
    return str(request.param)


async def test_a_used_sandbox_is_never_handed_on(local: str) -> None:  # D8
    pool = SandboxPool(config(backend=local, pool_size=2))
    ids = []
    for _ in range(4):
        sandbox = await pool.open()
        ids.append(sandbox.id)
        assert "NameError" in await value(sandbox, "x")
        assert await value(sandbox, "x = 1\nopen('f', 'w').close()\nimport os\nos.listdir()") == "['f']\n"
        await sandbox.close()
    assert len(set(ids)) == 4
    await pool.aclose()
    stats = pool.stats()
    assert (stats.used, stats.live, stats.ready, stats.opened) == (4, 0, 0, stats.closed)
    assert leftovers() == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "backend", [pytest.param("docker", marks=pytest.mark.docker), "namespace", "process"], indirect=True
)
async def test_sessions_that_run_side_by_side_keep_their_own_state(pool: SandboxPool) -> None:  # D8
    async def play(number: int) -> list[str]:
        sandbox = LazySandbox(pool.config, pool)
        seen = []
        await sandbox.run("python", f"x = {number}\nopen('f', 'w').write('{number}')", timeout=20)
        await sandbox.run("bash", f"mkdir d{number}; cd d{number}; v={number}", timeout=20)
        for _ in range(24):
            seen.append((await sandbox.run("python", "x += 10; print(x, open('f').read())", timeout=20)).output)
            seen.append((await sandbox.run("bash", "echo $v $(basename $PWD)", timeout=20)).output)
        await sandbox.close()
        return seen

    results = await asyncio.gather(*(play(number) for number in range(64)))
    for number, seen in enumerate(results):
        expected = [[f"{number + 10 * i} {number}\n", f"{number} d{number}\n"] for i in range(1, 25)]
        assert seen == [text for pair in expected for text in pair]
    await pool.aclose()
    assert leftovers() == []


async def test_the_limit_is_never_exceeded() -> None:  # D10
    pool = SandboxPool(config(limit=2))
    peak = 0

    async def play() -> None:
        nonlocal peak
        sandbox = await pool.open()
        peak = max(peak, pool.stats().live)
        await asyncio.sleep(0.01)
        await sandbox.close()

    await asyncio.gather(*(play() for _ in range(6)))
    assert peak == 2
    await pool.aclose()
    assert pool.stats().opened == pool.stats().closed


async def test_a_crowd_is_started_a_few_at_a_time() -> None:
    backend = Moody(*["slow"] * 100)
    pool = SandboxPool(config(), backend)
    crowd = [asyncio.create_task(pool.open()) for _ in range(MAX_LAUNCHES + 3)]
    await asyncio.sleep(0.05)
    assert backend.begun == MAX_LAUNCHES
    assert len({sandbox.id for sandbox in await asyncio.gather(*crowd)}) == len(crowd)
    await pool.aclose()
    assert pool.stats().opened == pool.stats().closed == len(crowd)


async def test_ready_sandboxes_are_replaced_in_the_background() -> None:
    pool = SandboxPool(config(pool_size=2))
    sandbox = await pool.open()
    await until(lambda: pool.stats().ready == 2)
    started = time.monotonic()
    second = await pool.open()
    assert time.monotonic() - started < 0.05
    await until(lambda: pool.stats().ready == 2)
    await second.close()
    await sandbox.close()
    await pool.aclose()
    assert leftovers() == []


async def test_a_closed_pool_refuses_and_closes_what_is_in_use() -> None:
    pool = SandboxPool(config(limit=1))
    sandbox = await pool.open()
    waiting = asyncio.create_task(pool.open())
    await asyncio.sleep(0)
    await pool.aclose()
    with pytest.raises(SessionClosed):
        await waiting
    with pytest.raises(SessionClosed):
        await pool.open()
    assert sandbox.lost
    await pool.aclose()
    assert leftovers() == []


# -- starts that go wrong (D1) -----------------------------------------------------------------------------------------


class Moody(ProcessBackend):
    """Starts slowly, not at all, or for ever."""

    def __init__(self, *moods: str) -> None:
        self.moods = list(moods)
        self.begun = 0

    async def launch(self, config: SandboxConfig, labels: Labels) -> Channel:
        self.begun += 1
        mood = self.moods.pop(0) if self.moods else "fine"
        if mood == "slow":
            await asyncio.sleep(0.2)
        if mood == "hangs":
            await asyncio.sleep(3600)
        if mood == "raises":
            raise InfraError("no room")
        channel = await super().launch(config, labels)
        if mood == "dies":
            await channel.kill()
        return channel


async def test_a_start_whose_caller_is_cancelled_leaves_nothing_behind() -> None:  # D1
    pool = SandboxPool(config(), Moody("slow"))
    sandbox = LazySandbox(pool.config, pool)
    first = asyncio.create_task(sandbox.get())
    await asyncio.sleep(0.05)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await sandbox.close()
    assert pool.stats().live == 0
    await pool.aclose()
    assert pool.stats().opened == pool.stats().closed
    assert leftovers() == []


async def test_a_start_that_raises_is_told_and_the_next_one_works() -> None:  # D1
    pool = SandboxPool(config(), Moody("raises", "dies"))
    for _ in range(2):
        with pytest.raises(InfraError):
            await pool.open()
    assert await value(await pool.open(), "1") == "1\n"
    await pool.aclose()
    assert (pool.stats().failed, pool.stats().opened) == (2, pool.stats().closed)


async def test_a_start_that_hangs_ends_in_time() -> None:  # D1
    pool = SandboxPool(config(open_timeout=0.3), Moody("hangs"))
    started = time.monotonic()
    with pytest.raises(InfraError, match=r"no sandbox started within 0\.3 s"):
        await pool.open()
    assert time.monotonic() - started < 1.0
    await pool.aclose()
    assert leftovers() == []


async def test_a_hanging_start_ends_with_the_session() -> None:  # D1
    pool = SandboxPool(config(), Moody("hangs"))
    sandbox = LazySandbox(pool.config, pool)
    call = asyncio.create_task(sandbox.run("python", "1", timeout=5))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(sandbox.close(), 1.0)
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.wait_for(pool.aclose(), 1.0)


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_is_cancelled_everything_is_closed(local: str, seed: int) -> None:
    """Sessions are cancelled at random moments, also twice, some workers are killed."""
    chance = random.Random(seed)
    pool = SandboxPool(config(backend=local, pool_size=2, limit=4))

    async def play(rng: random.Random) -> None:
        sandbox = LazySandbox(pool.config, pool)
        try:
            await sandbox.run("python", "x = 1", timeout=5)
            await sandbox.run("bash", "sleep 100 & setsid sleep 100 & echo", timeout=5)
            if rng.random() < 0.3:
                await (await sandbox.get()).channel.kill()  # type: ignore[attr-defined]
            await sandbox.run("python", f"import time; time.sleep({rng.random()})", timeout=0.2)
        finally:
            await sandbox.close()

    tasks = []
    for _ in range(16):
        task = asyncio.create_task(play(random.Random(chance.random())))
        tasks.append(task)
        delay = chance.random()
        if chance.random() < 0.7:
            asyncio.get_running_loop().call_later(delay, task.cancel)
            asyncio.get_running_loop().call_later(delay + 0.02 * chance.random(), task.cancel)
    await asyncio.wait(tasks)
    assert {type(task.exception()) for task in tasks if not task.cancelled()} <= {type(None), ToolError}
    await until(lambda: pool.stats().live == 0)
    await pool.aclose()
    stats = pool.stats()
    assert (stats.live, stats.ready, stats.opened) == (0, 0, stats.closed)
    assert leftovers() == []


# -- the pools of a loop -----------------------------------------------------------------------------------------------


def test_shared_pools_end_with_their_event_loop() -> None:
    async def play() -> None:
        sandbox = await shared_pool(config(pool_size=2)).open()
        assert (await sandbox.run("python", "1", timeout=20)).output == "1\n"
        assert [stats.live for stats in shared_stats()] == [1]
        await sandbox.close()

    asyncio.run(play())
    assert leftovers() == []


async def test_equal_settings_share_a_pool() -> None:
    first = await shared_pool(config(memory_mb=300)).open()
    second = await shared_pool(config(memory_mb=300)).open()
    third = await shared_pool(config(memory_mb=301)).open()
    assert first.pool is second.pool is not third.pool
    await close_shared_pools()
    assert first.lost
    assert shared_stats() == []


def test_a_backend_that_does_not_work_here_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    script = (
        "import asyncio\n"
        "from agentgym.sandbox import SandboxConfig\n"
        "from agentgym.tools.sandbox.auto import choose_backend\n"
        "asyncio.run(choose_backend(SandboxConfig(backend='namespace')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "ConfigError: no sandbox can be started here. namespace: bubblewrap is not installed" in done.stderr


async def test_settings_without_meaning_for_the_backend_are_refused() -> None:
    pool = SandboxPool(config(image="debian"))
    with pytest.raises(ConfigError, match=r"no meaning with sandbox\.backend=process"):
        await pool.open()
    await pool.aclose()

"""Sandboxes for tests: each backend, if it works on this machine."""

from __future__ import annotations

import functools
import resource
from collections.abc import AsyncIterator, Iterator

import pytest

from agentgym.sandbox import LazySandbox, SandboxConfig, sandbox_backends
from agentgym.tools.sandbox.pool import SandboxPool

HOST_GROWTH_MB = 96
"""What an attack may cost this process."""


@functools.cache
def missing(backend: str) -> str | None:
    """Why a backend does not work here."""
    return sandbox_backends.get(backend)().unavailable()


def require(backend: str) -> str:
    """The backend; skips the test if it does not work here."""
    if (reason := missing(backend)) is not None:
        pytest.skip(f"sandbox backend {backend}: {reason}")
    return backend


@pytest.fixture(params=[pytest.param("docker", marks=pytest.mark.docker), "namespace"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that isolates."""
    return require(request.param)


@pytest.fixture
async def pool(backend: str) -> AsyncIterator[SandboxPool]:
    """Sandboxes with small limits; everything that was opened must be closed in the end."""
    limits = {"memory_mb": 256, "pids": 32, "disk_mb": 16, "output_limit": 4096, "pool_size": 0}
    pool = SandboxPool(SandboxConfig.model_validate({"backend": backend, **limits}))
    yield pool
    await pool.aclose()
    stats = pool.stats()
    assert (stats.live, stats.ready, stats.opened) == (0, 0, stats.closed)


@pytest.fixture
async def sandbox(pool: SandboxPool) -> AsyncIterator[LazySandbox]:
    """The sandbox of one session."""
    lazy = LazySandbox(pool.config, pool)
    yield lazy
    await lazy.close()


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """What happens in a sandbox must not make this process grow."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < HOST_GROWTH_MB

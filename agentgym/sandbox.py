"""What a sandbox is: its settings, its results, what tools and environments see, what a backend implements.

    ToolEnv(sandbox=...)  ->  LazySandbox (one per episode, ``ToolContext.sandbox``; opens at its first use)
                          ->  SandboxPool (one per event loop and settings; warm, never used twice)
                          ->  SandboxBackend.launch (docker, namespace, process)  ->  Channel to the worker inside

The backends and the pool live in `agentgym.tools.sandbox`; here are the contracts.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import pydantic

from agentgym.config import ConfigModel, setting
from agentgym.errors import ConfigError, InfraError, SessionClosed
from agentgym.registry import Registry
from agentgym.resources import finish
from agentgym.sandbox_labels import Labels

Language = Literal["python", "bash"]
RunStatus = Literal["ok", "error", "timeout", "lost"]


class SandboxConfig(ConfigModel):
    """``env.sandbox=namespace`` or ``env.sandbox.memory_mb=256``: where the code of tools runs, and its limits."""

    chosen_by: ClassVar[str | None] = "backend"

    backend: Literal["auto", "docker", "namespace", "process"] = setting(
        "auto",
        "`docker`, `namespace` (bubblewrap), `process` (no isolation at all); `auto`: docker, else namespace, else an "
        "error",
    )
    image: str | None = setting(
        None,
        "docker: image with a python3, null: the one of `agentgym sandbox build`; namespace: folder of a root file "
        "system, null: the host's /usr",
    )
    runtime: str | None = setting(None, "docker: container runtime, e.g. runsc; null: the daemon's default")
    memory_mb: int = setting(512, "MiB of memory of all processes together", ge=64)
    cpus: float = setting(1.0, "Processors; enforced by docker", gt=0)
    pids: int = setting(64, "Processes and threads at the same time", ge=8)
    disk_mb: int = setting(64, "MiB of /work, and the same of /tmp", ge=1)
    network: Literal["none", "allow"] = setting("none", "`allow`: the sandbox reaches whatever the host reaches")
    pool_size: int = setting(4, "Sandboxes that are kept ready; each is used by one episode and destroyed", ge=0)
    limit: int = setting(256, "Sandboxes in use at the same time, per process", ge=1)
    open_timeout: float = setting(30.0, "Seconds to start a sandbox", gt=0)
    output_limit: int = setting(16384, "Bytes kept of the output of one call: its head and its tail", ge=16)


def read_sandbox_config(value: SandboxConfig | Mapping[str, Any] | str | None) -> SandboxConfig | None:
    """The settings that an environment was given: a model, a mapping, a backend's name, or None for no sandbox.

    Raises:
        ConfigError: an unknown key or a wrong value.
    """
    if value is None or isinstance(value, SandboxConfig):
        return value
    data = {"backend": value} if isinstance(value, str) else dict(value)
    try:
        return SandboxConfig.model_validate(data)
    except pydantic.ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        known = ", ".join(SandboxConfig.model_fields)
        raise ConfigError(f"sandbox={value!r}: {faults}. Known keys: {known}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What one call of `Sandbox.run` gave."""

    output: str
    """stdout and stderr in the order of writing; beyond the limit head + marker + tail; undecodable bytes replaced."""
    status: RunStatus
    """``ok``; ``error``: exception or exit code above 0; ``timeout``; ``lost``: the interpreter or the whole sandbox
    ended during the call, by the code's own doing."""
    output_bytes: int = 0
    """Bytes that were written, kept or not."""
    truncated: bool = False
    state_lost: bool = False
    """True: variables and working directory of that language are gone (of the whole sandbox if it was lost)."""
    exit_code: int | None = None
    """Of the bash command or program; None for python."""
    seconds: float = 0.0
    """Wall-clock time inside the sandbox."""
    reason: str = ""
    """Why a call was ended or the state was lost, for the model: ``"memory limit of 512 MiB"``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One entry of a folder."""

    name: str
    kind: Literal["file", "folder", "link", "other"]
    size: int = 0


class Sandbox(Protocol):
    """A started sandbox of one session."""

    id: str
    backend: str

    @property
    def lost(self) -> bool:
        """True once it cannot be used any more."""
        ...

    def ensure_alive(self) -> None:
        """Raise if it is lost: `ToolError` if by the doing of the session's own code, `InfraError` otherwise."""
        ...

    async def run(self, language: Language, code: str, *, timeout: float) -> RunResult:
        """Run code in the session's interpreter: variables, functions, working directory and files persist.

        Calls run one after the other. ``timeout`` counts from the start of this one; it interrupts the code, and kills
        the interpreter only if that does not help. Cancelling ends the call the same way.

        Raises:
            InfraError: the sandbox was lost, and not by the code's doing.
        """
        ...

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file under /work, folders included. Raises `ToolError` for a path outside or a full disk."""
        ...

    async def read_file(self, path: str, *, limit: int) -> bytes:
        """At most ``limit`` bytes of a regular file under /work. Raises `ToolError`."""
        ...

    async def list_files(self, path: str = ".") -> list[FileEntry]:
        """Entries of a folder under /work, sorted by name. Raises `ToolError`."""
        ...

    async def run_trusted(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float) -> RunResult:
        """Run a program that the session's code cannot touch, e.g. a grader: ``["/usr/bin/python3", "-I", "-"]`` with
        the grader's source as ``stdin``.

        Every process of the session is killed first (the state of its interpreters is lost, its files stay), then the
        program starts with a clean environment in /work.
        """
        ...

    async def close(self) -> None:
        """Destroy the sandbox and everything in it. Idempotent; a cancellation does not interrupt it."""
        ...


class Channel(Protocol):
    """A launched worker: its byte stream, and the means to destroy everything that belongs to it.

    The backend starts ``agentgym.tools.sandbox.client.worker_command(python)`` with the stream at its stdin and stdout;
    the client sends the worker's source and speaks with it.
    """

    loss: InfraError | None
    """Set by the backend where it knows that the worker was lost by a fault of the host (daemon gone)."""

    @property
    def alive(self) -> bool: ...

    async def read(self) -> bytes:
        """Some bytes from the worker, as they come; empty once the stream has ended."""
        ...

    async def write(self, data: bytes) -> None:
        """Send all bytes to the worker. They are queued whole before the first suspension, so that neither a second
        writer nor a cancellation can tear a frame. Raises `ConnectionError` if the worker is gone."""
        ...

    async def kill(self) -> None:
        """Destroy container, processes, mounts and temporary folders; returns when they are gone. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What the worker inside has to know; a backend says it in `SandboxBackend.worker_settings`."""

    work: str = "/work"
    """The folder of the session's files."""
    memory_mb: int | None = None
    """MiB that the worker itself watches over; None where the host enforces a limit."""
    pids: int | None = None
    """Processes that the worker limits with RLIMIT_NPROC; None where the host enforces a limit."""
    file_mb: int | None = None
    """Largest file in MiB; None: no limit."""
    marker: str = ""
    """Value of ``AGENTGYM_SANDBOX`` in the environment of the sandbox's processes; needed where the worker is not the
    init process of a pid namespace."""


class SandboxBackend(Protocol):
    """One way to isolate: ``docker``, ``namespace`` or ``process``."""

    name: str

    def unavailable(self) -> str | None:
        """Why it cannot work here, in one sentence with the remedy; None if it works. Blocking; called on a thread."""
        ...

    def check(self, config: SandboxConfig) -> None:
        """Raise `ConfigError` for a setting that this backend cannot honour."""
        ...

    def worker_settings(self, config: SandboxConfig, labels: Labels) -> WorkerSettings: ...

    async def launch(self, config: SandboxConfig, labels: Labels) -> Channel:
        """Start a container or process tree with the worker inside. Leaves nothing behind if it raises or is cancelled.

        Raises:
            InfraError: it did not start.
        """
        ...

    async def aclose(self) -> None:
        """Try again to remove what could not be removed. Raises `InfraError` for what is still there."""
        ...


class SandboxSource(Protocol):
    """What gives out sandboxes: a pool."""

    async def open(self) -> Sandbox:
        """A fresh sandbox. Raises `InfraError` or `ConfigError`."""
        ...


sandbox_backends: Registry[Callable[[], SandboxBackend]] = Registry("sandbox backend")
sandbox_backends.register("docker", "agentgym.tools.sandbox.docker:DockerBackend")
sandbox_backends.register("namespace", "agentgym.tools.sandbox.namespace:NamespaceBackend")
sandbox_backends.register("process", "agentgym.tools.sandbox.process:ProcessBackend")

sandbox_sources: Registry[Callable[[SandboxConfig], SandboxSource]] = Registry("source of sandboxes")
"""By string, so that the core imports no tools; ``shared`` gives the pool of the running event loop."""
sandbox_sources.register("shared", "agentgym.tools.sandbox.pool:shared_pool")


class LazySandbox:
    """The sandbox of one episode: opened at the first use, replaced when its own code destroyed it.

    Tools get it as ``ToolContext.sandbox``; it is released after the tools.

    Example:
        >>> @function_tool
        ... async def python(code: str, context: ToolContext) -> str:
        ...     result = await context.sandbox.run("python", code, timeout=10)
        ...     return result.output
    """

    def __init__(
        self,
        config: SandboxConfig,
        source: SandboxSource | None = None,
        prepare: Callable[[Sandbox], Awaitable[None]] | None = None,
    ) -> None:
        self.config = config
        self._source = source
        self._prepare = prepare
        self._opening: asyncio.Task[Sandbox] | None = None
        self._told = False
        """Whether the model knows that the sandbox was lost."""
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def opened(self) -> bool:
        """True once something asked for the sandbox."""
        return self._opening is not None

    async def get(self) -> Sandbox:
        """The sandbox, started if it is not. Cancelling the caller does not stop a start that others may wait for.

        Raises:
            InfraError: it did not start, or the host lost it; the next call tries again.
            ToolError: the session's own code destroyed it between two calls; told once, then there is a fresh one.
            SessionClosed: the session is being released.
        """
        if self._closed:
            raise SessionClosed("the sandbox of this session was released")
        if self._opening is not None and self._opening.done():
            if self._opening.cancelled() or self._opening.exception() is not None:
                self._opening = None
            elif (sandbox := self._opening.result()).lost:
                await sandbox.close()
                self._opening = None
                if not self._told:
                    sandbox.ensure_alive()
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name="open a sandbox")
        return await asyncio.shield(self._opening)

    async def run(self, language: Language, code: str, *, timeout: float) -> RunResult:
        """`Sandbox.run` in the session's sandbox; after a loss in a fresh one."""
        sandbox = await self.get()
        result = await sandbox.run(language, code, timeout=timeout)
        self._told = sandbox.lost  # by this result
        return result

    async def close(self) -> None:
        """Destroy the sandbox, also one that is just starting. Idempotent; a cancellation is raised at the end.

        Raises:
            InfraError: it could not be destroyed.
        """
        self._closed = True
        if self._opening is None:
            return
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(self._opening), name="close a sandbox")
        await finish(self._closing)

    async def _close(self, opening: asyncio.Task[Sandbox]) -> None:
        opening.cancel()
        await asyncio.wait({opening})
        if not opening.cancelled() and opening.exception() is None:
            await opening.result().close()

    async def _open(self) -> Sandbox:
        if self._source is None:
            self._source = sandbox_sources.get("shared")(self.config)
        sandbox = await self._source.open()
        if self._prepare is not None:
            try:
                await self._prepare(sandbox)
            except BaseException:
                await sandbox.close()
                raise
        return sandbox


async def close_sandboxes() -> None:
    """Destroy what the shared pools of the running event loop hold, ready or in use; the next use makes new ones.

    For whoever ends an event loop's work: the sandboxes that a pool keeps ready outlive the sessions.
    """
    pool = sys.modules.get("agentgym.tools.sandbox.pool")
    if pool is not None:  # else nothing was ever opened
        await pool.close_shared_pools()

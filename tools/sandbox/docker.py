"""The ``docker`` backend: one hardened container per sandbox, spoken to over its attached stream.

No port, no volume and no network: the worker's stdin and stdout are the attached connection to the daemon, and nothing
of the host is visible inside. The worker is the container's first process: the kernel keeps signals from inside the
container from it, and it reaps orphans, so there is no ``--init`` above it.

All talk with the daemon is blocking and runs on a few threads (`agentgym.tools.sandbox.daemon`); only the stream is on
the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import re
import threading
import uuid
from typing import Any

from agentgym.errors import InfraError
from agentgym.resources import finish, outlast
from agentgym.sandbox import SandboxConfig, WorkerSettings
from agentgym.sandbox_labels import Labels
from agentgym.tools.sandbox.client import worker_command
from agentgym.tools.sandbox.daemon import Daemon
from agentgym.tools.sandbox.docker_stream import DockerStream
from agentgym.tools.sandbox.image import DEFAULT_IMAGE

USER = "65534:65534"
"""nobody; the folders /work and /tmp are its."""

_CANCEL_GRACE = 5.0
"""Seconds that a cancelled launch waits for the removal of what it has started, which goes on after them."""


class DockerBackend:
    """Containers with no network, no capabilities, no privileges to gain, a read-only root and limits on everything."""

    name = "docker"

    def __init__(self) -> None:
        self.daemon = Daemon()

    def unavailable(self) -> str | None:
        """Why there is no daemon to talk to; None if there is."""
        return self.daemon.unavailable()

    def check(self, config: SandboxConfig) -> None:
        """Nothing to refuse: the daemon knows what it can do, and says so at the first launch."""

    def worker_settings(self, config: SandboxConfig, labels: Labels) -> WorkerSettings:
        """The container enforces the limits."""
        return WorkerSettings()

    async def launch(self, config: SandboxConfig, labels: Labels) -> DockerChannel:
        """Start a container with the worker inside. What was started is removed if the start fails or is cancelled.

        Raises:
            InfraError: the daemon is gone or failed.
            ConfigError: the daemon refuses the image, the runtime or a limit.
        """
        name = container_name(labels)
        stop = threading.Event()
        options = functools.partial(container_options, config=config, labels=labels, name=name)
        starting = self.daemon.submit(self.daemon.start, name, options, stop)
        try:
            connection = await asyncio.shield(starting)
        except asyncio.CancelledError:
            stop.set()  # the thread removes what it has made, also after the event loop has ended
            await outlast(starting, _CANCEL_GRACE)
            if starting.done() and starting.exception() is None:
                starting.result().close()
                await outlast(self.daemon.submit(self.daemon.remove, name), _CANCEL_GRACE)
            raise
        stream = DockerStream()
        await asyncio.get_running_loop().connect_accepted_socket(lambda: stream, connection)
        return DockerChannel(self.daemon, name, stream)

    async def aclose(self) -> None:
        """Try again to remove the containers that the daemon kept. Raises `InfraError` for one that is still there."""
        await self.daemon.submit(self.daemon.sweep)


class DockerChannel:
    """A running container: the stream of its worker, and its end."""

    def __init__(self, daemon: Daemon, name: str, stream: DockerStream) -> None:
        self.name = name
        self.loss: InfraError | None = None
        self._daemon = daemon
        self._stream = stream
        self._removal: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """False once the worker's stream has ended."""
        return not self._stream.ended

    async def read(self) -> bytes:
        """Bytes of the worker; empty at the end of the stream: then `loss` is set if the host is to blame."""
        data = await self._stream.read()
        if not data and self._removal is None and self.loss is None:
            self.loss = await self._daemon.submit(self._daemon.fault_of_the_host, self.name)
        return data

    async def write(self, data: bytes) -> None:
        """Send bytes to the worker. Raises `ConnectionError` once the stream has ended."""
        await self._stream.write(data)

    async def first_process(self) -> int:
        """Id of the worker as the host sees it. Raises `InfraError`."""
        return await self._daemon.submit(self._daemon.first_process, self.name)

    async def kill(self) -> None:
        """Remove the container; returns when the daemon no longer knows it, whatever cancels the caller meanwhile.

        Raises:
            InfraError: the daemon does not answer. The next call tries again; a reaper removes it in any case.
        """
        self._stream.close()
        if self._removal is None or (self._removal.done() and self._removal.exception() is not None):
            self._removal = asyncio.create_task(self._remove(), name=f"remove {self.name}")
        await finish(self._removal)

    async def _remove(self) -> None:
        await self._daemon.submit(self._daemon.remove, self.name)


def container_name(labels: Labels) -> str:
    """A new name that shows the session in ``docker ps``."""
    session = re.sub(r"[^a-zA-Z0-9_.-]", "-", labels.session)[:40]
    return f"agentgym-{session}-{uuid.uuid4().hex[:8]}"


def container_options(api: Any, config: SandboxConfig, labels: Labels, name: str) -> dict[str, Any]:
    """Arguments of ``create_container``: everything that confines a sandbox is here.

    Args:
        api: ``docker.APIClient``.
    """
    from docker.types import LogConfig, Ulimit

    executable, *arguments = worker_command("python3")
    memory = config.memory_mb << 20
    uid = USER.partition(":")[0]
    # Files live in memory and count as such; the number of inodes is limited because each takes memory of the host's.
    folder = (
        f"rw,exec,nosuid,nodev,size={config.disk_mb}m,nr_inodes={config.disk_mb * 1024},mode=0700,uid={uid},gid={uid}"
    )
    return {
        "image": config.image or DEFAULT_IMAGE,
        "name": name,
        "entrypoint": [executable],
        "command": arguments,
        "user": USER,
        "working_dir": "/work",
        "hostname": "sandbox",
        "stdin_open": True,
        "labels": labels.as_mapping(),
        "healthcheck": {"test": ["NONE"]},
        "host_config": api.create_host_config(
            network_mode="none" if config.network == "none" else "bridge",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            read_only=True,
            tmpfs={"/work": folder, "/tmp": folder},
            ipc_mode="none",
            pids_limit=config.pids,
            mem_limit=memory,
            memswap_limit=memory,
            nano_cpus=int(config.cpus * 1e9),
            oom_score_adj=500,  # a host short of memory loses sandboxes first
            ulimits=[
                Ulimit(name="nofile", soft=1024, hard=1024),
                Ulimit(name="core", soft=0, hard=0),
                Ulimit(name="msgqueue", soft=0, hard=0),  # /dev/mqueue is there and writable
                Ulimit(name="fsize", soft=config.disk_mb << 21, hard=config.disk_mb << 21),
            ],
            log_config=LogConfig(type=LogConfig.types.NONE),
            runtime=config.runtime,
        ),
    }

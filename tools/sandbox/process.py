"""Backend ``process``: no isolation. The worker is a plain child process in a temp folder, with this user's rights.

For machines and people that need nothing else: one's own code, tests, containers that are sandboxes already. Only used
when it is asked for by name.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from agentgym.errors import ConfigError
from agentgym.sandbox import SandboxConfig, WorkerSettings
from agentgym.sandbox_labels import ENVIRONMENT_KEY, FOLDER_PREFIX, Labels
from agentgym.tool_threads import run_in_thread
from agentgym.tools.sandbox.client import worker_command
from agentgym.tools.sandbox.local import LocalChannel


class ProcessBackend:
    """See the module's text. Limits memory per process; does not limit processes, disk or network."""

    name = "process"

    def unavailable(self) -> str | None:
        """None: it works on every Linux."""
        return None if sys.platform == "linux" else f"sandboxes need Linux, this is {sys.platform}"

    def check(self, config: SandboxConfig) -> None:
        """Raise `ConfigError` for settings that promise what this backend does not do."""
        if config.image is not None or config.runtime is not None:
            raise ConfigError("sandbox.image and sandbox.runtime have no meaning with sandbox.backend=process")

    def worker_settings(self, config: SandboxConfig, labels: Labels) -> WorkerSettings:
        """See `agentgym.sandbox.SandboxBackend`."""
        return WorkerSettings(
            work=str(_folder(labels) / "work"), memory_mb=config.memory_mb, file_mb=config.disk_mb, marker=labels.word
        )

    async def aclose(self) -> None:
        """Nothing is kept: a process tree ends when it is killed."""

    async def launch(self, config: SandboxConfig, labels: Labels) -> LocalChannel:
        """See `agentgym.sandbox.SandboxBackend`."""
        folder = _folder(labels)
        for inner in ("work", "tmp"):
            (folder / inner).mkdir(parents=True, mode=0o700)

        async def clean() -> None:
            await run_in_thread(shutil.rmtree, folder, ignore_errors=True)

        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(folder / "work"),
            "TMPDIR": str(folder / "tmp"),
            "LANG": "C.UTF-8",
            ENVIRONMENT_KEY: labels.word,
        }
        return await LocalChannel.start(
            worker_command(sys.executable), environment=environment, folder=str(folder), gentle=True, clean=clean
        )


def _folder(labels: Labels) -> Path:
    return Path(tempfile.gettempdir()) / f"{FOLDER_PREFIX}{labels.word}"

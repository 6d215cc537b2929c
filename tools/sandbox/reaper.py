"""Removes what sandboxes of dead owners left behind: containers, processes, temp folders.

What a living process owns is never touched, however long it has been there. Safe to run at any time, also by several
at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from agentgym.errors import InfraError
from agentgym.sandbox_labels import ENVIRONMENT_KEY, FOLDER_PREFIX, OWNER_KEY, Labels

if TYPE_CHECKING:
    from agentgym.sandbox import SandboxBackend
    from agentgym.tools.sandbox.daemon import Daemon

logger = logging.getLogger(__name__)

_ROUNDS = 10
"""Processes that fork while they are killed are looked for again, this many times."""

_END_TIMEOUT = 1.0
"""Seconds that a killed process may take to end."""


@dataclass
class ReapReport:
    """What was removed, by name."""

    containers: list[str] = field(default_factory=list)
    processes: list[int] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """What could not be removed, and why; for a daemon that does not answer one line."""

    def __bool__(self) -> bool:
        return bool(self.containers or self.processes or self.folders or self.failures)


def reap_in_background(backend: SandboxBackend) -> None:
    """Look for leftovers of the backend on a thread of its own, for which nothing waits."""
    from agentgym.tools.sandbox.docker import DockerBackend

    daemon = backend.daemon if isinstance(backend, DockerBackend) else None
    threading.Thread(target=reap, args=(daemon,), name="agentgym-reaper", daemon=True).start()


def reap(daemon: Daemon | None) -> ReapReport:
    """Remove everything that dead owners left behind on this machine. Blocks; for a thread.

    Args:
        daemon: whose containers are looked at; None: only processes and folders.
    """
    report = ReapReport()
    if daemon is not None:
        reap_containers(daemon, report)
    reap_processes(report)
    reap_folders(report)
    if report:
        logger.info(
            "left behind by dead owners and removed: containers %s, processes %s, folders %s; failures %s",
            report.containers,
            report.processes,
            report.folders,
            report.failures,
        )
    return report


def reap_containers(daemon: Daemon, report: ReapReport) -> None:
    """Remove containers, running or not."""
    try:
        found = daemon.labelled(OWNER_KEY)
    except InfraError as error:
        report.failures.append(str(error))
        return
    for name, mapping in found.items():
        labels = Labels.from_mapping(mapping)
        if labels is None or not labels.left_behind():
            continue
        try:
            daemon.remove(name)
        except InfraError as error:
            report.failures.append(str(error))
        else:
            report.containers.append(name)


def reap_processes(report: ReapReport) -> None:
    """Kill process trees of sandboxes that have no container."""
    report.processes, complete = kill_processes(Labels.left_behind)
    if not complete:
        report.failures.append(f"processes come up as fast as they are killed: {report.processes[-5:]}")


def kill_processes(wanted: Callable[[Labels], bool]) -> tuple[list[int], bool]:
    """Kill every process whose environment carries labels that are ``wanted``.

    Returns:
        Ids of those that are dead now, and whether none was left at the end.
    """
    killed: list[int] = []
    for _ in range(_ROUNDS):
        found = [pid for pid in _processes() if _kill_if(pid, wanted)]
        if not found:
            return killed, True
        killed += found
    return killed, False


def reap_folders(report: ReapReport) -> None:
    """Remove temp folders."""
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*")):
        labels = Labels.parse(path.name.removeprefix(FOLDER_PREFIX))
        if labels is None or not labels.left_behind() or not _is_own_folder(path):
            continue
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            report.failures.append(f"folder {path}: {error}")
        else:
            report.folders.append(str(path))


def _processes() -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            yield int(entry.name)


def _kill_if(pid: int, wanted: Callable[[Labels], bool]) -> bool:
    """Kill one process if its labels are wanted, and wait for its end; a later one with its id is safe."""
    if _labels_of(pid) is None:  # nearly all of them: no descriptor for those
        return False
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        labels = _labels_of(pid)
        if labels is None or not wanted(labels):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        end = select.poll()
        end.register(descriptor, select.POLLIN)
        end.poll(_END_TIMEOUT * 1000)
    except OSError:  # gone meanwhile, or another user's
        return False
    finally:
        os.close(descriptor)
    return True


def _labels_of(pid: int) -> Labels | None:
    key = ENVIRONMENT_KEY.encode() + b"="
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(key):
                return Labels.parse(variable.removeprefix(key).decode(errors="replace"))
    return None


def _is_own_folder(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.is_dir() and not path.is_symlink() and path.stat().st_uid in (os.geteuid(), 65534)
    return False

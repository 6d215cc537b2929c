"""Who owns a container, a process tree or a temp folder: written on it, for others to tell whether the owner lives.

An owner is a process. A process id alone is used again by the system, so it goes with the start time of the process,
the boot that it belongs to, and the pid namespace in which the id counts. All of it in one word that names of
containers, environment variables and files take.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from agentgym.errors import ConfigError

LIFETIME = 24 * 3600.0
"""Seconds after which a sandbox counts as left behind if nobody here can tell whether its owner lives."""

SESSION_KEY = "agentgym.session"
OWNER_KEY = "agentgym.owner"
EXPIRES_KEY = "agentgym.expires"
ENVIRONMENT_KEY = "AGENTGYM_SANDBOX"
"""Environment variable of the outermost process of a sandbox without a container: `Labels.word`."""

FOLDER_PREFIX = "agentgym-sandbox-"
"""Of temp folders of sandboxes; what follows is `Labels.word`."""


@dataclass(frozen=True)
class Owner:
    """A process, told apart from every other one that had or will have its id."""

    pid: int
    start: int
    """Clock ticks between boot and the start of the process."""
    boot: str
    """Id of the boot, without dashes."""
    namespace: int
    """Of process ids: inode of the namespace; 0 if unknown."""

    @classmethod
    def current(cls) -> Owner:
        """This process (asked anew: a fork is another owner)."""
        return _owner_of(os.getpid())

    @classmethod
    def parse(cls, word: str) -> Owner | None:
        """The owner that `word` names; None if it is not one."""
        parts = word.split("_")
        if len(parts) != 4 or not all(part.isdecimal() for part in (parts[0], parts[1], parts[3])) or not parts[2]:
            return None
        return cls(pid=int(parts[0]), start=int(parts[1]), boot=parts[2], namespace=int(parts[3]))

    @property
    def word(self) -> str:
        """The owner as one word of letters, digits and underscores."""
        return f"{self.pid}_{self.start}_{self.boot}_{self.namespace}"

    def alive(self) -> bool | None:
        """Whether the process lives; None if that cannot be told from here (another machine or pid namespace)."""
        if (self.boot, self.namespace) != (_boot_id(), _pid_namespace()):
            return None
        start = _start_ticks(self.pid)
        if start is None and _exists(self.pid):  # of another user, where /proc hides those
            return None
        return start == self.start


@dataclass(frozen=True)
class Labels:
    """What is written on everything that belongs to a sandbox."""

    session: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    """Id of the sandbox's first session, or of the pool's slot: for people who look at ``docker ps``."""
    owner: Owner = field(default_factory=Owner.current)
    expires: int = field(default_factory=lambda: int(time.time() + LIFETIME))
    """Unix seconds."""

    @property
    def word(self) -> str:
        """All of it as one word, for names of folders and for `ENVIRONMENT_KEY`."""
        return f"{self.owner.word}_{self.expires}-{self.session}"

    @classmethod
    def parse(cls, word: str) -> Labels | None:
        """The labels that `word` (see `word`) holds; None if it holds none."""
        head, _, session = word.partition("-")
        owner_word, _, expires = head.rpartition("_")
        owner = Owner.parse(owner_word)
        if owner is None or not expires.isdecimal():
            return None
        return cls(session=session, owner=owner, expires=int(expires))

    def as_mapping(self) -> dict[str, str]:
        """As labels of a container."""
        return {SESSION_KEY: self.session, OWNER_KEY: self.owner.word, EXPIRES_KEY: str(self.expires)}

    @classmethod
    def from_mapping(cls, labels: Mapping[str, str]) -> Labels | None:
        """From the labels of a container; None if it is not one of ours."""
        if not {SESSION_KEY, OWNER_KEY, EXPIRES_KEY} <= labels.keys():
            return None
        owner = Owner.parse(labels[OWNER_KEY])
        if owner is None or not labels[EXPIRES_KEY].isdecimal():
            return None
        return cls(session=labels[SESSION_KEY], owner=owner, expires=int(labels[EXPIRES_KEY]))

    def left_behind(self, now: float | None = None) -> bool:
        """True if the owner is dead, or if nobody here can tell and the time is over.

        What a living process owns is never left behind, however old it is.
        """
        alive = self.owner.alive()
        if alive is None:
            return (time.time() if now is None else now) > self.expires
        return not alive


def _owner_of(pid: int) -> Owner:
    start = _start_ticks(pid)
    if start is None:
        raise ConfigError("/proc shows nothing of this process. Sandboxes need Linux with /proc mounted")
    return Owner(pid=pid, start=start, boot=_boot_id(), namespace=_pid_namespace())


@lru_cache(maxsize=1)
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")


def _pid_namespace() -> int:
    try:
        return int(os.readlink("/proc/self/ns/pid").partition("[")[2].rstrip("]"))
    except (OSError, ValueError):
        return 0


def _start_ticks(pid: int) -> int | None:
    """Start time of a process that runs (a zombie does not); None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    state, *rest = stat.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return None if state in ("Z", "X") else int(rest[18])


def _exists(pid: int) -> bool:
    """Whether a process that runs as another user has the id."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return False  # ours, and /proc shows it only as a zombie

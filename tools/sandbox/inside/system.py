"""What the parts of the worker share: limits of processes, looks into /proc, the capture of output."""

from __future__ import annotations

import ctypes
import os
import resource
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CHUNK = 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36

libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    libc.prctl(option, value, 0, 0, 0)


class Capture:
    """Output of one call: everything up to the limit, else its head and its tail."""

    def __init__(self, limit: int) -> None:
        self.head_limit = limit // 2
        self.tail_limit = limit - self.head_limit
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.head_limit - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > 4 * self.tail_limit + CHUNK:
            del self.tail[: -self.tail_limit]

    def parts(self) -> tuple[bytes, bytes, int]:
        """Head, tail, and how many bytes between them are gone."""
        del self.tail[: max(0, len(self.tail) - self.tail_limit)]
        return bytes(self.head), bytes(self.tail), self.total - len(self.head) - len(self.tail)


class Refused(Exception):
    """A request that cannot be served; its text goes to the caller."""


def set_limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


def freeze(pid: int) -> None:
    send(pid, signal.SIGSTOP)


def ignores(pid: int, number: int) -> bool:
    """Whether the process ignores the signal."""
    try:
        with open("/proc/%d/status" % pid, "rb") as file:
            for line in file:
                if line.startswith(b"SigIgn:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except OSError:
        pass
    return False


def kill(pid: int) -> bool:
    """False if the process is gone, or dead and only not reaped by its parent."""
    try:
        os.kill(pid, signal.SIGKILL)
        with open("/proc/%d/stat" % pid, "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def parent_of(pid: int) -> int | None:
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return None


def birth_of(pid: int) -> tuple[int, int]:
    """Orders processes by their start; the pid decides within a clock tick."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19]), pid
    except (OSError, IndexError):
        return 0, pid


def environment_of(pid: int) -> list[bytes]:
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def private_memory(pid: int) -> int:
    """Bytes that are neither files nor shared."""
    try:
        with open("/proc/%d/statm" % pid, "rb") as file:
            fields = file.read().split()
        return (int(fields[1]) - int(fields[2])) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def proportional_memory(pid: int, fallback: int) -> int:
    try:
        with open("/proc/%d/smaps_rollup" % pid, "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return fallback


def inodes(folder: str) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_files - found.f_ffree


def describe_end(language: str, status: int) -> str:
    if os.WIFSIGNALED(status):
        return "the %s interpreter was killed by signal %d" % (language, os.WTERMSIG(status))
    return "the %s interpreter exited with code %d" % (language, os.WEXITSTATUS(status))


def find_bash() -> str:
    for path in ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash"):
        if os.path.exists(path):
            return path
    return "/bin/sh"


def clean_environment(work: str) -> dict[str, str]:
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": work,
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        **{name: os.environ[name] for name in ("AGENTGYM_SANDBOX",) if name in os.environ},
    }


class Settings:
    """What the host says about the sandbox, and how children of the worker begin."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.work: str = values["work"]
        self.memory: int | None = values.get("memory_mb")
        self.pids: int | None = values.get("pids")
        self.file_mb: int | None = values.get("file_mb")
        self.marker: str = values.get("marker", "")
        self.output_limit: int = values["output_limit"]
        self.bash = find_bash()

    def fork(self) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                self.limit()
            except BaseException:
                os._exit(126)
        return pid

    def limit(self) -> None:
        """In a child, before any code of the session."""
        signal.set_wakeup_fd(-1)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        set_limit(resource.RLIMIT_CORE, 0)
        set_limit(resource.RLIMIT_NOFILE, 1024)
        if self.pids is not None:
            set_limit(resource.RLIMIT_NPROC, self.pids)
        if self.file_mb is not None:
            set_limit(resource.RLIMIT_FSIZE, self.file_mb << 20)
        if self.memory is not None:
            set_limit(resource.RLIMIT_DATA, self.memory << 20)
            set_limit(resource.RLIMIT_AS, (2 * self.memory + 1024) << 20)

    def forget(self, keep: tuple[int, ...]) -> None:
        """In a child: close the channel and whatever else is the worker's, keep stdin, stdout, stderr and ``keep``."""
        start = 3
        for descriptor in sorted(keep):
            os.closerange(start, descriptor)
            start = descriptor + 1
        os.closerange(start, 4096)
        for number in (signal.SIGPIPE, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        # Only now that the channel is closed may the session's other processes look into this one.
        prctl(PR_SET_DUMPABLE, 1)
        try:
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")  # if the host runs out of memory, this goes first
        except OSError:
            pass

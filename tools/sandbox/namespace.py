"""Backend ``namespace``: bubblewrap. No daemon, no image; needs unprivileged user namespaces.

Inside there are the host's /usr, read-only, a private /proc, an empty network, /work and /tmp in memory, and a handful
of devices; nothing else of the host. The worker is the first process of the pid namespace: the session's code can
neither kill nor stop it, and all others die with it. Everything runs as nobody; where agentgym runs as root,
bubblewrap itself is started as nobody.

What contains what: the user namespace has a count of processes of its own (RLIMIT_NPROC); data of one process is
limited by RLIMIT_DATA and RLIMIT_AS, that of all together by the worker, which looks every 0.1 s and kills the largest;
kernel objects that neither sees (memfd, System V shared memory, nested namespaces) are refused by a system call filter;
/work and /tmp have sizes, and nothing else can be written. ``cpus`` is not enforced.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from agentgym.errors import ConfigError, InfraError
from agentgym.sandbox import SandboxConfig, WorkerSettings
from agentgym.sandbox_labels import ENVIRONMENT_KEY, Labels
from agentgym.tools.sandbox.client import worker_command
from agentgym.tools.sandbox.local import LocalChannel, nothing
from agentgym.tools.sandbox.seccomp import filter_program

NOBODY = 65534
PROBE_TIMEOUT = 20.0

_PASSWD = b"nobody:x:65534:65534:nobody:/work:/bin/bash\n"
_GROUP = b"nogroup:x:65534:\n"
_HOSTS = b"127.0.0.1 localhost\n::1 localhost\n"


class NamespaceBackend:
    """See the module's text."""

    name = "namespace"

    def unavailable(self) -> str | None:
        """Start a sandbox that does nothing, once per process. Blocks."""
        return _probe()

    def check(self, config: SandboxConfig) -> None:
        """Raise `ConfigError` for settings that this backend cannot honour."""
        if config.runtime is not None:
            raise ConfigError(f"sandbox.runtime={config.runtime!r} has no meaning with sandbox.backend=namespace")
        if config.image is not None and not Path(config.image, "usr").is_dir():
            raise ConfigError(f"sandbox.image={config.image!r}: expected a folder with a root file system in it")

    def worker_settings(self, config: SandboxConfig, labels: Labels) -> WorkerSettings:
        """See `agentgym.sandbox.SandboxBackend`."""
        return WorkerSettings(memory_mb=config.memory_mb, pids=config.pids, file_mb=config.disk_mb)

    async def aclose(self) -> None:
        """Nothing is kept: a process tree ends when it is killed."""

    async def launch(self, config: SandboxConfig, labels: Labels) -> LocalChannel:
        """See `agentgym.sandbox.SandboxBackend`."""
        info, info_end = os.pipe()
        inherited = [info_end]
        try:
            files = {"/etc/passwd": _PASSWD, "/etc/group": _GROUP, "/etc/hosts": _HOSTS}
            opened = {path: data_descriptor(data) for path, data in files.items()}
            inherited += opened.values()
            program = filter_program()
            arguments = [*_bubblewrap(), "--info-fd", str(info_end)]
            if program is not None:
                inherited.append(data_descriptor(program))
                arguments += ["--seccomp", str(inherited[-1])]
            arguments += root_arguments(config)
            for path, descriptor in opened.items():
                arguments += ["--ro-bind-data", str(descriptor), path]
            arguments += tree_arguments(config)
            return await LocalChannel.start(
                [*arguments, "--", *worker_command(python_inside(config.image))],
                environment={ENVIRONMENT_KEY: labels.word},
                pass_fds=inherited,
                info=info,
                clean=nothing,
            )
        finally:
            for descriptor in inherited:
                os.close(descriptor)


def data_descriptor(data: bytes) -> int:
    """A pipe that holds a few bytes and ends."""
    reader, writer = os.pipe()
    with open(writer, "wb") as file:
        file.write(data)
    return reader


def root_arguments(config: SandboxConfig) -> list[str]:
    """Bubblewrap's arguments for what of the host is visible."""
    root = Path(config.image or "/")
    arguments: list[str] = []
    for name in ("usr", "bin", "sbin", "lib", "lib32", "lib64"):
        path = root / name
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), f"/{name}"]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), f"/{name}"]
    for name in ("etc/ld.so.cache", "etc/alternatives", "etc/localtime"):
        arguments += ["--ro-bind-try", str(root / name), f"/{name}"]
    prefix = Path(python_inside(config.image)).parents[1]
    if config.image is None and not prefix.is_relative_to("/usr"):
        arguments += ["--ro-bind", str(prefix), str(prefix)]
    if config.network == "allow":
        arguments += ["--share-net"]
        for name in ("/etc/resolv.conf", "/etc/ssl", "/etc/ca-certificates", "/etc/nsswitch.conf"):
            arguments += ["--ro-bind-try", name, name]
    return arguments


def tree_arguments(config: SandboxConfig) -> list[str]:
    """Bubblewrap's arguments for what belongs to the sandbox; at the end everything else becomes read-only."""
    disk = str(config.disk_mb << 20)
    return [
        *("--proc", "/proc", "--dev", "/dev"),
        *("--size", disk, "--tmpfs", "/tmp"),
        *("--size", disk, "--tmpfs", "/work"),
        *("--remount-ro", "/dev", "--remount-ro", "/"),
        *("--chdir", "/work", "--hostname", "sandbox", "--clearenv"),
    ]


@functools.cache
def python_inside(image: str | None) -> str:
    """The interpreter that the sandbox sees: that of the root file system, else the one this process was made from."""
    root = Path(image or "/")
    for name in ("usr/bin/python3", "usr/local/bin/python3"):
        if (root / name).exists():
            return f"/{name}"
    if image is not None:
        raise ConfigError(f"sandbox.image={image!r} has no /usr/bin/python3")
    return str(Path(sys.base_prefix).resolve() / "bin" / "python3")


@functools.cache
def _bubblewrap() -> tuple[str, ...]:
    """The start of the command. Raises `InfraError` if it is not installed."""
    path = shutil.which("bwrap")
    if path is None:
        raise InfraError("bubblewrap is not installed: apt-get install bubblewrap")
    drop: tuple[str, ...] = ()
    if os.getuid() == 0:
        # As root inside, processes would be exempt from the limit of their number, and own root's files.
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            raise InfraError("sandboxes started by root need setpriv (util-linux), which is not installed")
        drop = (setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    return (
        *drop,
        *(path, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--as-pid-1"),
        *("--uid", str(NOBODY), "--gid", str(NOBODY)),
    )


@functools.cache
def _probe() -> str | None:
    if sys.platform != "linux":
        return f"sandboxes need Linux, this is {sys.platform}"
    config = SandboxConfig()
    try:
        command: Sequence[str] = [
            *_bubblewrap(),
            *root_arguments(config),
            *tree_arguments(config),
            *("--", python_inside(None), "-I", "-S", "-c", "import sys; sys.exit(sys.version_info < (3, 8))"),
        ]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_TIMEOUT, check=False
        )
    except (InfraError, OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    message = done.stderr.strip() or f"exit code {done.returncode}"
    return (
        f"bubblewrap cannot make a sandbox with {python_inside(None)} in it: {message}. It needs unprivileged user "
        "namespaces (sysctl kernel.unprivileged_userns_clone=1, on Ubuntu "
        "kernel.apparmor_restrict_unprivileged_userns=0) and a Python 3.8 or later that everybody can read"
    )

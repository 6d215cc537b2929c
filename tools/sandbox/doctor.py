"""``agentgym sandbox doctor``: attacks on the sandboxes of this machine, and what came of them.

Each probe runs code in a fresh sandbox that tries to do what must not work, looks from the outside at what can be seen
from there, and then checks that the session goes on: its next call is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import tempfile
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym.errors import AgentGymError, ConfigError
from agentgym.sandbox import LazySandbox, RunResult, SandboxBackend, SandboxConfig, sandbox_backends
from agentgym.tool_threads import run_in_thread
from agentgym.tools.sandbox.pool import SandboxPool

SECRET_KEY = "AGENTGYM_DOCTOR_SECRET"

LIMITS: dict[str, Any] = {"memory_mb": 256, "pids": 32, "disk_mb": 16, "output_limit": 4096, "pool_size": 0}
"""Small limits are reached sooner."""

_CALL_TIMEOUT = 30.0
_TIME_LIMIT, _TIME_SLACK = 1.0, 3.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one probe saw."""

    backend: str
    probe: str
    contained: bool
    evidence: str
    """What was tried and what came of it; what got through if it was not contained."""

    def row(self) -> dict[str, str]:
        """As a row of the printed table."""
        return {
            "backend": self.backend,
            "containment": self.probe,
            "holds": "yes" if self.contained else "NO",
            "evidence": self.evidence,
        }


class Leak(Exception):
    """Something was not contained."""


@dataclass(frozen=True, kw_only=True)
class Ward:
    """What a probe works with."""

    config: SandboxConfig
    pool: SandboxPool
    secret: str
    """In this process's environment and in ``secret_file``; nothing inside may see it."""
    secret_file: Path

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[LazySandbox]:
        """The sandbox of one session."""
        sandbox = LazySandbox(self.config, self.pool)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    async def facts(self, sandbox: LazySandbox, code: str) -> dict[str, Any]:
        """Run Python code that prints one JSON object at its end."""
        result = await sandbox.run("python", textwrap.dedent(code), timeout=_CALL_TIMEOUT)
        if result.status != "ok":
            raise Leak(f"the probe itself failed ({result.status}): {result.output[-300:] or result.reason}")
        facts: dict[str, Any] = json.loads(result.output.splitlines()[-1])
        return facts


Probe = Callable[[Ward], Awaitable[str]]
"""Returns the evidence; raises `Leak`."""


async def examine(names: Sequence[str]) -> list[Finding]:
    """Run every probe on every backend.

    Args:
        names: backends; empty: docker and namespace, as far as they work here.

    Raises:
        ConfigError: a backend was named that does not exist.
    """
    findings: list[Finding] = []
    for name in names or ("docker", "namespace"):
        backend = sandbox_backends.get(name)()
        reason = await run_in_thread(backend.unavailable)
        if reason is None:
            findings += await examine_backend(backend, SandboxConfig.model_validate({"backend": name, **LIMITS}))
        elif names:
            findings.append(Finding(backend=name, probe="start", contained=False, evidence=reason))
    if not findings:
        raise ConfigError("no sandbox backend works here: `agentgym sandbox doctor --backend docker` says why")
    return findings


async def examine_backend(backend: SandboxBackend, config: SandboxConfig) -> list[Finding]:
    """Run every probe on one backend."""
    secret = secrets.token_hex(16)
    descriptor, path = tempfile.mkstemp(prefix="agentgym-doctor-")
    os.write(descriptor, secret.encode())
    os.fchmod(descriptor, 0o644)
    os.close(descriptor)
    os.environ[SECRET_KEY] = secret
    pool = SandboxPool(config, backend)
    ward = Ward(config=config, pool=pool, secret=secret, secret_file=Path(path))
    try:
        return [await _run_probe(name, probe, ward, backend.name) for name, probe in PROBES.items()]
    finally:
        await pool.aclose()
        del os.environ[SECRET_KEY]
        os.unlink(path)


async def _run_probe(name: str, probe: Probe, ward: Ward, backend: str) -> Finding:
    try:
        evidence, contained = await probe(ward), True
    except (Leak, AgentGymError) as fault:
        evidence, contained = str(fault), False
    return Finding(backend=backend, probe=name, contained=contained, evidence=evidence)


def _require(holds: bool, leak: str) -> None:
    if not holds:
        raise Leak(leak)


async def _goes_on(sandbox: LazySandbox) -> None:
    """The session answers its next call, in a fresh sandbox if the last one is lost."""
    result = await sandbox.run("python", "print(6 * 7)", timeout=_CALL_TIMEOUT)
    if result.status == "lost":
        result = await sandbox.run("python", "print(6 * 7)", timeout=_CALL_TIMEOUT)
    _require(result.output.strip().endswith("42"), f"the session did not go on: {result.status} {result.output[-200:]}")


# -- the probes --------------------------------------------------------------------------------------------------------


async def network(ward: Ward) -> str:
    """Connections to the world, to the metadata address, to this machine and to its abstract sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
        name = f"agentgym-doctor-{secrets.token_hex(4)}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        async with ward.session() as sandbox:
            facts = await ward.facts(
                sandbox,
                f"""
                import json, socket
                targets = [
                    ("tcp", socket.AF_INET, socket.SOCK_STREAM, ("1.1.1.1", 53)),
                    ("udp", socket.AF_INET, socket.SOCK_DGRAM, ("8.8.8.8", 53)),
                    ("tcp6", socket.AF_INET6, socket.SOCK_STREAM, ("2606:4700:4700::1111", 53)),
                    ("metadata", socket.AF_INET, socket.SOCK_STREAM, ("169.254.169.254", 80)),
                    ("host", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", {listener.getsockname()[1]})),
                    ("unix", socket.AF_UNIX, socket.SOCK_STREAM, "\\0{name}"),
                ]
                reached = []
                for name, family, kind, address in targets:
                    try:
                        with socket.socket(family, kind) as s:
                            s.settimeout(2)
                            s.connect(address)
                            s.send(b"x")
                            reached.append(name)
                    except OSError:
                        pass
                try:
                    socket.getaddrinfo("example.com", 80)
                    reached.append("dns")
                except OSError:
                    pass
                print(json.dumps({{"reached": reached, "tried": [t[0] for t in targets] + ["dns"]}}))
                """,
            )
    _require(not facts["reached"], f"reached: {', '.join(facts['reached'])}")
    return f"unreachable: {', '.join(facts['tried'])}"


async def files(ward: Ward) -> str:
    """Files, environment and secrets of this machine; writing anywhere but in /work and /tmp."""
    async with ward.session() as sandbox:
        facts = await ward.facts(
            sandbox,
            f"""
            import glob, json, os
            seen = []
            for path in [{str(ward.secret_file)!r}, *glob.glob("/proc/*/environ"), *glob.glob("/proc/*/cmdline")]:
                try:
                    if {ward.secret!r} in open(path, errors="replace").read():
                        seen.append(path)
                except OSError:
                    pass
            seen += [key for key in os.environ if key == {SECRET_KEY!r}]
            for path in ["/etc/shadow", "/root/.ssh", "/var/run/docker.sock", "/proc/kcore", "/dev/mem", "/dev/sda"]:
                try:
                    open(path, "rb").read(1)
                    seen.append(path)
                except OSError:
                    pass
            written = []
            folders = ["/", "/usr/bin", "/usr/lib", "/dev/mqueue", "/dev/shm", "/proc/sys/kernel", "/sys/fs/cgroup",
                       "/var/tmp", *sorted(glob.glob("/*"))]
            for folder in folders:
                if folder not in ("/work", "/tmp"):
                    try:
                        with open(folder + "/agentgym-doctor", "w") as f:
                            f.write("x")
                        written.append(folder)
                        os.unlink(folder + "/agentgym-doctor")
                    except OSError:
                        pass
            for folder in ("/work", "/tmp"):
                with open(folder + "/mine", "w") as f:
                    f.write("x")
            print(json.dumps({{"seen": seen, "written": written, "tried": len(folders)}}))
            """,
        )
    _require(not facts["seen"], f"readable: {', '.join(facts['seen'])}")
    _require(not facts["written"], f"writable: {', '.join(facts['written'])}")
    return f"secrets of the host unseen; {facts['tried']} folders not writable, /work and /tmp are"


async def privileges(ward: Ward) -> str:
    """Root, capabilities, set-uid programs, mounts, new namespaces with rights, tracing the worker."""
    async with ward.session() as sandbox:
        facts = await ward.facts(
            sandbox,
            """
            import ctypes, json, os
            libc = ctypes.CDLL(None, use_errno=True)
            status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines() if ":" in line)
            status = {key: value.strip() for key, value in status.items()}
            got = []
            if os.getuid() == 0 or os.geteuid() == 0:
                got.append("uid 0")
            for name in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
                if int(status[name], 16):
                    got.append(name + " " + status[name])
            if status["NoNewPrivs"] != "1":
                got.append("no_new_privs is off")
            def child(what):
                pid = os.fork()
                if pid == 0:
                    try:
                        os._exit(0 if what() else 1)
                    except BaseException:
                        os._exit(1)
                return os.waitpid(pid, 0)[1] == 0
            attacks = {
                "setuid 0": lambda: os.setuid(0) is None,
                "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0,
                "chroot": lambda: os.chroot("/tmp") is None,
                "mknod": lambda: os.mknod("/tmp/device", 0o20666, os.makedev(1, 1)) is None,
                "mount in a new user namespace":
                    lambda: libc.unshare(0x10020000) == 0 and libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0,
                "ptrace of process 1": lambda: libc.ptrace(16, 1, 0, 0) == 0,
                "memory of process 1": lambda: bool(open("/proc/1/mem", "rb").fileno()),
                "descriptors of process 1": lambda: bool(os.listdir("/proc/1/fd")),
                "sethostname": lambda: libc.sethostname(b"x", 1) == 0,
                "reboot": lambda: libc.reboot(0) == 0,
            }
            got += [name for name, attack in attacks.items() if child(attack)]
            print(json.dumps({"got": got, "tried": list(attacks), "uid": os.getuid()}))
            """,
        )
    _require(not facts["got"], f"possible: {', '.join(facts['got'])}")
    return f"uid {facts['uid']}, no capabilities; refused: {', '.join(facts['tried'])}"


async def memory(ward: Ward) -> str:
    """Twice the limit in one process, then in eight."""
    limit = ward.config.memory_mb
    async with ward.session() as sandbox:
        alone = f"data = [bytearray(b'x' * (1 << 20)) for _ in range({limit * 2})]\nprint('all', 'of it')"
        result = await sandbox.run("python", alone, timeout=_CALL_TIMEOUT)
        _require("all of it" not in result.output, f"{limit * 2} MiB were held under a limit of {limit} MiB")
        await _goes_on(sandbox)
    async with ward.session() as sandbox:
        together = f"""
            import os, time
            pids = []
            for _ in range(8):
                pids.append(os.fork())
                if pids[-1] == 0:
                    try:
                        data = b"x" * ({limit // 4} << 20)
                        time.sleep(2)
                        os._exit(0)
                    finally:
                        os._exit(1)
            print("held by", sum(os.waitpid(pid, 0)[1] == 0 for pid in pids))
            """
        result = await sandbox.run("python", textwrap.dedent(together), timeout=_CALL_TIMEOUT)
        _require("held by 8" not in result.output, f"8 processes held {limit * 2} MiB under a limit of {limit} MiB")
        await _goes_on(sandbox)
    return f"{limit * 2} MiB refused under a limit of {limit} MiB, in one process and in eight"


async def processes(ward: Ward) -> str:
    """Forks without end."""
    limit = ward.config.pids
    async with ward.session() as sandbox:
        bomb = f"""
            import json, os, signal
            pids = []
            for _ in range({limit * 4}):
                try:
                    pids.append(os.fork())
                except OSError:
                    break
                if pids[-1] == 0:
                    signal.pause()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            print(json.dumps({{"made": len(pids)}}))
            """
        made = (await ward.facts(sandbox, bomb))["made"]
        _require(made <= limit, f"{made} processes under a limit of {limit}")
        await sandbox.run("bash", ":(){ :|:& };:; sleep 1", timeout=_TIME_LIMIT)
        await _goes_on(sandbox)
    return f"{made} processes, the next refused under a limit of {limit}; the session goes on after a fork bomb"


async def disk(ward: Ward) -> str:
    """Four times the limit into /work and /tmp, and files without number."""
    limit = ward.config.disk_mb
    async with ward.session() as sandbox:
        facts = await ward.facts(
            sandbox,
            f"""
            import json, os
            written = {{}}
            for folder in ("/work", "/tmp"):
                count = 0
                try:
                    for i in range({limit * 4}):
                        with open(f"{{folder}}/{{i}}", "wb") as f:
                            f.write(b"x" * (1 << 20))
                        count += 1
                except OSError:
                    pass
                written[folder] = count
                for i in range({limit * 4}):
                    try:
                        os.unlink(f"{{folder}}/{{i}}")
                    except OSError:
                        pass
            print(json.dumps(written))
            """,
        )
        _require(max(facts.values()) <= limit, f"written in MiB under a limit of {limit}: {facts}")
        await _goes_on(sandbox)
    return f"{limit * 4} MiB cut to {facts['/work']} in /work and {facts['/tmp']} in /tmp"


async def time(ward: Ward) -> str:
    """Code that never ends, that ignores signals, and that leaves something behind."""
    loop = asyncio.get_running_loop()
    attacks: list[tuple[Any, str]] = [
        ("python", "while True:\n    pass"),
        ("python", "while True:\n    try:\n        while True: pass\n    except BaseException:\n        pass"),
        ("bash", "trap '' INT TERM; while :; do :; done"),
        ("bash", "setsid nohup sleep 1000 & sleep 1000"),
    ]
    slowest = 0.0
    async with ward.session() as sandbox:
        for language, code in attacks:
            await sandbox.get()
            start = loop.time()
            result = await sandbox.run(language, code, timeout=_TIME_LIMIT)
            slowest = max(slowest, loop.time() - start)
            _require(result.status in ("timeout", "lost"), f"{code!r} ended with {result.status}")
            _require(slowest < _TIME_LIMIT + _TIME_SLACK, f"{code!r} took {slowest:.1f} s of {_TIME_LIMIT:g}")
            await _goes_on(sandbox)
        left = await ward.facts(
            sandbox,
            """
            import glob, json
            commands = [open(path, "rb").read().split(b"\\0") for path in glob.glob("/proc/[0-9]*/cmdline")]
            print(json.dumps({"sleeping": sum(command[:1] == [b"sleep"] for command in commands)}))
            """,
        )
        _require(left["sleeping"] == 0, f"{left['sleeping']} background processes outlived their call's time limit")
    return f"{len(attacks)} endless calls with a limit of {_TIME_LIMIT:g} s ended within {slowest:.1f} s"


async def output(ward: Ward) -> str:
    """A flood on stdout and on stderr."""
    size = 10_000_000
    async with ward.session() as sandbox:
        results: list[RunResult] = [
            await sandbox.run("python", f"import sys; sys.{stream}.write('x' * {size})", timeout=_CALL_TIMEOUT)
            for stream in ("stdout", "stderr")
        ]
        await _goes_on(sandbox)
    for result in results:
        _require(result.truncated, f"{len(result.output)} characters of {size} and no sign that some are missing")
        _require(len(result.output) < 2 * ward.config.output_limit, f"{len(result.output)} characters were kept")
    return f"{size:,} characters cut to {max(len(result.output) for result in results):,}, and marked"


async def other_sessions(ward: Ward) -> str:
    """Variables, files and processes of another session, during it and after it."""
    mark = secrets.token_hex(8)
    look = f"""
        import glob, json, os
        found = []
        if "mark" in globals():
            found.append("variable")
        for root in ("/work", "/tmp", "/dev/shm", "/var/tmp"):
            for folder, _, names in os.walk(root):
                found += [folder + "/" + name for name in names if name == "mark"]
        for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
            try:
                if "{mark[:8]}" + "{mark[8:]}" in open(path, errors="replace").read() and str(os.getpid()) not in path:
                    found.append(path)
            except OSError:
                pass
        print(json.dumps(found))
        """
    leave = f"mark = 1\nfor d in ('/work', '/tmp'): open(d + '/mark', 'w').write('{mark}')"
    async with ward.session() as first:
        await first.run("python", leave, timeout=_CALL_TIMEOUT)
        await first.run("bash", f"MARK={mark} sleep 1000 >/dev/null 2>&1 &", timeout=_CALL_TIMEOUT)
        async with ward.session() as second:
            during = await second.run("python", textwrap.dedent(look), timeout=_CALL_TIMEOUT)
    async with ward.session() as third:
        after = await third.run("python", textwrap.dedent(look), timeout=_CALL_TIMEOUT)
    for result in (during, after):
        _require(result.output.strip() == "[]", f"seen of another session: {result.output.strip()}")
    return "variables, files and processes unseen, during it and after it"


PROBES: dict[str, Probe] = {
    "network": network,
    "files": files,
    "privileges": privileges,
    "memory": memory,
    "processes": processes,
    "disk": disk,
    "time": time,
    "output": output,
    "other sessions": other_sessions,
}
"""In the order of the table."""

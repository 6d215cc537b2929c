"""Attacks on sandboxes: each is contained, the session goes on or hears that it is lost, and the next one is clean."""

from __future__ import annotations

import ast
import os
import secrets
import socket
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentgym.errors import ToolError
from agentgym.sandbox import LazySandbox, RunResult
from agentgym.tools.sandbox.pool import SandboxPool

pytestmark = pytest.mark.usefixtures("bounded_memory")

TIMEOUT = 30.0
SHORT = 1.0
SLACK = 4.0
"""Seconds beyond a time limit in which a call has to come back, on a busy machine."""


async def python(sandbox: LazySandbox, code: str, *, timeout: float = TIMEOUT) -> RunResult:
    return await sandbox.run("python", textwrap.dedent(code), timeout=timeout)


async def bash(sandbox: LazySandbox, code: str, *, timeout: float = TIMEOUT) -> RunResult:
    return await sandbox.run("bash", code, timeout=timeout)


async def facts(sandbox: LazySandbox, code: str) -> Any:
    """The value that Python code, which must succeed, prints."""
    result = await python(sandbox, code)
    assert result.status == "ok", result
    return ast.literal_eval(result.output)


@pytest.fixture(autouse=True)
async def aftermath(sandbox: LazySandbox, pool: SandboxPool) -> AsyncIterator[None]:
    """After every attack: the session answers, in a new sandbox if it was told of a loss, and the next one is clean."""
    yield
    result = RunResult(output="", status="lost")
    for _ in range(3):
        try:
            result = await bash(sandbox, "echo still here")
        except ToolError as told:
            assert "lost" in str(told)  # noqa: PT017 - either outcome is right
            continue
        if result.status != "lost":
            break
    assert result.output.endswith("still here\n")
    following = LazySandbox(pool.config, pool)
    try:
        clean = "import os; print(sorted(os.listdir('/work') + os.listdir('/tmp')), 'x' in globals())"
        assert (await python(following, clean)).output == "[] False\n"
        assert (await bash(following, "jobs; pwd")).output == "/work\n"
    finally:
        await following.close()


# -- processes ---------------------------------------------------------------------------------------------------------


async def test_fork_bomb(sandbox: LazySandbox) -> None:
    result = await bash(sandbox, ":(){ :|:& };:; sleep 0.5; echo done", timeout=10.0)
    assert result.status in ("ok", "error", "timeout", "lost")
    assert len(result.output) < 10_000


async def test_forking_for_ever(sandbox: LazySandbox) -> None:
    start = time.monotonic()
    code = """
    import os
    while True:
        try:
            os.fork()
        except OSError:
            pass
    """
    result = await python(sandbox, code, timeout=SHORT)
    assert result.status in ("timeout", "lost")
    assert time.monotonic() - start < SHORT + 2 * SLACK


async def test_the_number_of_processes_is_limited(sandbox: LazySandbox, pool: SandboxPool) -> None:
    code = """
    import os, signal
    pids = []
    try:
        while len(pids) < 200:
            pids.append(os.fork())
            if pids[-1] == 0:
                signal.pause()
    except OSError:
        pass
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print(len(pids))
    """
    count = await facts(sandbox, code)
    assert pool.config.pids // 2 < count < pool.config.pids


async def test_infinite_loop(sandbox: LazySandbox) -> None:
    await python(sandbox, "x = 7")
    start = time.monotonic()
    result = await python(sandbox, "while True: pass", timeout=SHORT)
    assert result.status == "timeout"
    assert SHORT - 0.1 < time.monotonic() - start < SHORT + SLACK
    assert not result.state_lost
    assert await facts(sandbox, "print(x)") == 7


async def test_infinite_loop_that_swallows_every_interrupt(sandbox: LazySandbox) -> None:
    code = """
    import signal
    for number in range(1, 32):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    while True:
        try:
            while True: pass
        except BaseException:
            pass
    """
    start = time.monotonic()
    result = await python(sandbox, code, timeout=SHORT)
    assert time.monotonic() - start < SHORT + SLACK
    assert result.status in ("timeout", "lost")
    assert result.state_lost


async def test_grandchild_that_holds_the_pipe(sandbox: LazySandbox) -> None:  # D5
    start = time.monotonic()
    result = await bash(sandbox, "python3 -c 'import time; time.sleep(12)' & echo started", timeout=SHORT)
    assert "started" in result.output
    assert result.status in ("ok", "timeout")
    assert time.monotonic() - start < SHORT + SLACK


async def test_what_runs_in_the_background_ends_with_the_time_limit(sandbox: LazySandbox) -> None:  # D5
    start = time.monotonic()
    result = await bash(sandbox, "{ sleep 3; touch late.txt; } & sleep 12", timeout=SHORT)
    assert result.status == "timeout"
    assert time.monotonic() - start < SHORT + SLACK
    assert (await bash(sandbox, "sleep 3; ls /work", timeout=10.0)).output == ""


async def test_daemonised_child_dies_with_the_time_limit(sandbox: LazySandbox) -> None:
    code = """
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for descriptor in range(256):
                try:
                    os.close(descriptor)
                except OSError:
                    pass
            while True:
                time.sleep(0.1)
                open("/work/heart", "w").write(str(time.time()))
        os._exit(0)
    time.sleep(60)
    """
    assert (await python(sandbox, code, timeout=SHORT)).status in ("timeout", "lost")
    probe = """
    import os, time
    before = os.path.exists("/work/heart") and open("/work/heart").read()
    time.sleep(0.5)
    print(before == (os.path.exists("/work/heart") and open("/work/heart").read()))
    """
    assert await facts(sandbox, probe) is True


@pytest.mark.parametrize("name", ["KILL", "STOP", "TERM", "SEGV"])
async def test_signals_to_the_worker_and_to_process_1(sandbox: LazySandbox, name: str) -> None:
    await python(sandbox, "x = 1")
    result = await bash(sandbox, f"kill -{name} 1; kill -{name} $PPID; sleep 0.2; echo sent", timeout=5.0)
    assert result.status in ("ok", "error", "timeout", "lost")
    if result.status == "ok":
        assert await facts(sandbox, "print(x)") == 1


async def test_signal_to_everything(sandbox: LazySandbox) -> None:
    result = await python(sandbox, "import os, signal; os.kill(-1, signal.SIGKILL)", timeout=5.0)
    assert result.status in ("ok", "error", "timeout", "lost")


# -- memory, disk, output ----------------------------------------------------------------------------------------------


async def test_memory_bomb(sandbox: LazySandbox, pool: SandboxPool) -> None:
    code = """
    hoard = []
    while True:
        hoard.append(bytearray(b"x" * (1 << 20)))
        if len(hoard) % 32 == 0:
            print(len(hoard), flush=True)
    """
    result = await python(sandbox, code)
    assert result.status in ("error", "lost")
    reached = [int(line) for line in result.output.split() if line.isdecimal()]
    assert max(reached, default=0) <= pool.config.memory_mb


async def test_memory_bomb_that_ignores_every_error(sandbox: LazySandbox) -> None:
    code = """
    hoard = []
    while True:
        try:
            hoard.append(bytearray(b"x" * (1 << 20)))
        except MemoryError:
            pass
    """
    result = await python(sandbox, code, timeout=3.0)
    assert result.status in ("error", "timeout", "lost")


async def test_memory_of_all_processes_together_is_limited(sandbox: LazySandbox, pool: SandboxPool) -> None:
    code = f"""
    import os, time
    pids = []
    for _ in range(8):
        pids.append(os.fork())
        if pids[-1] == 0:
            try:
                hoard = b"x" * ({pool.config.memory_mb // 4} << 20)
                time.sleep(2)
                os._exit(0)
            finally:
                os._exit(1)
    print(sum(os.waitpid(pid, 0)[1] == 0 for pid in pids))
    """
    result = await python(sandbox, code)
    assert result.status == "lost" or int(result.output.split()[-1]) < 8


@pytest.mark.parametrize("folder", ["/work", "/tmp"])
async def test_disk_fill(sandbox: LazySandbox, pool: SandboxPool, folder: str) -> None:
    code = f"""
    import os
    written = 0
    try:
        while written < 1000:
            with open(f"{folder}/{{written}}", "wb") as file:
                file.write(b"x" * (1 << 20))
            written += 1
    except OSError as error:
        print((written, error.errno))
    for name in os.listdir("{folder}"):
        os.unlink("{folder}/" + name)
    """
    written, _ = await facts(sandbox, code)
    assert written <= pool.config.disk_mb


async def test_a_full_disk_is_an_answer(sandbox: LazySandbox) -> None:
    await bash(sandbox, "cat /dev/zero > /work/all 2>/dev/null")
    opened = await sandbox.get()
    with pytest.raises(ToolError, match=r"(?i)space|full|too large"):
        await opened.write_file("more.bin", b"x" * (1 << 20))
    assert (await bash(sandbox, "rm /work/all && echo freed")).output == "freed\n"


async def test_files_without_number(sandbox: LazySandbox) -> None:
    code = """
    import os
    made = 0
    try:
        while made < 300_000:
            os.mknod(f"/tmp/{made}")
            made += 1
    except OSError:
        pass
    print(made)
    """
    result = await python(sandbox, code)
    assert result.status in ("timeout", "lost") or int(result.output.split()[-1]) < 300_000


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_output_flood(sandbox: LazySandbox, pool: SandboxPool, stream: str) -> None:  # D6
    size = 100_000_000
    code = f"""
    import sys
    print("head", file=sys.{stream})
    for _ in range({size // 1_000_000}):
        _ = sys.{stream}.write("x" * 1_000_000)
    print("tail", file=sys.{stream})
    """
    result = await python(sandbox, code, timeout=120.0)
    assert result.status == "ok"
    assert result.truncated
    assert result.output_bytes >= size
    assert len(result.output) < pool.config.output_limit + 200
    assert result.output.startswith("head\n")
    assert result.output.rstrip().endswith("tail")


@pytest.mark.parametrize(("size", "truncated"), [(4095, False), (4096, False), (4097, True)])
async def test_output_at_the_limit(sandbox: LazySandbox, size: int, truncated: bool) -> None:  # D6
    result = await python(sandbox, f"import sys; _ = sys.stdout.write('x' * {size})")
    assert (result.truncated, result.output_bytes) == (truncated, size)
    assert (result.output == "x" * size) is not truncated


@pytest.mark.parametrize("language", ["python", "bash"])
async def test_binary_and_invalid_utf8_output(sandbox: LazySandbox, language: str) -> None:
    if language == "python":
        result = await python(sandbox, r"import os; _ = os.write(1, bytes(range(256)) + b'\xff\xfe\xc3(end)')")
    else:
        result = await bash(sandbox, r"printf '\000\001\377\376\303(end)'")
    assert result.status == "ok"
    assert "(end)" in result.output
    assert "\ufffd" in result.output
    result.output.encode()


async def test_ten_megabytes_of_arguments(sandbox: LazySandbox) -> None:
    size = 10_000_000
    assert await facts(sandbox, f"text = '{'y' * size}'\nprint(len(text))") == size
    result = await bash(sandbox, f": {'z' * size}\necho went on")
    assert result.status == "error" or result.output.endswith("went on\n")
    opened = await sandbox.get()
    await opened.write_file("large.bin", b"w" * size)
    assert len(await opened.read_file("large.bin", limit=2 * size)) == size


@pytest.mark.parametrize(
    "code", ["cat <<END\nno end", "echo 'no end", 'echo "no end', "echo $(", "if true; then", "\\"]
)
async def test_unterminated_code(sandbox: LazySandbox, code: str) -> None:
    await bash(sandbox, "y=5; cd /tmp")
    start = time.monotonic()
    result = await bash(sandbox, code, timeout=10.0)
    assert result.status in ("ok", "error")
    assert time.monotonic() - start < 10.0
    assert (await bash(sandbox, "echo $y; pwd; cd /work")).output == "5\n/tmp\n"


# -- the channel -------------------------------------------------------------------------------------------------------


async def test_forged_replies(sandbox: LazySandbox) -> None:
    """Frames on every descriptor the code can write to do not become replies, and the stream stays in step."""
    code = r"""
    import json, os, struct
    for number in range(64):
        header = json.dumps({"id": number, "status": "ok", "head": 6, "dropped": 0, "output_bytes": 6,
                             "state_lost": False, "exit_code": None, "seconds": 0.0, "reason": ""}).encode()
        frame = struct.pack(">II", len(header), 6) + header + b"forged"
        for descriptor in range(64):
            try:
                os.set_blocking(descriptor, False)
                os.write(descriptor, frame)
            except OSError:
                pass
    """
    result = await python(sandbox, code, timeout=5.0)
    assert result.output != "forged"
    await python(sandbox, "pass", timeout=5.0)  # whatever the code wrote to its own interpreter takes effect here
    opened = await sandbox.get()
    await opened.write_file("true.txt", b"true")
    assert await opened.read_file("true.txt", limit=10) == b"true"
    assert (await bash(sandbox, "echo true")).output.endswith("true\n")


async def test_the_channel_is_out_of_reach(sandbox: LazySandbox) -> None:
    code = """
    import os
    looks = {
        "fd": os.listdir,
        "fdinfo": os.listdir,
        "cwd": os.readlink,
        "root": os.readlink,
        "exe": os.readlink,
        **dict.fromkeys(("mem", "environ", "maps", "syscall", "stack"), lambda path: open(path, "rb").read(1)),
    }
    reached = []
    for name, look in looks.items():
        try:
            look(f"/proc/1/{name}")
            reached.append(name)
        except OSError:
            pass
    print(reached)
    """
    assert await facts(sandbox, code) == []


async def test_tracing_the_worker(sandbox: LazySandbox) -> None:
    code = """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    ATTACH, SEIZE = 16, 0x4206
    tries = [(request, pid) for request in (ATTACH, SEIZE) for pid in (1, os.getppid())]
    print([(request, pid) for request, pid in tries if libc.ptrace(request, pid, 0, 0) == 0])
    """
    assert await facts(sandbox, code) == []


# -- the host ----------------------------------------------------------------------------------------------------------


async def test_no_network(sandbox: LazySandbox) -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        code = f"""
        import socket
        reached = []
        for family, kind, address in [
            (socket.AF_INET, socket.SOCK_STREAM, ("1.1.1.1", 443)),
            (socket.AF_INET, socket.SOCK_DGRAM, ("8.8.8.8", 53)),
            (socket.AF_INET6, socket.SOCK_STREAM, ("2606:4700:4700::1111", 443)),
            (socket.AF_INET, socket.SOCK_STREAM, ("169.254.169.254", 80)),
            (socket.AF_INET, socket.SOCK_STREAM, ("172.17.0.1", {port})),
            (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", {port})),
        ]:
            try:
                with socket.socket(family, kind) as connection:
                    connection.settimeout(2)
                    connection.connect(address)
                    connection.send(b"x")
                    reached.append(address)
            except OSError:
                pass
        try:
            reached.append(socket.getaddrinfo("example.com", 80))
        except OSError:
            pass
        print(reached)
        """
        assert await facts(sandbox, code) == []


async def test_abstract_sockets_of_the_host(sandbox: LazySandbox) -> None:
    name = f"agentgym-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        code = f"import socket; socket.socket(socket.AF_UNIX).connect(chr(0) + '{name}')"
        result = await python(sandbox, code)
    assert result.status == "error"
    assert "ConnectionRefusedError" in result.output


async def test_raw_sockets(sandbox: LazySandbox) -> None:
    code = """
    import socket
    made = []
    for family, kind, protocol in [(socket.AF_INET, socket.SOCK_RAW, 1), (socket.AF_PACKET, socket.SOCK_RAW, 0x0300)]:
        try:
            socket.socket(family, kind, protocol).close()
            made.append(int(family))
        except OSError:
            pass
    print(made)
    """
    assert await facts(sandbox, code) == []


async def test_environment_and_secrets_of_the_host(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secret = secrets.token_hex(16)
    monkeypatch.setenv("AGENTGYM_TEST_SECRET", secret)
    (tmp_path / "secret").write_text(secret)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and len(folder.parts) > 2:
            folder.chmod(0o755)
    sandbox = LazySandbox(pool.config, pool)
    code = f"""
    import glob
    halves = ({secret[:16]!r}, {secret[16:]!r})
    found = []
    for path in ["{tmp_path}/secret", *glob.glob("/proc/*/environ"), *glob.glob("/proc/*/cmdline"), "/etc/shadow",
                 "/etc/machine-id", "/root/.bashrc", "/var/run/docker.sock", "/proc/kcore", "/dev/mem", "/dev/kmsg"]:
        try:
            with open(path, "rb") as file:
                text = file.read(1 << 20)
        except OSError:
            continue
        if "".join(halves).encode() in text or not path.startswith("/proc"):
            found.append(path)
    print(found)
    """
    try:
        assert await facts(sandbox, code) == []
    finally:
        await sandbox.close()


async def test_writing_outside_work_and_tmp(sandbox: LazySandbox) -> None:
    code = """
    import os
    written = []
    for folder, folders, _ in os.walk("/"):
        if folder.count("/") > 2 or folder in ("/work", "/tmp", "/proc"):
            folders[:] = []
            if folder != "/proc":
                continue
        if folder == "/":
            folders[:] = [name for name in folders if name not in ("work", "tmp")]
        try:
            with open(folder + "/written", "w") as file:
                file.write("x")
            written.append(folder)
        except OSError:
            pass
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/fs/cgroup/cgroup.procs", "/etc/passwd",
                 "/proc/1/oom_score_adj"):
        try:
            with open(path, "w") as file:
                file.write("0")
            written.append(path)
        except OSError:
            pass
    print(written)
    """
    assert await facts(sandbox, code) == []


async def test_privileges(sandbox: LazySandbox) -> None:
    code = """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    def works(attempt):
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(0 if attempt() else 1)
            except BaseException:
                os._exit(1)
        return os.waitpid(pid, 0)[1] == 0
    attempts = {
        "setuid": lambda: os.setuid(0) is None,
        "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0,
        "mount in own namespaces": lambda: libc.unshare(0x10020000) == 0
            and libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0,
        "umount": lambda: libc.umount2(b"/work", 2) == 0,
        "mknod": lambda: os.mknod("/tmp/memory", 0o20666, os.makedev(1, 1)) is None,
        "chroot": lambda: os.chroot("/tmp") is None,
        "reboot": lambda: libc.reboot(0x1234567) == 0,
        "module": lambda: libc.syscall(175, 0, 0, b"") == 0,
    }
    print((os.getuid(), int(status["CapEff"], 16), int(status["CapPrm"], 16), int(status["NoNewPrivs"]),
           [name for name, attempt in attempts.items() if works(attempt)]))
    """
    uid, effective, permitted, no_new, possible = await facts(sandbox, code)
    assert (uid != 0, effective, permitted, no_new, possible) == (True, 0, 0, 1, [])


# -- other sessions ----------------------------------------------------------------------------------------------------


async def test_processes_and_files_of_another_session(sandbox: LazySandbox, pool: SandboxPool) -> None:
    mark = secrets.token_hex(8)
    other = LazySandbox(pool.config, pool)
    try:
        await bash(other, f"MARK={mark} sleep 100 >/dev/null 2>&1 & echo {mark} > /tmp/mark; echo {mark} > /work/mark")
        code = f"""
        import os
        mark = {mark[:8]!r} + {mark[8:]!r}
        found = [path for path in ("/tmp/mark", "/work/mark") if os.path.exists(path)]
        for pid in [entry for entry in os.listdir("/proc") if entry.isdecimal()]:
            for what in ("environ", "cmdline"):
                try:
                    if mark in open(f"/proc/{{pid}}/{{what}}", errors="replace").read():
                        found.append((pid, what))
                except OSError:
                    pass
        print(found)
        """
        assert await facts(sandbox, code) == []
        assert (await bash(other, "cat /work/mark")).output.strip() == mark
    finally:
        await other.close()


async def test_shared_memory_of_another_session(sandbox: LazySandbox, pool: SandboxPool) -> None:
    """System V segments have keys: the same key in two sessions is not the same memory, if there is any."""
    write = """
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    segment = libc.shmget(4711, 4096, 0o1666)
    if segment >= 0:
        ctypes.memmove(libc.shmat(segment, None, 0), b"mark", 4)
    """
    read = """
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    print(libc.shmget(4711, 4096, 0o666))
    """
    other = LazySandbox(pool.config, pool)
    try:
        await python(other, write)
        assert await facts(sandbox, read) == -1
    finally:
        await other.close()


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["../etc/passwd", "/etc/passwd", "/proc/self/environ", "a/../../etc/passwd", "", "\0"])
async def test_paths_outside_work(sandbox: LazySandbox, path: str) -> None:
    opened = await sandbox.get()
    with pytest.raises(ToolError):
        await opened.read_file(path, limit=100)
    with pytest.raises(ToolError):
        await opened.write_file(path, b"x")


async def test_links_that_lead_outside(sandbox: LazySandbox) -> None:
    links = "ln -s /etc/passwd secret; ln -s /etc etc; ln -s / root; ln -s /tmp/new new; ln -s loop loop"
    await bash(sandbox, f"{links}; mkfifo pipe")
    opened = await sandbox.get()
    for path in ("secret", "etc/passwd", "root/etc/passwd", "pipe", "loop"):
        with pytest.raises(ToolError):
            await opened.read_file(path, limit=100)
    for path in ("secret", "etc/new", "root/tmp/new", "new"):
        with pytest.raises(ToolError):
            await opened.write_file(path, b"x")
    with pytest.raises(ToolError):
        await opened.list_files("etc")
    assert {entry.name: entry.kind for entry in await opened.list_files()}["secret"] == "link"


async def test_a_link_that_changes_while_files_are_read(sandbox: LazySandbox) -> None:
    code = """
    import os, threading
    os.mkdir("real")
    open("real/passwd", "w").write("harmless")
    stop = False
    def swap():
        while not stop:
            for target in ("/etc", "real"):
                os.symlink(target, "next")
                os.rename("next", "swapped")
    threading.Thread(target=swap, daemon=True).start()
    """
    await python(sandbox, code)
    opened = await sandbox.get()
    for _ in range(300):
        try:
            data = await opened.read_file("swapped/passwd", limit=1000)
        except ToolError:
            continue
        assert data == b"harmless"
    await python(sandbox, "stop = True")

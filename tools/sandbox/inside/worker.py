"""The process inside a sandbox that runs the session's code. Standard library only, any Python from 3.8 on.

The files of this folder are sent to the sandbox as one text (see `agentgym.tools.sandbox.client.worker_source`).

Frames go over the descriptor pair that was stdin and stdout at the start: two 4-byte lengths, a JSON header, a payload.
That pair is private: this process makes itself undumpable, so that nobody of the same uid can trace it or look into
/proc/PID/fd, and no child inherits a descriptor of it. What interpreters say to the worker is as untrusted as their
output: all that code can forge is the end of its own call.

One thread, one poll loop. It answers file requests while code runs; runs come one at a time.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import struct
import sys
import time

from agentgym.tools.sandbox.inside.files import list_files, read_file, write_file
from agentgym.tools.sandbox.inside.interpreters import BashInterpreter, Interpreter, Program, PythonInterpreter
from agentgym.tools.sandbox.inside.system import (
    CHUNK,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    Capture,
    Refused,
    Settings,
    birth_of,
    clean_environment,
    describe_end,
    environment_of,
    freeze,
    inodes,
    kill,
    parent_of,
    prctl,
    private_memory,
    proportional_memory,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from agentgym.tools.sandbox.inside.files import Answer

FRAME = struct.Struct(">II")
INTERRUPT_GRACE = 0.4
"""Seconds that interrupted code gets to end, before its interpreter is killed."""
MEMORY_PERIOD = 0.1
"""Seconds between two looks at the memory while code runs."""
IDLE_PERIOD = 1.0
MAX_INODES = 200000
"""Files in memory; each costs the host a kilobyte that no limit of theirs counts."""


class Run:
    """The call that runs now."""

    def __init__(self, number: int, interpreter: Interpreter, timeout: float, capture: Capture) -> None:
        self.number = number
        self.interpreter = interpreter
        self.capture = capture
        self.started = time.monotonic()
        self.deadline = self.started + timeout
        self.stage = 0  # of `Worker.stop`
        self.timed_out = False
        self.cancelled = False


class Worker:
    def __init__(self, channel_in: int, channel_out: int, settings: Settings) -> None:
        self.channel_in = channel_in
        self.channel_out = channel_out
        self.settings = settings
        self.memory = settings.memory or 0
        self.watches = settings.memory is not None and os.getpid() == 1
        self.interpreters: dict[str, Interpreter] = {}
        self.run: Run | None = None
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.reason = ""
        self.next_look = 0.0
        self.ended: dict[int, int] = {}  # pid -> wait status
        self.mourned: dict[str, str] = {}  # language -> why its interpreter ended between two calls
        self.poller = select.poll()
        self.watched: dict[int, int] = {}

    # -- processes -----------------------------------------------------------------------------------------------

    def others(self) -> list[int]:
        """Pids of the session's processes apart from this one and the interpreters, parents first."""
        known = {interpreter.pid for interpreter in self.interpreters.values()}
        return sorted((pid for pid in self.members() if pid not in known), key=birth_of)

    def members(self) -> list[int]:
        """Pids of all processes of this sandbox but this one; in a pid namespace of its own simply all there are."""
        mine = os.getpid()
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        if mine == 1:
            return [pid for pid in pids if pid != 1]
        parents = {}
        for pid in pids:
            found = parent_of(pid)
            if found is not None:
                parents[pid] = found
        mark = ("AGENTGYM_SANDBOX=%s" % self.settings.marker).encode()
        family = {mine}
        grown = True
        while grown:
            new = {pid for pid, parent in parents.items() if parent in family and pid not in family}
            family |= new
            grown = bool(new)
        if self.settings.marker:
            family |= {pid for pid in parents if pid not in family and mark in environment_of(pid)}
        return [pid for pid in family if pid != mine]

    def kill_others(self) -> None:
        """Kill everything but the interpreters; those too if the rest multiplies faster than it dies."""
        for _ in range(50):
            # Parents first, or a shell goes on with its next command when the one it waits for is gone.
            pids = self.others()
            for pid in pids:
                freeze(pid)
            alive = [pid for pid in pids if kill(pid)]
            self.reap()
            if not alive:
                return
            time.sleep(0.002)
        self.kill_all()

    def kill_all(self) -> None:
        if os.getpid() == 1:
            try:
                os.kill(-1, signal.SIGKILL)
            except OSError:
                pass
        for _ in range(50):
            alive = [pid for pid in self.members() if kill(pid)]
            self.reap()
            if not alive:
                return
            time.sleep(0.002)

    def reap(self) -> None:
        pids = {interpreter.pid for interpreter in self.interpreters.values()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in pids:
                self.ended[pid] = status

    # -- the loop ------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        wakeup, alarm = os.pipe()
        for descriptor in (wakeup, alarm, self.channel_in, self.channel_out):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            self.watch(wakeup)
            ready = dict(self.poller.poll(self.patience()))
            if wakeup in ready:
                os.read(wakeup, 4096)
                self.reap()
            if self.channel_in in ready and not self.read_channel():
                self.kill_all()
                return
            for interpreter in list(self.interpreters.values()):
                if ready.keys() & {interpreter.output, interpreter.control.fileno()}:
                    self.attend(interpreter)
            self.look_after()
            self.write_channel()

    def watch(self, wakeup: int) -> None:
        wanted = {wakeup: select.POLLIN, self.channel_in: select.POLLIN}
        if self.outbox:
            wanted[self.channel_out] = wanted.get(self.channel_out, 0) | select.POLLOUT
        for interpreter in self.interpreters.values():
            wanted[interpreter.output] = select.POLLIN
            wanted[interpreter.control.fileno()] = select.POLLIN | (select.POLLOUT if interpreter.outbox else 0)
        if wanted != self.watched:
            for descriptor in self.watched.keys() - wanted.keys():
                self.poller.unregister(descriptor)
            for descriptor, events in wanted.items():
                if self.watched.get(descriptor) != events:
                    self.poller.register(descriptor, events)
            self.watched = wanted

    def patience(self) -> int | None:
        """Milliseconds until something is due without anything happening."""
        now = time.monotonic()
        waits = []
        if self.run is not None:
            waits.append(self.run.deadline - now)
        if self.watches and self.interpreters:
            waits.append(self.next_look - now)
        return max(0, int(min(*waits, 3600.0) * 1000) + 1) if waits else None

    def attend(self, interpreter: Interpreter) -> None:
        run = self.run if self.run is not None and self.run.interpreter is interpreter else None
        interpreter.send()
        interpreter.drain(run.capture if run is not None else interpreter.late)
        interpreter.receive()

    def look_after(self) -> None:
        now = time.monotonic()
        if self.watches and self.interpreters and now >= self.next_look:
            self.next_look = now + (MEMORY_PERIOD if self.run is not None else IDLE_PERIOD)
            self.check_memory()
        run = self.run
        if run is not None:
            reply = run.interpreter.reply()
            if reply is not None:
                self.finish(run, *reply)
            elif run.interpreter.pid not in self.ended and now >= run.deadline:
                self.stop(run, now)
        for interpreter in list(self.interpreters.values()):
            if interpreter.pid in self.ended:
                self.bury(interpreter)

    def stop(self, run: Run, now: float) -> None:
        """The time is over: an interrupt; then, for what waits for a program that ignores those, the death of all
        others and another interrupt; then the death of the interpreter."""
        run.stage += 1
        if run.stage == 1:
            run.timed_out = not run.cancelled
            run.deadline = now + INTERRUPT_GRACE
        elif run.stage == 2:
            self.kill_others()
            run.deadline = time.monotonic() + INTERRUPT_GRACE / 2
        else:
            run.deadline = float("inf")
            kill(run.interpreter.pid)
            return
        try:
            run.interpreter.interrupt(self.others())
        except ProcessLookupError:
            pass

    def finish(self, run: Run, ok: bool, exit_code: int | None) -> None:
        if run.stage:
            self.kill_others()
        while run.interpreter.drain(run.capture):
            if time.monotonic() > run.deadline:
                break  # background processes may write for ever
        status = "timeout" if run.timed_out else "ok" if ok else "error"
        self.answer(run, status, exit_code, state_lost=False)

    def bury(self, interpreter: Interpreter) -> None:
        """An interpreter ended."""
        status = self.ended.pop(interpreter.pid)
        del self.interpreters[interpreter.language]
        run = self.run if self.run is not None and self.run.interpreter is interpreter else None
        if run is not None:
            if run.stage or interpreter.language == "program":
                self.kill_others()
            while interpreter.drain(run.capture):
                if time.monotonic() > run.deadline:
                    break
            code = None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            if interpreter.language == "program":
                self.answer(run, "timeout" if run.timed_out else "ok" if code == 0 else "error", code, False)
            else:
                reason = self.reason or ("" if run.timed_out else describe_end(interpreter.language, status))
                self.answer(run, "timeout" if run.timed_out else "lost", code, True, reason)
        else:
            reason = self.reason or describe_end(interpreter.language, status)
            self.mourned[interpreter.language] = "before this call: %s" % reason
            self.reason = ""
        interpreter.close()

    def answer(self, run: Run, status: str, exit_code: int | None, state_lost: bool, reason: str = "") -> None:
        before = self.mourned.pop(run.interpreter.language, "")
        head, tail, dropped = run.capture.parts()
        header = {
            "id": run.number,
            "status": status,
            "exit_code": exit_code,
            "state_lost": state_lost or bool(before),
            "reason": reason or self.reason or before,
            "output_bytes": run.capture.total,
            "head": len(head),
            "dropped": dropped,
            "seconds": time.monotonic() - run.started,
        }
        self.reason = ""
        self.run = None
        self.send(header, head + tail)

    # -- memory --------------------------------------------------------------------------------------------------

    def check_memory(self) -> None:
        """Kill the largest process if all together hold more than the limit."""
        sizes = {pid: private_memory(pid) for pid in self.members()}
        limit = self.memory << 20
        if sum(inodes(folder) for folder in (self.settings.work, "/tmp")) > MAX_INODES:
            os._exit(1)  # as the init process, with everything: what they hold can only be freed with the mounts
        if sum(sizes.values()) <= limit:
            return
        exact = {pid: proportional_memory(pid, size) for pid, size in sizes.items()}  # pages that forks share, once
        if sum(exact.values()) <= limit:
            return
        kill(max(exact, key=exact.__getitem__))
        self.reason = "memory limit of %d MiB" % self.memory
        self.next_look = time.monotonic() + 0.02

    # -- frames --------------------------------------------------------------------------------------------------

    def read_channel(self) -> bool:
        """False at the end of the stream."""
        for _ in range(64):
            try:
                data = os.read(self.channel_in, CHUNK)
            except BlockingIOError:
                break
            except OSError:
                return False
            if not data:
                return False
            self.inbox += data
            if len(data) < CHUNK:
                break
        while len(self.inbox) >= FRAME.size:
            header_size, payload_size = FRAME.unpack_from(self.inbox)
            end = FRAME.size + header_size + payload_size
            if len(self.inbox) < end:
                break
            header = json.loads(bytes(self.inbox[FRAME.size : FRAME.size + header_size]))
            payload = bytes(self.inbox[FRAME.size + header_size : end])
            del self.inbox[:end]
            self.handle(header, payload)
        return True

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        data = json.dumps(header).encode()
        self.outbox += FRAME.pack(len(data), len(payload)) + data + payload

    def write_channel(self) -> None:
        while self.outbox:
            try:
                count = os.write(self.channel_out, memoryview(self.outbox)[:CHUNK])
            except BlockingIOError:
                return
            except OSError:
                self.kill_all()
                os._exit(0)
            del self.outbox[:count]

    def handle(self, header: dict[str, Any], payload: bytes) -> None:
        try:
            op = header["op"]
            if op == "run":
                self.start_run(header, payload)
            elif op == "program":
                self.start_program(header, payload)
            elif op == "cancel":
                self.cancel(header)
            else:
                answer, data = FILE_REQUESTS[op](self.settings.work, header, payload)
                answer["id"] = header["id"]
                self.send(answer, data)
        except OSError as error:
            self.send({"id": header["id"], "error": "%s" % (error.strerror or error), "errno": error.errno})
        except Refused as error:
            self.send({"id": header["id"], "error": str(error)})

    def start_run(self, header: dict[str, Any], code: bytes) -> None:
        language = header["language"]
        if self.run is not None:
            raise Refused("another call is running")
        if language == "bash" and b"\0" in code:
            raise Refused("bash code must not contain NUL characters")
        self.reap()
        for dead in [it for it in self.interpreters.values() if it.pid in self.ended]:
            self.bury(dead)
        interpreter = self.interpreters.get(language)
        if interpreter is None:
            interpreter = self.start(lambda: INTERPRETERS[language](self.settings))
        capture = interpreter.late
        interpreter.late = Capture(self.settings.output_limit)
        self.begin(Run(header["id"], interpreter, header["timeout"], capture), interpreter.request(code))

    def start_program(self, header: dict[str, Any], stdin: bytes) -> None:
        if self.run is not None:
            raise Refused("another call is running")
        self.kill_all()
        for interpreter in self.interpreters.values():
            interpreter.close()
        self.interpreters.clear()
        self.ended.clear()
        self.mourned = dict.fromkeys(INTERPRETERS, "a trusted program was run")
        self.reason = ""
        program = self.start(lambda: Program(self.settings, header["argv"]))
        self.begin(Run(header["id"], program, header["timeout"], Capture(self.settings.output_limit)), stdin)

    def start(self, make: Callable[[], Interpreter]) -> Interpreter:
        """A new interpreter; if the session's own processes leave no room for it, without them."""
        try:
            interpreter = make()
        except BlockingIOError:
            self.kill_others()
            interpreter = make()
        self.interpreters[interpreter.language] = interpreter
        return interpreter

    def begin(self, run: Run, data: bytes) -> None:
        self.run = run
        self.next_look = run.started + MEMORY_PERIOD
        run.interpreter.inbox = b""
        run.interpreter.outbox += data
        run.interpreter.send()

    def cancel(self, header: dict[str, Any]) -> None:
        run = self.run
        if run is not None and run.number == header["run"] and not run.stage:
            run.cancelled = True
            run.deadline = 0.0


def compiled(work: str, header: dict[str, Any], payload: bytes) -> Answer:
    """This file as this interpreter's code, which starts the next worker faster."""
    import marshal

    return {}, marshal.dumps(compile(payload, __file__, "exec"))


FILE_REQUESTS = {"write": write_file, "read": read_file, "list": list_files, "compiled": compiled}
INTERPRETERS = {"python": PythonInterpreter, "bash": BashInterpreter}


def main(descriptor_in: int, descriptor_out: int) -> None:
    """Serve requests until the stream ends. ``descriptor_*``: the channel, which becomes private."""
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel_in = os.dup(descriptor_in)
    channel_out = os.dup(descriptor_out)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    size = read_exactly(channel_in, FRAME.size)
    header_size, payload_size = FRAME.unpack(size)
    settings = Settings(json.loads(read_exactly(channel_in, header_size + payload_size)))
    os.chdir(settings.work)
    os.umask(0o022)
    os.environ.update(clean_environment(settings.work))
    worker = Worker(channel_in, channel_out, settings)
    worker.send({"id": 0, "pid": os.getpid(), "python": "%d.%d.%d" % sys.version_info[:3]})
    worker.write_channel()
    gc.freeze()
    worker.serve()


def read_exactly(descriptor: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(descriptor, count - len(data))
        if not part:
            os._exit(0)
        data += part
    return data

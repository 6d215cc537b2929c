"""The process inside a sandbox that runs the session's code. Standard library only, any Python from 3.8 on.

It is sent to the sandbox as text and started by `BOOT` of `agentgym.tools.sandbox.client`; it is never imported there.

Frames go over the descriptor pair that was stdin and stdout at the start: two 4-byte lengths, a JSON header, a payload.
That pair is private: this process makes itself undumpable, so that nobody of the same uid can trace it or look into
/proc/PID/fd, and no child inherits a descriptor of it. What interpreters say to the worker is as untrusted as their
output: all that code can forge is the end of its own call.

One thread, one poll loop. It answers file requests while code runs; runs come one at a time.
"""

import ctypes
import errno
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time

FRAME = struct.Struct(">II")
CHUNK = 1 << 18
INTERRUPT_GRACE = 0.4  # seconds that interrupted code gets to end, before its interpreter is killed
MEMORY_PERIOD = 0.1  # seconds between two looks at the memory while code runs
IDLE_PERIOD = 1.0
INLINE_BASH = 2048  # bytes of bash code that fit into a line of a pipe, however many of them are escaped
MAX_ENTRIES = 10000
MAX_INODES = 200000  # files in memory; each costs the host a kilobyte that no limit of theirs counts
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36

libc = ctypes.CDLL(None, use_errno=True)


def prctl(option, value):
    libc.prctl(option, value, 0, 0, 0)


class Capture:
    """Output of one call: everything up to the limit, else its head and its tail."""

    def __init__(self, limit):
        self.head_limit = limit // 2
        self.tail_limit = limit - self.head_limit
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def add(self, data):
        self.total += len(data)
        room = self.head_limit - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > 4 * self.tail_limit + CHUNK:
            del self.tail[: -self.tail_limit]

    def parts(self):
        """Head, tail, and how many bytes between them are gone."""
        del self.tail[: max(0, len(self.tail) - self.tail_limit)]
        return bytes(self.head), bytes(self.tail), self.total - len(self.head) - len(self.tail)


class Interpreter:
    """A child process that keeps the state of one language.

    Attributes:
        pid: of the child, which leads a session and process group of its own.
        control: socket to it; ``output``: read end of its stdout and stderr.
    """

    language = ""

    def __init__(self, worker):
        self.worker = worker
        self.inbox = b""
        self.outbox = b""
        self.late = Capture(worker.output_limit)  # of background processes, between two calls
        self.control, theirs = socket.socketpair()
        self.output, output = os.pipe()
        try:
            self.pid = worker.fork()
        except OSError:
            for descriptor in (self.output, output):
                os.close(descriptor)
            self.control.close()
            theirs.close()
            raise
        if self.pid == 0:
            try:
                self.become(theirs.fileno(), output)
            finally:
                os._exit(127)
        theirs.close()
        os.close(output)
        os.set_blocking(self.output, False)
        self.control.setblocking(False)

    def become(self, control, output):
        raise NotImplementedError

    def request(self, code):
        """The bytes that make the child run ``code``."""
        raise NotImplementedError

    def reply(self):
        """(ok, exit code) if the child has said that the call is over, else None."""
        raise NotImplementedError

    def interrupt(self):
        """Ask the code to stop; the interpreter survives."""
        raise NotImplementedError

    def drain(self, capture):
        """Read what was written, at most so much that others get their turn; True if there may be more."""
        for _ in range(16):
            try:
                data = os.read(self.output, CHUNK)
            except BlockingIOError:
                return False
            if not data:
                return False
            capture.add(data)
            if len(data) < 4096:
                return False
        return True

    def send(self):
        """Write as much of the outbox as the child takes."""
        while self.outbox:
            try:
                count = self.control.send(self.outbox[:CHUNK])
            except BlockingIOError:
                return
            except OSError:
                self.outbox = b""
                return
            self.outbox = self.outbox[count:]

    def receive(self):
        try:
            data = self.control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.inbox = (self.inbox + data)[-4096:]

    def close(self):
        self.control.close()
        os.close(self.output)


class PythonInterpreter(Interpreter):
    language = "python"

    def become(self, control, output):
        keep = os.dup(control), os.dup(output)
        self.worker.forget(keep)
        os.dup2(keep[1], 1)
        os.dup2(keep[1], 2)
        os.close(keep[1])
        serve_python(socket.socket(fileno=keep[0]))

    def request(self, code):
        return struct.pack(">I", len(code)) + code

    def reply(self):
        if not self.inbox:
            return None
        kind, self.inbox = self.inbox[-1:], b""
        return kind == b"k", None

    def interrupt(self):
        os.kill(self.pid, signal.SIGINT)


class BashInterpreter(Interpreter):
    """An interactive bash without a terminal: an interrupt takes it back to reading its next line, as Ctrl-C does.

    A line on its stdin says what to run and to tell the exit code. Long code follows on the control socket, since bash
    reads its lines ahead. Code is evaluated, so that open quotes and here-documents end with it; it sees neither
    descriptor.
    """

    language = "bash"
    CONTROL = 8

    def __init__(self, worker):
        self.number = 0
        self.script, self.lines = os.pipe()
        try:
            super().__init__(worker)
        finally:
            os.close(self.script)
        os.set_blocking(self.lines, False)
        self.write_line(b"exec 2>&1; PS1= PS2=; HISTFILE=; set +o history; set +H; set +m; shopt -u checkwinsize")

    def become(self, control, output):
        keep = os.dup(control), os.dup(output), os.dup(self.script)
        self.worker.forget(keep)
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 32) for descriptor in keep]
        os.closerange(3, 32)
        os.dup2(high[0], self.CONTROL)
        os.dup2(high[1], 1)
        os.dup2(high[2], 0)  # stderr stays /dev/null while bash complains about the missing terminal
        os.closerange(32, 64)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execv(self.worker.bash, ["bash", "--noprofile", "--norc", "--noediting", "-i"])

    def request(self, code):
        self.number += 1
        if len(code) <= INLINE_BASH:
            word = b"".join(b"\\x%02x" % byte if byte < 32 or byte in b"'\\" else b"%c" % byte for byte in code)
            line, body = b"eval -- $'%s'" % word, b""
        else:
            line, body = b'__code=$(command -p head -c %d <&8); eval -- "$__code"' % len(code), code
        self.write_line(line + b" </dev/null 8>&-; builtin printf '%d:%%d\\n' \"$?\" >&8" % self.number)
        return body

    def reply(self):
        *lines, self.inbox = self.inbox.split(b"\n")
        for line in reversed(lines):
            number, _, status = line.partition(b":")
            if number == b"%d" % self.number and status.isdigit():
                return status == b"0", int(status)
        return None

    def interrupt(self):
        os.killpg(self.pid, signal.SIGINT)
        self.write_line(b"builtin printf '%d:130\\n' >&8" % self.number)

    def write_line(self, line):
        try:
            os.write(self.lines, line + b"\n")
        except OSError:
            pass  # it ended, or reads no more and is killed soon

    def close(self):
        super().close()
        os.close(self.lines)


class Program(Interpreter):
    """One program, started for one call and then gone."""

    language = "program"

    def __init__(self, worker, argv):
        self.argv = argv
        super().__init__(worker)

    def become(self, control, output):
        keep = os.dup(control), os.dup(output)
        self.worker.forget(keep)
        os.dup2(keep[0], 0)
        os.dup2(keep[1], 1)
        os.dup2(keep[1], 2)
        os.closerange(3, 64)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.chdir(self.worker.work)
        try:
            os.execvpe(self.argv[0], self.argv, clean_environment(self.worker.work))
        except OSError as error:
            os.write(2, ("%s: %s\n" % (self.argv[0], error.strerror)).encode())

    def request(self, code):
        return code

    def send(self):
        super().send()
        if not self.outbox:
            try:
                self.control.shutdown(socket.SHUT_WR)
            except OSError:
                pass

    def reply(self):
        return None  # it ends when it ends

    def interrupt(self):
        os.killpg(self.pid, signal.SIGKILL)


class Run:
    """The call that runs now."""

    def __init__(self, number, interpreter, timeout, capture):
        self.number = number
        self.interpreter = interpreter
        self.capture = capture
        self.started = time.monotonic()
        self.deadline = self.started + timeout
        self.stage = 0  # of `Worker.stop`
        self.timed_out = False
        self.cancelled = False


class Worker:
    def __init__(self, channel_in, channel_out, settings):
        self.channel_in = channel_in
        self.channel_out = channel_out
        self.work = settings["work"]
        self.memory = settings.get("memory_mb")
        self.watches = self.memory is not None and os.getpid() == 1
        self.pids = settings.get("pids")
        self.file_mb = settings.get("file_mb")
        self.output_limit = settings["output_limit"]
        self.marker = settings.get("marker", "")
        self.bash = settings.get("bash") or find_bash()
        self.interpreters = {}
        self.run = None
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.reason = ""
        self.next_look = 0.0
        self.ended = {}  # pid -> wait status
        self.mourned = {}  # language -> why its interpreter ended between two calls
        self.poller = select.poll()
        self.watched = {}

    # -- processes -----------------------------------------------------------------------------------------------

    def fork(self):
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                self.limit()
            except BaseException:
                os._exit(126)
        return pid

    def limit(self):
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

    def forget(self, keep):
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

    def others(self):
        """Pids of the session's processes, apart from this one and the interpreters."""
        known = {interpreter.pid for interpreter in self.interpreters.values()}
        return [pid for pid in self.members() if pid not in known]

    def members(self):
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
        mark = ("AGENTGYM_SANDBOX=%s" % self.marker).encode()
        family = {mine}
        grown = True
        while grown:
            new = {pid for pid, parent in parents.items() if parent in family and pid not in family}
            family |= new
            grown = bool(new)
        if self.marker:
            family |= {pid for pid in parents if pid not in family and mark in environment_of(pid)}
        return [pid for pid in family if pid != mine]

    def kill_others(self):
        """Kill everything but the interpreters; those too if the rest multiplies faster than it dies."""
        for _ in range(50):
            pids = self.others()
            for pid in pids:
                freeze(pid)  # or a shell goes on with its next command when the one it waits for is killed
            alive = [pid for pid in pids if kill(pid)]
            self.reap()
            if not alive:
                return
            time.sleep(0.002)
        self.kill_all()

    def kill_all(self):
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

    def reap(self):
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

    def serve(self):
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

    def watch(self, wakeup):
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

    def patience(self):
        """Milliseconds until something is due without anything happening."""
        now = time.monotonic()
        waits = []
        if self.run is not None:
            waits.append(self.run.deadline - now)
        if self.watches and self.interpreters:
            waits.append(self.next_look - now)
        return max(0, int(min(*waits, 3600.0) * 1000) + 1) if waits else None

    def attend(self, interpreter):
        run = self.run if self.run is not None and self.run.interpreter is interpreter else None
        interpreter.send()
        interpreter.drain(run.capture if run is not None else interpreter.late)
        interpreter.receive()

    def look_after(self):
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

    def stop(self, run, now):
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
            run.interpreter.interrupt()
        except ProcessLookupError:
            pass

    def finish(self, run, ok, exit_code):
        if run.stage:
            self.kill_others()
        while run.interpreter.drain(run.capture):
            if time.monotonic() > run.deadline:
                break  # background processes may write for ever
        status = "timeout" if run.timed_out else "ok" if ok else "error"
        self.answer(run, status, exit_code, state_lost=False)

    def bury(self, interpreter):
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

    def answer(self, run, status, exit_code, state_lost, reason=""):
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

    def check_memory(self):
        """Kill the largest process if all together hold more than the limit."""
        sizes = {pid: private_memory(pid) for pid in self.members()}
        limit = self.memory << 20
        if sum(inodes(folder) for folder in (self.work, "/tmp")) > MAX_INODES:
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

    def read_channel(self):
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

    def send(self, header, payload=b""):
        data = json.dumps(header).encode()
        self.outbox += FRAME.pack(len(data), len(payload)) + data + payload

    def write_channel(self):
        while self.outbox:
            try:
                count = os.write(self.channel_out, memoryview(self.outbox)[:CHUNK])
            except BlockingIOError:
                return
            except OSError:
                self.kill_all()
                os._exit(0)
            del self.outbox[:count]

    def handle(self, header, payload):
        try:
            op = header["op"]
            if op == "run":
                self.start_run(header, payload)
            elif op == "program":
                self.start_program(header, payload)
            elif op == "cancel":
                self.cancel(header)
            else:
                answer, data = FILE_REQUESTS[op](self.work, header, payload)
                answer["id"] = header["id"]
                self.send(answer, data)
        except OSError as error:
            self.send({"id": header["id"], "error": "%s" % (error.strerror or error), "errno": error.errno})
        except Refused as error:
            self.send({"id": header["id"], "error": str(error)})

    def start_run(self, header, code):
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
            interpreter = self.start(lambda: INTERPRETERS[language](self))
        capture = interpreter.late
        interpreter.late = Capture(self.output_limit)
        self.begin(Run(header["id"], interpreter, header["timeout"], capture), interpreter.request(code))

    def start_program(self, header, stdin):
        if self.run is not None:
            raise Refused("another call is running")
        self.kill_all()
        for interpreter in self.interpreters.values():
            interpreter.close()
        self.interpreters.clear()
        self.ended.clear()
        self.mourned = dict.fromkeys(INTERPRETERS, "a trusted program was run")
        self.reason = ""
        program = self.start(lambda: Program(self, header["argv"]))
        self.begin(Run(header["id"], program, header["timeout"], Capture(self.output_limit)), stdin)

    def start(self, make):
        """A new interpreter; if the session's own processes leave no room for it, without them."""
        try:
            interpreter = make()
        except BlockingIOError:
            self.kill_others()
            interpreter = make()
        self.interpreters[interpreter.language] = interpreter
        return interpreter

    def begin(self, run, data):
        self.run = run
        self.next_look = run.started + MEMORY_PERIOD
        run.interpreter.inbox = b""
        run.interpreter.outbox += data
        run.interpreter.send()

    def cancel(self, header):
        run = self.run
        if run is not None and run.number == header["run"] and not run.stage:
            run.cancelled = True
            run.deadline = 0.0


class Refused(Exception):
    """A request that cannot be served; its text goes to the caller."""


def set_limit(kind, value):
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def freeze(pid):
    try:
        os.kill(pid, signal.SIGSTOP)
    except OSError:
        pass


def kill(pid):
    """False if the process is gone, or dead and only not reaped by its parent."""
    try:
        os.kill(pid, signal.SIGKILL)
        with open("/proc/%d/stat" % pid, "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def parent_of(pid):
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return None


def environment_of(pid):
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def private_memory(pid):
    """Bytes that are neither files nor shared."""
    try:
        with open("/proc/%d/statm" % pid, "rb") as file:
            fields = file.read().split()
        return (int(fields[1]) - int(fields[2])) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def proportional_memory(pid, fallback):
    try:
        with open("/proc/%d/smaps_rollup" % pid, "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return fallback


def inodes(folder):
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_files - found.f_ffree


def describe_end(language, status):
    if os.WIFSIGNALED(status):
        return "the %s interpreter was killed by signal %d" % (language, os.WTERMSIG(status))
    return "the %s interpreter exited with code %d" % (language, os.WEXITSTATUS(status))


def find_bash():
    for path in ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash"):
        if os.path.exists(path):
            return path
    return "/bin/sh"


def clean_environment(work):
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": work,
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        **{name: os.environ[name] for name in ("AGENTGYM_SANDBOX",) if name in os.environ},
    }


# -- files -----------------------------------------------------------------------------------------------------------
# Every path is walked from the work folder on, one name at a time, never through a link: this process can open what
# the session's code cannot, such as its own /proc entries.


def names_of(work, path):
    if "\0" in path:
        raise Refused("a path must not contain NUL characters")
    if path.startswith("/"):
        if path != work and not path.startswith(work.rstrip("/") + "/"):
            raise Refused("%s is outside of %s" % (path, work))
        path = path[len(work) :]
    names = [name for name in path.split("/") if name not in ("", ".")]
    if ".." in names:
        raise Refused("a path must not contain '..'")
    return [os.fsencode(name) for name in names]


def open_folder(work, names, make=False):
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(work, flags & ~os.O_NOFOLLOW)
    for name in names:
        try:
            try:
                inner = os.open(name, flags, dir_fd=folder)
            except FileNotFoundError:
                if not make:
                    raise
                try:
                    os.mkdir(name, 0o755, dir_fd=folder)
                except FileExistsError:
                    pass
                inner = os.open(name, flags, dir_fd=folder)
        except OSError as error:
            shown = os.fsdecode(name)
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise Refused("%s is a link or not a folder" % shown) from None
            raise Refused("%s: %s" % (shown, error.strerror)) from None
        finally:
            os.close(folder)
        folder = inner
    return folder


def open_file(work, path, flags, make=False):
    names = names_of(work, path)
    if not names:
        raise Refused("%s is a folder" % (path or "."))
    folder = open_folder(work, names[:-1], make)
    try:
        descriptor = os.open(
            names[-1], flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o644, dir_fd=folder
        )
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Refused("%s is a link" % path) from None
        raise Refused("%s: %s" % (path, error.strerror)) from None
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Refused("%s is not a regular file" % path)
    return descriptor


def write_file(work, header, payload):
    descriptor = open_file(work, header["path"], os.O_WRONLY | os.O_CREAT, make=True)
    try:
        os.ftruncate(descriptor, 0)
        view = memoryview(payload)
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError as error:
        raise Refused("%s: %s" % (header["path"], error.strerror)) from None
    finally:
        os.close(descriptor)
    return {}, b""


def read_file(work, header, payload):
    descriptor = open_file(work, header["path"], os.O_RDONLY)
    try:
        data = bytearray()
        while len(data) < header["limit"]:
            part = os.read(descriptor, min(CHUNK, header["limit"] - len(data)))
            if not part:
                break
            data += part
        return {"size": os.fstat(descriptor).st_size}, bytes(data)
    finally:
        os.close(descriptor)


def list_files(work, header, payload):
    folder = open_folder(work, names_of(work, header["path"]))
    entries: list = []
    try:
        with os.scandir(folder) as found:
            for entry in found:
                if len(entries) == MAX_ENTRIES:
                    raise Refused("more than %d entries" % MAX_ENTRIES)
                try:
                    info = entry.stat(follow_symlinks=False)
                except OSError:
                    continue  # removed meanwhile
                mode = info.st_mode
                kind = "link" if stat.S_ISLNK(mode) else "folder" if stat.S_ISDIR(mode) else "other"
                entries.append([entry.name, "file" if stat.S_ISREG(mode) else kind, info.st_size])
    finally:
        os.close(folder)
    return {}, json.dumps(sorted(entries)).encode()


def compiled(work, header, payload):
    """This file as this interpreter's code, which starts the next worker faster."""
    import marshal

    return {}, marshal.dumps(compile(payload, __file__, "exec"))


FILE_REQUESTS = {"write": write_file, "read": read_file, "list": list_files, "compiled": compiled}
INTERPRETERS = {"python": PythonInterpreter, "bash": BashInterpreter}


# -- the python interpreter: a fork of the worker that serves one session's code -------------------------------------


def serve_python(control):
    import builtins
    import types

    me = os.getpid()
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]
    os.environ.clear()
    os.environ.update(clean_environment(WORK[0]))
    sys.path[:0] = [""]
    if sys.flags.no_site:
        import site

        site.main()  # packages of the image
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = open(descriptor, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, "__%s__" % name, stream)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    session = PythonSession(module.__dict__)
    module.__dict__["__builtins__"] = builtins
    gc.freeze()
    while True:
        size = receive_exactly(control, 4)
        if size is None:
            os._exit(0)
        code = receive_exactly(control, struct.unpack(">I", size)[0])
        if code is None:
            os._exit(0)
        try:
            ok = session.run(code)
        except BaseException:  # an interrupt that came while an earlier one was being reported
            ok = False
        if os.getpid() != me:
            os._exit(0)  # the code forked, and this is the child that fell through
        control.send(b"k" if ok else b"e")


def receive_exactly(control, count):
    data = bytearray()
    while len(data) < count:
        part = control.recv(min(CHUNK, count - len(data)))
        if not part:
            return None
        data += part
    return bytes(data)


class PythonSession:
    """Runs code as the interactive interpreter does: the value of a last expression is shown, errors are printed."""

    def __init__(self, namespace):
        self.namespace = namespace
        self.count = 0
        self.running = False

    def interrupted(self, number, frame):
        if self.running:
            raise KeyboardInterrupt

    def run(self, code):
        """True if the code ran without an error."""
        self.count += 1
        stdout, stderr = sys.__stdout__, sys.__stderr__
        ok = False
        try:
            signal.signal(signal.SIGINT, self.interrupted)
            self.running = True
            self.execute(code)
            ok = True
        except SystemExit as error:
            ok = error.code in (None, 0)
            if not ok:
                self.say("SystemExit: %s" % (error.code,))
        except BaseException as error:
            self.running = False
            self.report(error)
        finally:
            self.running = False
        for stream in (sys.stdout, sys.stderr, stdout, stderr):
            try:
                stream.flush()
            except BaseException:
                pass
        return ok

    def execute(self, code):
        import ast
        import linecache

        source = code.decode("utf-8", "surrogateescape")
        name = "<call %d>" % self.count
        tree = ast.parse(source, name)
        if len(source) < 1 << 20:
            linecache.cache[name] = (len(source), None, source.splitlines(True), name)
            linecache.cache.pop("<call %d>" % (self.count - 100), None)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Interactive([tree.body.pop()])
        if tree.body:
            exec(compile(tree, name, "exec"), self.namespace)
        if last is not None:
            exec(compile(last, name, "single"), self.namespace)

    def report(self, error):
        """Print the traceback without the frames of this file."""
        try:
            import traceback

            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_globals is globals():
                trace = trace.tb_next
            shown = traceback.TracebackException(type(error), error, trace)
            while shown.stack and shown.stack[-1].filename == __file__:
                shown.stack.pop()  # where the interrupt was raised
            self.say("".join(shown.format()).rstrip("\n"))
        except BaseException as second:
            self.say("%s (and its traceback could not be shown: %s)" % (type(error).__name__, type(second).__name__))

    def say(self, text):
        try:
            sys.stdout.flush()
            sys.__stderr__.write(text + "\n")
        except BaseException:
            pass


WORK = ["/work"]


def main(descriptor_in, descriptor_out):
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
    settings = json.loads(read_exactly(channel_in, header_size + payload_size))
    WORK[0] = settings["work"]
    os.chdir(settings["work"])
    os.umask(0o022)
    os.environ.update(clean_environment(settings["work"]))
    worker = Worker(channel_in, channel_out, settings)
    worker.send({"id": 0, "pid": os.getpid(), "python": "%d.%d.%d" % sys.version_info[:3]})
    worker.write_channel()
    gc.freeze()
    worker.serve()


def read_exactly(descriptor, count):
    data = b""
    while len(data) < count:
        part = os.read(descriptor, count - len(data))
        if not part:
            os._exit(0)
        data += part
    return data

"""The interpreters that keep a session's state, and programs that run once: children of the worker."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct

from agentgym.tools.sandbox.inside.python_session import serve_python
from agentgym.tools.sandbox.inside.system import (
    CHUNK,
    Capture,
    Settings,
    clean_environment,
    freeze,
    ignores,
    kill,
    parent_of,
    send,
)

INLINE_BASH = 2048
"""Bytes of bash code that fit into a line of a pipe, however many of them are escaped."""


class Interpreter:
    """A child process that keeps the state of one language.

    Attributes:
        pid: of the child, which leads a session and process group of its own.
        control: socket to it; ``output``: read end of its stdout and stderr.
    """

    language = ""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.inbox = b""
        self.outbox = b""
        self.late = Capture(settings.output_limit)  # of background processes, between two calls
        self.control, theirs = socket.socketpair()
        self.output, output = os.pipe()
        try:
            self.pid = settings.fork()
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

    def become(self, control: int, output: int) -> None:
        raise NotImplementedError

    def request(self, code: bytes) -> bytes:
        """The bytes that make the child run ``code``."""
        raise NotImplementedError

    def reply(self) -> tuple[bool, int | None] | None:
        """(ok, exit code) if the child has said that the call is over, else None."""
        raise NotImplementedError

    def interrupt(self, others: list[int]) -> None:
        """Ask the code to stop; the interpreter survives.

        ``others`` are the session's other processes, parents first.
        """
        raise NotImplementedError

    def drain(self, capture: Capture) -> bool:
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

    def send(self) -> None:
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

    def receive(self) -> None:
        try:
            data = self.control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.inbox = (self.inbox + data)[-4096:]

    def close(self) -> None:
        self.control.close()
        os.close(self.output)


class PythonInterpreter(Interpreter):
    language = "python"

    def become(self, control: int, output: int) -> None:
        keep = os.dup(control), os.dup(output)
        self.settings.forget(keep)
        os.dup2(keep[1], 1)
        os.dup2(keep[1], 2)
        os.close(keep[1])
        serve_python(socket.socket(fileno=keep[0]), self.settings.work)

    def request(self, code: bytes) -> bytes:
        return struct.pack(">I", len(code)) + code

    def reply(self) -> tuple[bool, int | None] | None:
        if not self.inbox:
            return None
        kind, self.inbox = self.inbox[-1:], b""
        return kind == b"k", None

    def interrupt(self, others: list[int]) -> None:
        os.kill(self.pid, signal.SIGINT)


class BashInterpreter(Interpreter):
    """An interactive bash without a terminal: an interrupt takes it back to reading its next line, as Ctrl-C does.

    A line on its stdin says what to run and to tell the exit code. Long code follows on the control socket, since bash
    reads its lines ahead. Code is evaluated, so that open quotes and here-documents end with it; it sees neither
    descriptor.
    """

    language = "bash"
    CONTROL = 8

    def __init__(self, settings: Settings) -> None:
        self.number = 0
        self.script, self.lines = os.pipe()
        try:
            super().__init__(settings)
        finally:
            os.close(self.script)
        os.set_blocking(self.lines, False)
        self.write_line(b"exec 2>&1; PS1= PS2=; HISTFILE=; set +o history; set +H; set +m; shopt -u checkwinsize")

    def become(self, control: int, output: int) -> None:
        keep = os.dup(control), os.dup(output), os.dup(self.script)
        self.settings.forget(keep)
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 32) for descriptor in keep]
        os.closerange(3, 32)
        os.dup2(high[0], self.CONTROL)
        os.dup2(high[1], 1)
        os.dup2(high[2], 0)  # stderr stays /dev/null while bash complains about the missing terminal
        os.closerange(32, 64)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execv(self.settings.bash, ["bash", "--noprofile", "--norc", "--noediting", "-i"])

    def request(self, code: bytes) -> bytes:
        self.number += 1
        if len(code) <= INLINE_BASH:
            word = b"".join(b"\\x%02x" % byte if byte < 32 or byte in b"'\\" else b"%c" % byte for byte in code)
            line, body = b"eval -- $'%s'" % word, b""
        else:
            line, body = b'__code=$(command -p head -c %d <&8); eval -- "$__code"' % len(code), code
        self.write_line(line + b" </dev/null 8>&-; builtin printf '%d:%%d\\n' \"$?\" >&8" % self.number)
        return body

    def reply(self) -> tuple[bool, int | None] | None:
        *lines, self.inbox = self.inbox.split(b"\n")
        for line in reversed(lines):
            number, _, status = line.partition(b":")
            if number == b"%d" % self.number and status.isdigit():
                return status == b"0", int(status)
        return None

    def interrupt(self, others: list[int]) -> None:
        """As Ctrl-C does: bash and what it waits for. What runs in the background, which bash has made ignore
        interrupts, is killed, and so is what belongs to neither."""
        for pid in others:
            freeze(pid)  # or a shell in the background goes on with its next command
        waited = [pid for pid in others if parent_of(pid) == self.pid and not ignores(pid, signal.SIGINT)]
        for pid in others:
            if pid not in waited:
                kill(pid)
        os.kill(self.pid, signal.SIGINT)
        for pid in waited:
            send(pid, signal.SIGINT)
            send(pid, signal.SIGCONT)
        self.write_line(b"builtin printf '%d:130\\n' >&8" % self.number)

    def write_line(self, line: bytes) -> None:
        try:
            os.write(self.lines, line + b"\n")
        except OSError:
            pass  # it ended, or reads no more and is killed soon

    def close(self) -> None:
        super().close()
        os.close(self.lines)


class Program(Interpreter):
    """One program, started for one call and then gone."""

    language = "program"

    def __init__(self, settings: Settings, argv: list[str]) -> None:
        self.argv = argv
        super().__init__(settings)

    def become(self, control: int, output: int) -> None:
        keep = os.dup(control), os.dup(output)
        self.settings.forget(keep)
        os.dup2(keep[0], 0)
        os.dup2(keep[1], 1)
        os.dup2(keep[1], 2)
        os.closerange(3, 64)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.chdir(self.settings.work)
        try:
            os.execvpe(self.argv[0], self.argv, clean_environment(self.settings.work))
        except OSError as error:
            os.write(2, ("%s: %s\n" % (self.argv[0], error.strerror)).encode())

    def request(self, code: bytes) -> bytes:
        return code

    def send(self) -> None:
        super().send()
        if not self.outbox:
            try:
                self.control.shutdown(socket.SHUT_WR)
            except OSError:
                pass

    def reply(self) -> tuple[bool, int | None] | None:
        return None  # it ends when it ends

    def interrupt(self, others: list[int]) -> None:
        os.killpg(self.pid, signal.SIGKILL)

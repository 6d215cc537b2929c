"""The python interpreter of a session: a fork of the worker that runs what it is sent, one call after the other."""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import sys

from agentgym.tools.sandbox.inside.system import CHUNK, clean_environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def serve_python(control: socket.socket, work: str) -> None:
    import builtins
    import types

    me = os.getpid()
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]
    os.environ.clear()
    os.environ.update(clean_environment(work))
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


def receive_exactly(control: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = control.recv(min(CHUNK, count - len(data)))
        if not part:
            return None
        data += part
    return bytes(data)


class PythonSession:
    """Runs code as the interactive interpreter does: the value of a last expression is shown, errors are printed."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.count = 0
        self.running = False

    def interrupted(self, number: int, frame: object) -> None:
        if self.running:
            raise KeyboardInterrupt

    def run(self, code: bytes) -> bool:
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
                stream.flush()  # type: ignore[union-attr]  # None fails as everything else here may
            except BaseException:
                pass
        return ok

    def execute(self, code: bytes) -> None:
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

    def report(self, error: BaseException) -> None:
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

    def say(self, text: str) -> None:
        try:
            sys.stdout.flush()
            sys.__stderr__.write(text + "\n")  # type: ignore[union-attr]
        except BaseException:
            pass

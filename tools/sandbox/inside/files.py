"""Files in and out of the work folder.

Every path is walked from the work folder on, one name at a time, never through a link: the worker can open what the
session's code cannot, such as its own /proc entries.
"""

from __future__ import annotations

import errno
import json
import os
import stat

from agentgym.tools.sandbox.inside.system import CHUNK, Refused

MAX_ENTRIES = 10000
TYPE_CHECKING = False  # every sandbox would pay for the import of typing, a fifth of its start
if TYPE_CHECKING:
    from typing import Any

    Answer = tuple[dict[str, Any], bytes]


def names_of(work: str, path: str) -> list[bytes]:
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


def open_folder(work: str, names: list[bytes], make: bool = False) -> int:
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


def open_file(work: str, path: str, flags: int, make: bool = False) -> int:
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


def write_file(work: str, header: dict[str, Any], payload: bytes) -> Answer:
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


def read_file(work: str, header: dict[str, Any], payload: bytes) -> Answer:
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


def list_files(work: str, header: dict[str, Any], payload: bytes) -> Answer:
    folder = open_folder(work, names_of(work, header["path"]))
    entries: list[tuple[str, str, int]] = []
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
                entries.append((entry.name, "file" if stat.S_ISREG(mode) else kind, info.st_size))
    finally:
        os.close(folder)
    return {}, json.dumps(sorted(entries)).encode()

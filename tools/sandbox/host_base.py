"""An image's file system made of this machine's own interpreter and programs: no network, no package manager.

It holds python3 with its standard library, bash, the usual small programs and the libraries that these need. No package
of this environment, no configuration and no data of this machine goes into it, and python3 stands in ``/usr/local``
whatever its place here is.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import io
import os
import py_compile
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from agentgym.errors import ConfigError

_NAMES = """
[ awk base64 basename bash bunzip2 bzip2 cat chgrp chmod cksum cmp comm cp csplit cut date dd df diff dirname du
echo egrep env expand expr factor false fgrep find fmt fold grep gunzip gzip head hostname id install join kill link
ln ls md5sum mkdir mkfifo mktemp more mv nice nl nohup nproc numfmt od paste pathchk pr printenv printf ps pwd
readlink realpath rev rm rmdir sed seq sh sha1sum sha256sum sha512sum shred shuf sleep sort split stat stdbuf stty
sum tac tail tar tee test timeout touch tr true truncate tsort tty uname unexpand uniq unlink wc which whoami xargs
yes zcat
"""
PROGRAMS = tuple(_NAMES.split())
"""Taken from this machine, as far as it has them."""

_NEEDED = ("bash", "cat", "ls", "sh")
_SEARCH_PATH = "/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin:/run/current-system/sw/bin"
_PREFIX = "usr/local"
_LEFT_OUT = {
    "__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "lib-dynload", "site-packages", "test", "tests",
    "tkinter", "turtledemo",
}  # fmt: skip
_LEFT_OUT_MODULES = ("_test", "_tkinter", "_ctypes_test", "xx")
_FOLDERS = ("dev", "etc", "proc", "run", "sys", "tmp", "usr/bin", "usr/local/bin", "var/tmp", "work")
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/work:/bin/bash\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_EXECUTABLE, _PLAIN = 0o755, 0o644


def write_host_archive(output: IO[bytes]) -> str:
    """Write the file system as a tar archive. Takes seconds, most of them for compiling the standard library.

    Returns:
        SHA-256 of the names and contents: equal where the files are equal.

    Raises:
        ConfigError: this is not Linux, or a program that no sandbox can do without is missing.
    """
    if sys.platform != "linux":
        raise ConfigError(f"an image can be made from this machine only on Linux, not on {sys.platform}")
    archive = _Archive(output)
    for folder in _FOLDERS:
        archive.folder(folder)
    for top in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):  # on a merged system these are links into usr
        link = Path("/", top)
        if link.is_symlink() and not os.readlink(link).startswith("/"):
            archive.link(top, os.readlink(link))
            archive.folder(os.readlink(link))
        elif top == "bin":
            archive.link("bin", "usr/bin")
    for path, text in _FILES.items():
        archive.data(path, text.encode())

    programs = _programs()
    interpreter, modules = _python(archive)
    for name, program in programs.items():
        archive.file(f"usr/bin/{name}", program, _EXECUTABLE)
    _libraries(archive, [*programs.values(), interpreter, *modules])
    return archive.close()


def _programs() -> dict[str, Path]:
    found = {name: shutil.which(name, path=_SEARCH_PATH) for name in PROGRAMS}
    missing = [name for name in _NEEDED if found[name] is None]
    if missing:
        raise ConfigError(f"this machine has no {', '.join(missing)} in {_SEARCH_PATH}, which a sandbox needs")
    return {name: Path(path).resolve() for name, path in found.items() if path is not None}


def _python(archive: _Archive) -> tuple[Path, list[Path]]:
    """Add the interpreter and its standard library. Returns its path here and those of its extension modules."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    interpreter = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    library = Path(os.__file__).resolve().parent
    target = f"{_PREFIX}/{sys.platlibdir}/{version}"
    archive.file(f"{_PREFIX}/bin/{version}", interpreter, _EXECUTABLE)
    for name in ("python3", "python"):
        archive.link(f"{_PREFIX}/bin/{name}", version)
    for source in _library_files(library):
        name = f"{target}/{source.relative_to(library)}"
        archive.file(name, source)
        if source.suffix == ".py" and (compiled := _compiled(source, f"/{name}")) is not None:
            tag = sys.implementation.cache_tag
            archive.data(f"{Path(name).parent}/__pycache__/{source.stem}.{tag}.pyc", compiled, derived=True)
    modules = [
        module
        for module in sorted((library / "lib-dynload").glob("*"))
        if module.name.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES))
        and not module.name.startswith(_LEFT_OUT_MODULES)
    ]
    archive.folder(f"{target}/lib-dynload")  # its absence makes the interpreter complain
    for module in modules:
        archive.file(f"{target}/lib-dynload/{module.name}", module)
    return interpreter, modules


def _library_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in _LEFT_OUT and not path.name.startswith("config-"):
                yield from _library_files(path)
        elif path.is_file() and path.suffix not in (".a", ".exe"):
            yield path


def _compiled(source: Path, path_inside: str) -> bytes | None:
    """Byte code that is used without a look at the time of its source, which an archive does not keep."""
    with tempfile.TemporaryDirectory(prefix="agentgym-image-") as folder:
        output = Path(folder, "module.pyc")
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        try:
            py_compile.compile(str(source), str(output), dfile=path_inside, doraise=True, invalidation_mode=mode)
        except py_compile.PyCompileError:  # a template or a module for another version
            return None
        return output.read_bytes()


def _libraries(archive: _Archive, binaries: Sequence[Path]) -> None:
    """Add what the dynamic linker would load for the binaries.

    Those of the interpreter's own prefix move with it, and also go beside the C library: where the linker looks anyway.
    """
    prefix = Path(sys.base_prefix).resolve()
    needed = _needed_libraries(binaries)
    c_library = next((path for path in needed if path.name.startswith(("libc.so", "libc.musl", "ld-musl"))), None)
    for path in needed:
        if prefix != Path("/usr") and path.resolve().is_relative_to(prefix):
            moved = f"{_PREFIX}/{path.parent.resolve().relative_to(prefix)}/{path.name}"
            archive.file(moved, path, _EXECUTABLE)
            if c_library is not None:
                archive.link(f"{c_library.parent.resolve()}/{path.name}", f"/{moved}")
        else:
            archive.file(f"{path.parent.resolve()}/{path.name}", path, _EXECUTABLE)


def _needed_libraries(binaries: Sequence[Path]) -> list[Path]:
    """Absolute paths, as ``ldd`` shows them. A library that is missing here makes one module fail to import there."""
    done = subprocess.run(
        ["ldd", *map(str, binaries)], capture_output=True, text=True, check=False, env={"PATH": _SEARCH_PATH}
    )  # scripts and static programs make it complain
    found: set[Path] = set()
    for line in done.stdout.splitlines():
        if not line.startswith(("\t", " ")):
            continue
        name, _, target = line.partition("=>")
        word = (target or name).split("(")[0].strip()
        if word.startswith("/"):
            found.add(Path(word))
    for path in [path for path in found if path.name.startswith("libc.so")]:
        found.update(path.parent.glob("libgcc_s.so.1"))  # loaded when a thread is cancelled: no binary lists it
    return sorted(found)


class _Archive:
    """A tar archive without owners and times; a folder comes before what is in it."""

    def __init__(self, output: IO[bytes]) -> None:
        self._tar = tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 - see close
        self._seen: set[str] = set()
        self._hash = hashlib.sha256()

    def folder(self, name: str) -> None:
        self._add(name, tarfile.DIRTYPE, _EXECUTABLE)

    def link(self, name: str, target: str) -> None:
        self._add(name, tarfile.SYMTYPE, 0o777, target=target)

    def file(self, name: str, source: Path, mode: int = _PLAIN) -> None:
        if name.strip("/") not in self._seen:
            self._add(name, tarfile.REGTYPE, mode, data=source.read_bytes())

    def data(self, name: str, data: bytes, *, derived: bool = False) -> None:
        """``derived``: made from another file of the archive, so the digest leaves it out."""
        self._add(name, tarfile.REGTYPE, _PLAIN, data=data, derived=derived)

    def close(self) -> str:
        """End the archive. Returns the digest of names and contents."""
        self._tar.close()
        return self._hash.hexdigest()

    def _add(
        self, name: str, kind: bytes, mode: int, *, target: str = "", data: bytes = b"", derived: bool = False
    ) -> None:
        name = name.strip("/")
        if not name or name in self._seen:
            return
        self.folder(name.rpartition("/")[0])
        self._seen.add(name)
        info = tarfile.TarInfo(name)
        info.type, info.mode, info.linkname, info.size = kind, mode, target, len(data)
        self._tar.addfile(info, io.BytesIO(data))
        if not derived:  # byte code differs from process to process
            self._hash.update(f"{name}\0{mode}\0{target}\0{hashlib.sha256(data).hexdigest()}\n".encode())

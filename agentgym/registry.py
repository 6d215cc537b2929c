"""The one registry: environments, loops, parsers, interactions, advantages, losses and engines all use it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from agentgym.errors import (
    EnvError,
    InfraError,
    PluginError,
    RegistrationError,
    UnknownName,
    boundary,
    did_you_mean,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """What is registered: a value, or ``"module:attribute"`` that is imported at the first use."""

    target: T | str
    origin: str
    """Where it was registered from, for messages."""


class Registry(Generic[T]):
    """Names to values, with lazy imports, origins and did-you-mean.

    Registering the same target again is a no-op (a module may be imported under two paths); another target under a
    known name is a `RegistrationError` that names both origins, unless ``override=True``.

    Args:
        kind: what is registered, in the singular, for messages: ``"agent loop"``.
        before_lookup: called before names are listed and before one is reported as unknown; loads plugins.
        same: whether two targets are the same thing, so that registering the second one changes nothing.
    """

    def __init__(
        self,
        kind: str,
        before_lookup: Callable[[], None] | None = None,
        same: Callable[[Any, Any], bool] | None = None,
    ) -> None:
        self.kind = kind
        self._before_lookup = before_lookup
        self._same = same if same is not None else same_target
        self._entries: dict[str, Entry[T]] = {}

    def register(self, name: str, target: T | str, *, override: bool = False, origin: str | None = None) -> bool:
        """Put ``target`` under ``name``; False if it stood there already. Does not load plugins.

        Raises:
            RegistrationError: another target stands there, or the name is empty.
        """
        if not name or name != name.strip():
            raise RegistrationError(f"{self.kind} name {name!r}: expected a non-empty name without outer spaces")
        entry = Entry(target, origin if origin is not None else describe_origin(target))
        known = self._entries.get(name)
        if known is not None and not override:
            if self._same(known.target, target):
                return False
            raise RegistrationError(
                f"{self.kind} {name!r} is already registered by {known.origin}; {entry.origin} registers another one. "
                f"Choose another name, or pass override=True to replace it.",
                name=name,
            )
        self._entries[name] = entry
        return True

    def decorator(self, name: str, *, override: bool = False) -> Callable[[T], T]:
        """``@register_x("name")``."""

        def decorate(target: T) -> T:
            self.register(name, target, override=override)
            return target

        return decorate

    def get(self, name: str) -> T:
        """The value under ``name``, imported if needed. Raises `UnknownName` with the nearest known name."""
        entry = self._lookup(name)
        if isinstance(entry.target, str):
            return cast(T, import_target(entry.target, what=f"{self.kind} {name!r}"))
        return entry.target

    def origin(self, name: str) -> str:
        """Where ``name`` was registered from."""
        return self._lookup(name).origin

    def names(self) -> list[str]:
        """All names, sorted."""
        self._load()
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _load(self) -> None:
        if self._before_lookup is not None:
            self._before_lookup()

    def _lookup(self, name: str) -> Entry[T]:
        if name not in self._entries:
            self._load()
        if name not in self._entries:
            known = sorted(self._entries)
            raise UnknownName(
                f"unknown {self.kind} {name!r}.{did_you_mean(name, known)} Known: {', '.join(known) or 'none'}. "
                f"If a module or file of yours registers it, list that as a plugin: plugins=my_module or "
                f"plugins=path/to/file.py"
            )
        return self._entries[name]


def import_target(path: str, *, what: str) -> Any:
    """Import ``"module:attribute"`` (or ``"module.attribute"``). Raises `PluginError` saying which part failed."""
    module_name, colon, attribute = path.partition(":")
    if not colon:
        module_name, _, attribute = path.rpartition(".")
    if not module_name or not attribute:
        raise RegistrationError(f"{what}: {path!r} is not of the form 'module:attribute'")
    with importing(f"{what}: importing {module_name!r}"):
        value: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise PluginError(f"{what}: {module_name!r} has no {attribute!r}.{did_you_mean(part, dir(value))}")
        value = getattr(value, part)
    return value


def import_file(path: Path) -> ModuleType:
    """Import a Python file once per process, as a module whose name no other file and the same file in every process
    has. Raises what the file raises, and `ImportError` for another kind of file."""
    path = path.resolve()
    name = f"agentgym_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def importing(what: str) -> Iterator[None]:
    """Turn whatever a module raises while it is imported into a `PluginError`: ``WHAT failed: ValueError: ...``.

    Errors of agentgym pass unchanged.
    """
    try:
        with boundary(what):
            yield
    except (EnvError, InfraError) as error:
        original = error.__cause__ or error
        raise PluginError(f"{what} failed: {type(original).__name__}: {original}") from original


def describe_origin(target: object) -> str:
    """``module:qualname (file:line)`` of a class or function; the string itself for a lazy target."""
    if isinstance(target, str):
        return target
    module = getattr(target, "__module__", None) or "?"
    name = f"{module}:{getattr(target, '__qualname__', type(target).__qualname__)}"
    code = getattr(target, "__code__", None)
    if code is not None:
        return f"{name} ({code.co_filename}:{code.co_firstlineno})"
    file = getattr(sys.modules.get(module), "__file__", None)
    return f"{name} ({file})" if file is not None else name


def same_target(a: object, b: object) -> bool:
    """True if both are the same object, or the same definition imported under two module paths."""
    if a is b or (isinstance(a, str) and a == b):
        return True
    return _definition(a) is not None and _definition(a) == _definition(b)


def _definition(target: object) -> tuple[str, str] | None:
    """(file, qualified name) of a class or function at the top level of a file; None where it cannot be told.

    Lambdas and what is defined inside a function do not count: one place in a file gives many of them.
    """
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    qualname = getattr(target, "__qualname__", None)
    return None if file is None or qualname is None or "<" in qualname else (str(Path(file).resolve()), qualname)

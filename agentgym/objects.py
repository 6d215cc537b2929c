"""Objects that a setting names: ``path/to/file.py:name`` or ``package.module:name``."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from agentgym.errors import AgentGymError, ConfigError, boundary, did_you_mean
from agentgym.registry import import_file, import_target


def load_object(where: str, *, what: str, name: str | None = None) -> Any:
    """The object under ``file.py:name``, ``module:name`` or ``module.name``.

    Args:
        where: as written in a setting.
        what: the setting, for messages.
        name: the name to take where ``where`` has none.

    Raises:
        ConfigError: no such file, module or name, or its import failed.
    """
    file, colon, attribute = where.rpartition(":")
    if not colon:
        file, attribute = where, ""
    attribute = attribute or name or ""
    if not file.endswith(".py"):
        target = where if colon or name is None else f"{where}:{name}"
        return import_target(target, what=what)
    path = Path(file)
    if not path.is_file():
        beside = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(f"{what}: file {str(path)!r} does not exist.{did_you_mean(path.name, beside)}")
    if not attribute:
        raise ConfigError(f"{what}={where}: which object of the file? Write {where}:NAME")
    module = load_file(path, what=what)
    if not hasattr(module, attribute):
        known = [found for found in vars(module) if not found.startswith("_")]
        raise ConfigError(
            f"{what}: {str(path)!r} has no {attribute!r}.{did_you_mean(attribute, known)} It has: {', '.join(known)}"
        )
    return getattr(module, attribute)


def load_file(path: Path, *, what: str) -> ModuleType:
    """Import a Python file once per process. Raises `ConfigError` if that fails."""
    try:
        with boundary(f"importing {what} {str(path)!r}"):
            return import_file(path)
    except AgentGymError as error:
        raise ConfigError(str(error)) from error


def absolute(where: str) -> str:
    """A ``file.py`` or ``file.py:name`` with its absolute path, as other processes need it; import paths unchanged."""
    file, colon, attribute = where.rpartition(":")
    if not colon:
        file, attribute = where, ""
    return f"{Path(file).resolve()}{colon}{attribute}" if file.endswith(".py") else where

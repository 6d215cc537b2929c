"""Plugins: modules and files of users that register environments, loops, parsers and the like when they are imported.

Three ways lead to one:

* an installed package with an entry point: ``[project.entry-points."agentgym.envs"] my_pack = "my_pack:register"``;
  these are scanned when a name is asked for that is not known yet;
* the environment variable ``AGENTGYM_PLUGINS=my_module,path/to/file.py``;
* `load`, which the CLI calls with ``plugins=[...]``.

The last two are shipped: `load` returns a canonical list, and another process that loads this list (a Ray worker, a
spawned process) knows the same names. Entry points are found there by themselves.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.errors import PluginError, RegistrationError, did_you_mean
from agentgym.registry import import_file, importing

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "agentgym.envs"
ENVIRONMENT_VARIABLE = "AGENTGYM_PLUGINS"

logger = logging.getLogger(__name__)

_lock = threading.RLock()
_loaded: list[str] = []
_loading: list[str] = []
_installed: list[str] = []
_scanned = False
_broken: list[PluginError] = []


def load(sources: Iterable[str] = ()) -> list[str]:
    """Import plugins: those of ``AGENTGYM_PLUGINS`` first, then ``sources`` in their order. Idempotent.

    Args:
        sources: import paths (``my_pack.envs``, or ``my_pack:register`` to call a function of it) and files
            (``path/to/file.py``).

    Returns:
        What to pass to `load` in another process: everything loaded so far, with absolute file paths.

    Raises:
        PluginError: a plugin is missing or its import failed; the original error is the cause.
    """
    with _lock:
        for source in [*_from_environment(), *sources]:
            _load_one(source)
        return list(_loaded)


def loaded() -> list[str]:
    """The canonical list of the plugins that `load` has imported in this process."""
    return list(_loaded)


def current() -> str | None:
    """The plugin that is being imported right now; None outside of imports. Registries note it as the origin."""
    return _loading[-1] if _loading else None


def scan() -> None:
    """Import the plugins of ``AGENTGYM_PLUGINS`` and of installed entry points, once.

    A broken entry point does not keep others from loading: it is remembered, see `broken`.
    """
    global _scanned
    with _lock:
        load()
        if _scanned:
            return
        _scanned = True  # first, since plugins may look up names while they are imported
        from importlib.metadata import entry_points  # takes a tenth of the time that importing agentgym may take

        for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (point.name, point.value)):
            try:
                with _importing(f"plugin {point.name!r} of {_distribution(point)}", point.value):
                    _call(point.load())
                _installed.append(point.value)
            except PluginError as error:
                logger.warning("%s", error)
                _broken.append(error)


def broken() -> list[PluginError]:
    """What went wrong with installed plugins at the last `scan`."""
    return list(_broken)


def _from_environment() -> list[str]:
    listed = os.environ.get(ENVIRONMENT_VARIABLE, "")
    return [source.strip() for source in listed.split(",") if source.strip()]


def _load_one(source: str) -> None:
    path = as_path(source)
    canonical = str(path) if path is not None else source
    if canonical in (*_loaded, *_loading, *_installed):
        return
    if path is not None:
        with _importing(f"plugin {source!r}", canonical):
            import_file(path)
    else:
        module, _, attribute = source.partition(":")
        with _importing(f"plugin {source!r}", canonical):
            value: Any = importlib.import_module(module)
            for part in attribute.split(".") if attribute else ():
                value = getattr(value, part)
            _call(value)
    _loaded.append(canonical)


def as_path(source: str) -> Path | None:
    """The absolute path if ``source`` means a file; None for an import path."""
    if not source.endswith(".py") and "/" not in source and os.sep not in source:
        return None
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        siblings = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise PluginError(f"plugin {source!r}: there is no file {path}.{did_you_mean(path.name, siblings)}")
    return path


def _call(value: Any) -> None:
    if callable(value):
        value()


@contextmanager
def _importing(what: str, canonical: str) -> Iterator[None]:
    """Note which plugin is being imported; turn whatever its code raises into a `PluginError` that says so."""
    where = "" if repr(canonical) in what else f" ({canonical})"
    _loading.append(canonical)
    try:
        with importing(f"importing {what}{where}"):
            yield
    except PluginError:
        raise
    except RegistrationError as error:
        raise PluginError(f"{what}{where} could not register: {error}") from error
    finally:
        _loading.pop()


def _distribution(point: EntryPoint) -> str:
    return f"distribution {point.dist.name} {point.dist.version}" if point.dist is not None else "an installed package"

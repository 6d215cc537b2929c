"""Environments by name: `register`, `make`, `spec`, `list_envs`.

The canonical id is ``agentgym/NAME-vN``, also in Gymnasium's registry; ``NAME-vN`` and ``NAME`` (the newest version)
are aliases. An id without a version registers version 0. Packages may use a namespace of their own:
``my_pack/NAME-vN``.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gymnasium

from agentgym import plugins
from agentgym.env import Env
from agentgym.errors import ConfigError, PluginError, RegistrationError, UnknownName, UnknownVersion, did_you_mean
from agentgym.registry import Registry, import_target

NAMESPACE = "agentgym"

EntryPoint = str | Callable[..., Env]
"""``"module:Class"``, or the class or function itself where no import path leads to it."""

_ID = re.compile(r"(?:(?P<namespace>[\w-]+)/)?(?P<name>[\w.-]+?)(?:-v(?P<version>\d+))?")

SHIPPED: Mapping[str, Mapping[str, Any]] = {
    "calculator-math": {
        "entry_point": "agentgym.envs.calculator_math:CalculatorMath",
        "max_turns": 8,
        "description": "word and expression problems that need a calculator",
    },
    "counter": {
        "entry_point": "agentgym.envs.counter:Counter",
        "max_turns": 8,
        "description": "bring a counter to a number; teaches tools that keep their state",
    },
    "dataset": {
        "entry_point": "agentgym.envs.dataset:DatasetEnv",
        "max_turns": 16,
        "description": "rows of parquet, json or jsonl files, with tools and a reward function of your own",
    },
    "python-math": {
        "entry_point": "agentgym.envs.python_math:PythonMath",
        "max_turns": 12,
        "description": "number problems in parts, for a Python session that keeps its variables",
    },
    "search-qa": {
        "entry_point": "agentgym.envs.search_qa:SearchQA",
        "max_turns": 10,
        "description": "questions about an invented world that take one to three searches",
    },
    "terminal": {
        "entry_point": "agentgym.envs.terminal:Terminal",
        "max_turns": 12,
        "description": "jobs with files in a sandbox, checked from outside",
    },
    "twenty-questions": {
        "entry_point": "agentgym.envs.twenty_questions:TwentyQuestions",
        "max_turns": 21,
        "max_user_turns": 20,
        "description": "find out what a rule-based user thinks of by asking yes-or-no questions",
    },
}
"""The environments in this package; listed here so that importing agentgym imports none of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """How to make an environment. It can be sent to another process, and made there with `make`.

    Example:
        ``EnvSpec(id="agentgym/calculator-math-v0", entry_point="agentgym.envs.calculator_math:CalculatorMath")``
    """

    id: str
    """The canonical id."""
    entry_point: EntryPoint
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for the constructor; those of `make` go before them."""
    max_turns: int | None = None
    """Limit of assistant turns; None: none."""
    max_user_turns: int | None = None
    """Limit of user turns after the first prompt; None: none."""
    description: str = field(default="", compare=False)
    """One line for listings."""
    origin: str = field(default="", compare=False)
    """Where it was registered from, for messages."""
    plugin: str | None = field(default=None, compare=False)
    """The plugin that registered it, as `plugins.load` takes it; loaded when the spec is made elsewhere."""

    @property
    def namespace(self) -> str:
        return self.id.partition("/")[0]

    @property
    def name(self) -> str:
        """The id without the version, and without the namespace if that is agentgym's: ``"calculator-math"``."""
        return _short(self.id).rpartition("-v")[0]

    @property
    def version(self) -> int:
        return int(self.id.rpartition("-v")[2])

    def load(self) -> Callable[..., Env]:
        """The class or function that makes the environment. Raises `PluginError` if its import fails."""
        if not isinstance(self.entry_point, str):
            return self.entry_point
        if self.plugin is not None:
            plugins.load([self.plugin])
        made: Callable[..., Env] = import_target(self.entry_point, what=f"environment {self.id!r}")
        return made

    def __getstate__(self) -> list[Any]:
        if not isinstance(self.entry_point, str):
            raise ConfigError(
                f"environment {self.id!r} cannot be sent to another process: {self.origin} has no import path there. "
                f"Define it at the top level of a module or file of its own and list that as a plugin: "
                f"plugins=my_module or plugins=path/to/file.py"
            )
        return [getattr(self, name) for name in self.__dataclass_fields__]

    def __setstate__(self, state: list[Any]) -> None:
        for name, value in zip(self.__dataclass_fields__, state, strict=True):
            object.__setattr__(self, name, value)


def register(
    id: str,
    entry_point: EntryPoint,
    *,
    kwargs: Mapping[str, Any] | None = None,
    max_turns: int | None = None,
    max_user_turns: int | None = None,
    override: bool = False,
    description: str = "",
) -> None:
    """Make an environment known under a name, here and in Gymnasium's registry.

    Args:
        id: ``"my-env"``, ``"my-env-v1"``, ``"agentgym/my-env-v1"`` or ``"my_pack/my-env-v1"``; no ``:``.
        entry_point: ``"module:Class"``, or a class or function that gives an `Env`.
        kwargs: keyword arguments for the constructor; copied, now and whenever one is made.
        max_turns: limit of assistant turns, for the session; with ``gymnasium.make``, its time limit.
        max_user_turns: limit of user turns after the first prompt, for the session.
        override: replace what another registration put there.
        description: one line for listings.

    Raises:
        RegistrationError: the id is malformed, or belongs to another spec already (the message names both origins).
            The same spec once more is fine, also from a module that was imported under two paths.
    """
    _check_limit(id, "max_turns", max_turns)
    _check_limit(id, "max_user_turns", max_user_turns)
    canonical = _canonical(id)
    target = portable(entry_point)
    new = EnvSpec(
        id=canonical,
        entry_point=target,
        kwargs=copy.deepcopy(dict(kwargs or {})),
        max_turns=max_turns,
        max_user_turns=max_user_turns,
        description=description,
        origin=_origin(entry_point),
        plugin=plugins.current(),
    )
    if not _registry.register(canonical, new, override=override, origin=new.origin):
        return
    gymnasium.registry.pop(canonical, None)  # Gymnasium warns when it replaces; here it was asked for
    gymnasium.register(canonical, target, max_episode_steps=max_turns, kwargs=copy.deepcopy(dict(new.kwargs)))


def spec(id: str) -> EnvSpec:
    """The spec of a registered environment, by canonical id or alias; a copy.

    Raises:
        UnknownName: no such environment; the message has the nearest name and all names. `UnknownVersion`: only others.
        PluginError: an installed plugin that might have registered it failed to import.
    """
    found = _registry.get(_resolve(id))
    return replace(found, kwargs=copy.deepcopy(dict(found.kwargs)))


def make(id: str | EnvSpec, **kwargs: Any) -> Env:
    """Make an environment.

    Args:
        id: a canonical id, an alias, or a spec (from another process, too).
        kwargs: keyword arguments for the constructor; they go before those of the spec and do not stay in it.

    Raises:
        UnknownName: see `spec`.
        ConfigError: the constructor does not take one of the arguments, or lacks one.
        RegistrationError: the entry point gives something that is not an `Env`.
    """
    chosen = id if isinstance(id, EnvSpec) else spec(id)
    check_kwargs(chosen, kwargs)
    merged = {**copy.deepcopy(dict(chosen.kwargs)), **kwargs}
    env: object = chosen.load()(**merged)
    if not isinstance(env, Env):
        raise RegistrationError(
            f"environment {chosen.id!r}: {chosen.origin} gave a {type(env).__name__}; expected an agentgym.Env"
        )
    env.max_turns = chosen.max_turns if chosen.max_turns is not None else env.max_turns
    env.max_user_turns = chosen.max_user_turns if chosen.max_user_turns is not None else env.max_user_turns
    # Gymnasium's form of the spec, as gymnasium.make sets it: its wrappers and its checker read and copy it.
    env.spec = gymnasium.envs.registration.EnvSpec(
        id=chosen.id, entry_point=chosen.entry_point, order_enforce=False, disable_env_checker=True, kwargs=merged
    )
    return env


def list_envs() -> list[str]:
    """The shortest name of every registered environment, sorted; ``make`` takes each of them.

    That is ``NAME`` for the newest version and ``NAME-vN`` for older ones.
    """
    newest = set(_newest().values())
    return sorted(_short(id.rpartition("-v")[0] if id in newest else id) for id in _registry.names())


def check_kwargs(spec: EnvSpec, kwargs: Mapping[str, Any]) -> None:
    """Compare keyword arguments with the signature of the spec's constructor.

    Raises:
        ConfigError: one is not accepted (the message has the nearest accepted one and all of them), or a required one
            is missing.
    """
    accepted, required = _parameters(spec.load())
    for name in kwargs:
        if accepted is not None and name not in accepted:
            raise ConfigError(
                f"environment {spec.name!r} has no setting {name!r}.{did_you_mean(name, accepted)} "
                f"Its settings: {', '.join(sorted(accepted)) or 'none'}"
            )
    missing = sorted(required - set(kwargs) - set(spec.kwargs))
    if missing:
        raise ConfigError(f"environment {spec.name!r} needs {', '.join(missing)}: pass {missing[0]}=...")


def check_shippable(spec: EnvSpec) -> None:
    """Make sure that worker processes, which load what `plugins.loaded` lists, will know the environment.

    Raises:
        ConfigError: it was registered outside of a plugin; the message says which module or file to list.
    """
    if spec.plugin is not None or spec.id in {_canonical(name) for name in SHIPPED}:
        return
    module = spec.entry_point.partition(":")[0] if isinstance(spec.entry_point, str) else spec.entry_point.__module__
    what = _module_file(module) or "path/to/file.py" if module == "__main__" else module
    raise ConfigError(
        f"environment {spec.name!r} was registered by {spec.origin}, but not through a plugin, so worker processes "
        f"would not know it: list the module or file that registers it, like plugins={what}"
    )


def portable(entry_point: EntryPoint) -> EntryPoint:
    """``"module:qualname"`` if that leads back to the class or function in another process; else the object itself."""
    if isinstance(entry_point, str):
        return entry_point
    module, qualname = getattr(entry_point, "__module__", None), getattr(entry_point, "__qualname__", None)
    if module is None or qualname is None or module == "__main__":
        return entry_point
    value: Any = sys.modules.get(module)
    for part in qualname.split("."):
        value = getattr(value, part, None)
    return f"{module}:{qualname}" if value is entry_point else entry_point


def _check_limit(id: str, name: str, value: int | None) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise RegistrationError(f"environment {id!r}: {name}={value!r}; expected a whole number from 1 on, or None")


def _parameters(target: Callable[..., Env]) -> tuple[set[str] | None, set[str]]:
    """Accepted (None: any) and required keyword arguments of a class or function that makes environments.

    A constructor that takes ``**kwargs`` is taken to hand them on to the next one of its base classes.
    """
    if not isinstance(target, type):
        names, required, more = _named(target)
        return (None if more else names), required
    inits = [vars(base)["__init__"] for base in target.__mro__ if "__init__" in vars(base) and base is not object]
    accepted: set[str] = set()
    required_first: set[str] = set()
    for index, init in enumerate(inits):
        names, required, more = _named(init, skip=1)
        accepted |= names
        if index == 0:  # what a base class requires may be given by the derived one
            required_first = required
        if not more:
            break
    return accepted, required_first


def _named(function: Callable[..., Any], skip: int = 0) -> tuple[set[str], set[str], bool]:
    """Names that can be passed by keyword, those without a default, and whether there is a ``**kwargs``."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = {p.name for p in by_name if p.default is p.empty}
    return {p.name for p in by_name}, required, any(p.kind is p.VAR_KEYWORD for p in parameters)


# -- identity ----------------------------------------------------------------------------------------------------------


def _same_spec(a: EnvSpec, b: EnvSpec) -> bool:
    """True if both make the same environments, also if the module was imported under two paths."""
    if a == b:
        return True
    place = _definition(a.entry_point)
    return place is not None and place == _definition(b.entry_point) and replace(a, entry_point=b.entry_point) == b


def _definition(entry_point: EntryPoint) -> tuple[str, str] | None:
    """File and qualified name of the definition; None where there is no file, or where one file makes several."""
    if isinstance(entry_point, str):
        module, _, qualname = entry_point.partition(":")
    else:
        module, qualname = entry_point.__module__, entry_point.__qualname__
    file = _module_file(module)
    return None if file is None or "<" in qualname else (file, qualname)


def _module_file(module: str) -> str | None:
    file: str | None
    if module in sys.modules:
        file = getattr(sys.modules[module], "__file__", None)
    else:
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            return None
        file = found.origin if found is not None else None
    return str(Path(file).resolve()) if file is not None else None


def _origin(entry_point: EntryPoint) -> str:
    """Where a registration comes from, in words."""
    plugin = plugins.current()
    by = f" (plugin {plugin})" if plugin is not None else ""
    if isinstance(entry_point, str):
        return f"{entry_point}{by}"
    file = _module_file(entry_point.__module__)
    where = f" in {file}" if file is not None else ""
    return f"{entry_point.__module__}:{entry_point.__qualname__}{where}{by}"


# -- ids ---------------------------------------------------------------------------------------------------------------


def _canonical(id: str) -> str:
    match = _ID.fullmatch(id)
    if match is None:
        raise RegistrationError(
            f"environment id {id!r}: expected NAME or NAME-vN of letters, digits, '-', '_' and '.', "
            f"like 'my-env' or 'agentgym/my-env-v0'"
        )
    return f"{match['namespace'] or NAMESPACE}/{match['name']}-v{int(match['version'] or 0)}"


def _short(canonical: str) -> str:
    return canonical.removeprefix(f"{NAMESPACE}/")


def _newest() -> Mapping[str, str]:
    """``namespace/name`` -> canonical id of the newest version."""
    return _newest_of(tuple(_registry.names()))


@functools.lru_cache(maxsize=1)
def _newest_of(ids: tuple[str, ...]) -> Mapping[str, str]:
    versions: dict[str, int] = {}
    for id in ids:
        base, _, version = id.rpartition("-v")
        versions[base] = max(versions.get(base, 0), int(version))
    return {base: f"{base}-v{version}" for base, version in versions.items()}


def _resolve(id: str) -> str:
    """The canonical id that ``id`` means. Raises what `spec` raises."""
    newest = _newest()
    match = _ID.fullmatch(id)
    if match is None:
        raise _unknown(id, None)
    base = f"{match['namespace'] or NAMESPACE}/{match['name']}"
    canonical = newest.get(base) if match["version"] is None else _canonical(id)
    if canonical is None or canonical not in _registry:
        raise _unknown(id, base if base in newest else None)
    for error in plugins.broken():
        if isinstance(error.__cause__, RegistrationError) and error.__cause__.name == canonical:
            raise error  # two plugins claim it: neither wins by the order of loading
    return canonical


def _unknown(id: str, base: str | None) -> RegistrationError:
    """The error for an id that nothing is registered under; ``base`` is set if other versions are."""
    if base is not None:
        versions = [_short(known) for known in _registry.names() if known.rpartition("-v")[0] == base]
        return UnknownVersion(f"environment {id!r}: there is no such version. Known versions: {', '.join(versions)}")
    if plugins.broken():
        reports = "; ".join(str(error) for error in plugins.broken())
        return PluginError(
            f"environment {id!r} is not among those that could be loaded, but a plugin failed: {reports}"
        )
    known = list_envs()
    return UnknownName(
        f"unknown environment {id!r}.{did_you_mean(_short(id), known)} Known: {', '.join(known)}. If a module or file "
        f"of yours registers it, list that as a plugin: plugins=my_module or plugins=path/to/file.py"
    )


_registry: Registry[EnvSpec] = Registry("environment", before_lookup=plugins.scan, same=_same_spec)

for _name, _arguments in SHIPPED.items():
    register(_name, **_arguments)

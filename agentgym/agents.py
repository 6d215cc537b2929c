"""Agents without a model of ours: the oracle, one that does nothing, and the user's own functions."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agentgym import plugins
from agentgym.errors import ConfigError, EnvError
from agentgym.registry import import_file, import_target
from agentgym.session import Session
from agentgym.types import AssistantTurn

BUILT_IN = ("oracle", "noop")
"""Agents by name; any other ``agent=`` is the place of a function."""

NOTHING = 1
"""Turns without a word before the do-nothing agent gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an agent finds its model: an OpenAI-compatible API.

    Example:
        ``AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)``, then
        ``client.chat.completions.create(model=endpoint.model, ...)``
    """

    base_url: str
    api_key: str
    model: str


Agent = Callable[..., Awaitable[Any]]
"""``async def agent(session)``, or ``async def agent(session, endpoint)`` for one that needs a model.

It steps the session until it is done, or returns the final answer as text or `AssistantTurn`, which is stepped for it.
"""


async def play_oracle(session: Session) -> None:
    """Step what the environment's own perfect player answers."""
    assert session.task is not None
    for turn in session.env.oracle(session.task):
        await session.step(turn)
        if session.done:
            break


async def play_nothing(session: Session) -> str:
    """Answer with an empty turn: the floor that every policy should beat."""
    return ""


def load_agent(place: str) -> Agent:
    """The function at ``pkg.mod:name`` or ``path/to/file.py:name``.

    Raises:
        ConfigError: it is not found, not async, or takes other than one or two arguments.
    """
    source, colon, name = place.rpartition(":")
    if not colon or not source:
        raise ConfigError(
            f"agent={place!r}: expected {', '.join(map(repr, BUILT_IN))}, or the place of an async function such as "
            f"my_module:my_agent or my_file.py:my_agent"
        )
    path = plugins.as_path(source)
    if path is not None:
        plugins.load([source])
        module = import_file(path)
        if not hasattr(module, name):
            raise ConfigError(f"agent={place!r}: {source} has no {name!r}")
        function = getattr(module, name)
    else:
        function = import_target(place, what=f"agent={place!r}")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"agent={place!r}: expected an async function (async def {name}(session)), got {function!r}")
    if num_arguments(function) not in (1, 2):
        raise ConfigError(f"agent={place!r}: expected a function of (session), or of (session, endpoint)")
    loaded: Agent = function
    return loaded


def num_arguments(function: Agent) -> int:
    """How many arguments a caller must give by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def needs_endpoint(function: Agent) -> bool:
    """True if the agent asks for a model behind an endpoint."""
    return num_arguments(function) == 2


async def finish(session: Session, answer: Any) -> None:
    """Step what an agent returned, if its session is not done. Raises `EnvError` where that does not end it."""
    if isinstance(answer, str):
        answer = AssistantTurn(content=answer)
    if not session.done and isinstance(answer, AssistantTurn):
        await session.step(answer)
    if not session.done:
        raise EnvError(
            "the agent returned before its session was done: it must step until session.done, or return its final "
            f"answer as text (it returned {type(answer).__name__})",
            task_id=None if session.task is None else session.task.id,
        )

"""`Interaction`: a simulated user, who answers the assistant's turns of words and may score each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from agentgym.errors import ConfigError, boundary
from agentgym.plugins import scan
from agentgym.registry import Registry, import_target
from agentgym.types import Message, Task

InteractionType = TypeVar("InteractionType", bound="type[Interaction]")


class Reply(NamedTuple):
    """What a user answers; a plain ``(done, text, reward, metrics)`` does as well."""

    done: bool
    """True: the user has what they wanted, or gives up; the episode ends."""
    text: str
    """Becomes a user message."""
    reward: float | None = None
    """Score of the assistant's turn; None: not scored."""
    metrics: Mapping[str, float] = {}


class Interaction:
    """One simulated user of one episode: every episode gets its own instance, so state may live on ``self``.

    Override `respond`, and `start` and `finish` where the user has something to set up or to give back.

    Args:
        config: settings from the environment or its configuration.

    Example:
        >>> @register_interaction("echo")
        ... class Echo(Interaction):
        ...     async def respond(self, messages):
        ...         return Reply(done=False, text=f"You said: {messages[-1]['content']}")
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config: Mapping[str, Any] = dict(config or {})

    async def start(self, task: Task, **kwargs: Any) -> None:
        """Called once, before the first turn. ``kwargs`` are the task's ``interaction_kwargs``, without ``name``."""

    async def respond(self, messages: Sequence[Message]) -> Reply | tuple[bool, str, float | None, Mapping[str, float]]:
        """Answer the last message, which is the assistant's. ``messages`` is the whole conversation."""
        raise NotImplementedError(f"{type(self).__qualname__} must override respond()")

    async def finish(self) -> None:
        """Called once, when the episode is over, however it ended."""


interactions: Registry[type[Interaction]] = Registry("interaction", scan)


def register_interaction(name: str, *, override: bool = False) -> Callable[[InteractionType], InteractionType]:
    """Decorator: an `Interaction` class by name, for environments and for a row's ``interaction_kwargs``."""

    def decorate(cls: InteractionType) -> InteractionType:
        interactions.register(name, cls, override=override)
        return cls

    return decorate


def make_interaction(
    which: str | type[Interaction] | Mapping[str, Any], config: Mapping[str, Any] | None = None
) -> Interaction:
    """A new user: by class, by registered name, or by ``{"_target_": "module:Class", **config}``.

    Raises:
        ConfigError: unknown name, or a target that is no `Interaction`.
    """
    settings = dict(config or {})
    if isinstance(which, Mapping):
        settings |= which
        target = settings.pop("_target_", None)
        if not isinstance(target, str):
            raise ConfigError(f"interaction {dict(which)!r}: expected a mapping with a string '_target_'")
        cls: Any = import_target(target, what=f"interaction {target!r}")
    else:
        cls = interactions.get(which) if isinstance(which, str) else which
    if not (isinstance(cls, type) and issubclass(cls, Interaction)):
        raise ConfigError(f"interaction {which!r} is {cls!r}, expected a subclass of Interaction")
    with boundary(f"constructor of interaction {cls.__qualname__}"):
        return cls(settings)


async def respond(interaction: Interaction, messages: Sequence[Message]) -> Reply:
    """The user's reply, checked. Raises `EnvError` for a reply that is none."""
    name = type(interaction).__qualname__
    with boundary(f"respond of interaction {name}"):
        answer: Any = await interaction.respond(messages)
        if not (isinstance(answer, tuple) and 2 <= len(answer) <= 4):
            raise TypeError(f"{name}.respond() gave {answer!r}, expected (done, text, reward, metrics)")
        reply = Reply(*answer)
        if not isinstance(reply.text, str):
            raise TypeError(f"{name}.respond() gave the text {reply.text!r}, expected a string")
        return reply._replace(done=bool(reply.done))

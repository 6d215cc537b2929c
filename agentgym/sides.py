"""How an environment gets its second side: the sync and async forms of `reset`, `step`, `truncate` and `close`.

An author writes one form of each operation (or both). For every class, `install` looks up which form is the most
derived one, and gives the class the other as a bridge:

    author wrote    sync caller                              async caller
    step            on the caller's thread, or on the        on the instance's `SyncThread`
                    `SyncThread` once there is one
    astep           on the instance's event loop, which is   on the instance's event loop: the first that awaited it
                    a `LoopThread` if it has none yet

Both forms are wrapped, so that the lifecycle is checked and the result validated no matter which one is called. A
method that is reached through ``super()`` is neither checked nor validated again: it is a part of the outer call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from agentgym.env import Env

Function = Callable[..., Any]

OPERATIONS = ("reset", "step", "truncate", "close")
"""Each has an async form with the prefix ``a``."""

Way = Literal["native", "bridge", "direct"]
"""How a wrapper runs its function: on the side it was written for, across to the other side, or (`Env`'s own defaults,
which do nothing that could block or wait) where the caller is."""

_SIDE = "__agentgym_side__"


class _Side(NamedTuple):
    """What a wrapper wraps; it is kept on the wrapper."""

    raw: Function
    way: Way


def install(cls: type[Env], *, root: type | None = None, abstract: bool = False) -> None:
    """Wrap what ``cls`` defines and bridge what it lacks.

    Args:
        cls: a subclass of `Env`, or `Env` itself.
        root: `Env`, where the search for an author's method ends; None while `Env` itself is installed.
        abstract: a missing `reset` or `step` is left to subclasses.

    Raises:
        TypeError: `reset` or `step` is missing on both sides, or a sync method is a coroutine function.
    """
    for name in OPERATIONS:
        owner = _owner(cls, name, root)
        if owner is None:
            if name in ("reset", "step") and not abstract:
                raise TypeError(
                    f"environment class {cls.__qualname__} defines neither {name}() nor a{name}(): override one of "
                    f"them, or declare the class with abstract=True if its subclasses do"
                )
            continue
        sync, coroutine = _written(owner, name), _written(owner, "a" + name)
        if inspect.iscoroutinefunction(sync):
            raise TypeError(f"{owner.__qualname__}.{name} is a coroutine function: call it a{name}, or make it sync")
        either = sync or coroutine
        assert either is not None  # that is what makes it the owner
        sync_way: Way = "bridge" if sync is None else "native" if root is not None else "direct"
        async_way: Way = "bridge" if coroutine is None else "native" if root is not None else "direct"
        _put(cls, name, _sync_side(name, sync or either, sync_way))
        _put(cls, "a" + name, _async_side(name, coroutine or either, async_way))


def _owner(cls: type, name: str, root: type | None) -> type | None:
    """The most derived class below ``root`` whose author wrote either form."""
    for base in cls.__mro__:
        if base is root:
            return None
        if _written(base, name) is not None or _written(base, "a" + name) is not None:
            return base
    return None


def _written(owner: type, attribute: str) -> Function | None:
    """What the author of ``owner`` wrote under ``attribute``; None for nothing, or for a bridge that `install` made."""
    function = vars(owner).get(attribute)
    side: _Side | None = getattr(function, _SIDE, None)
    if side is None:
        return function
    return side.raw if side.way != "bridge" else None


def _put(cls: type, attribute: str, wrapper: Function) -> None:
    """Give ``cls`` the wrapper, unless it inherits one around the same function."""
    inherited = getattr(getattr(cls, attribute, None), _SIDE, None)
    if inherited != getattr(wrapper, _SIDE):
        wrapper.__name__ = attribute
        wrapper.__qualname__ = f"{cls.__qualname__}.{attribute}"
        setattr(cls, attribute, wrapper)


def _sync_side(name: str, raw: Function, way: Way) -> Function:
    @functools.wraps(raw)
    def call(self: Env, *args: Any, **kwargs: Any) -> Any:
        part = functools.partial(raw, self, *args, **kwargs)
        if getattr(type(self), name) is not call:  # reached through super()
            return self._call(part, way)
        if name == "close":
            return self._close_blocking(part, way)
        self._enter(name, kwargs)
        return self._leave(name, self._call(part, way))

    setattr(call, _SIDE, _Side(raw, way))
    return call


def _async_side(name: str, raw: Function, way: Way) -> Function:
    @functools.wraps(raw)
    async def call(self: Env, *args: Any, **kwargs: Any) -> Any:
        part = functools.partial(raw, self, *args, **kwargs)
        if getattr(type(self), "a" + name) is not call:
            return await self._acall(part, way)
        if name == "close":
            return await self._close_awaiting(part, way)
        self._enter(name, kwargs)
        return self._leave(name, await self._acall(part, way))

    setattr(call, _SIDE, _Side(raw, way))
    return call

"""What a tool author writes: a function with `function_tool`, or a subclass of `BaseTool` where there is state."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, overload

from agentgym.errors import ConfigError
from agentgym.ids import new_id
from agentgym.resources import Resources
from agentgym.tool_arguments import ArgumentChecker, convert_arguments
from agentgym.tool_results import read_result
from agentgym.tool_schema import ToolSchema, checked_schema, derive_schema
from agentgym.tool_threads import run_in_thread
from agentgym.types import Task, ToolResponse

if TYPE_CHECKING:
    from agentgym.sandbox import LazySandbox

P = ParamSpec("P")
R = TypeVar("R")

Lifecycle = Literal["session", "call"]


@dataclass(frozen=True, kw_only=True)
class ToolContext:
    """What a tool knows of the session that calls it.

    A tool asks for it with a parameter whose type hint is ``ToolContext``, in a function tool or in ``create``,
    ``execute``, ``calc_reward`` and ``release`` of a `BaseTool`; the model never sees that parameter.
    """

    session_id: str
    task: Task | None = None
    state: dict[str, Any] = field(default_factory=dict)
    """One dict per session, shared by its tools; empty at the start of an episode."""
    sandbox: LazySandbox | None = None
    """The session's sandbox, where the environment has one; it starts at its first use."""
    resources: Resources = field(default_factory=Resources)
    """Of this tool in this session: what is pushed here is released after the tool, or at once if its create fails."""


class BaseTool:
    """A tool with a life of its own in every session.

    One object serves all sessions; what belongs to a session is kept per ``instance_id``. In a session the tool is
    created at the first call, later calls see the same instance, and it is released with the session, in reverse order
    of creation, whatever happened. All methods may be called for several sessions at once.

    Example:
        >>> class Counter(BaseTool):
        ...     tool_schema = {"type": "function", "function": {"name": "count", "description": "Counts."}}
        ...     def __init__(self, config=None, tool_schema=None):
        ...         super().__init__(config, tool_schema)
        ...         self.counts = {}
        ...     async def create(self, instance_id=None, start=0, **kwargs):
        ...         self.counts[instance_id] = start
        ...         return instance_id, ToolResponse(text="The counter is ready.")
        ...     async def execute(self, instance_id, parameters, **kwargs):
        ...         self.counts[instance_id] += 1
        ...         return ToolResponse(text=str(self.counts[instance_id])), 0.0, {}
        ...     async def release(self, instance_id, **kwargs):
        ...         del self.counts[instance_id]

    Args:
        config: settings of the tool, as written in a tool file.
        tool_schema: OpenAI function schema; None: the one of the class.

    Raises:
        ConfigError: no schema, or one of another form.
    """

    tool_schema: ToolSchema = {}  # noqa: RUF012 - set per instance; a class may declare its own
    lifecycle: Lifecycle = "session"
    """``"call"``: create, execute and release for every call; `calc_reward` is not asked."""
    timeout: float | None = None
    """Seconds one call may take; None: the limit of the toolbox."""
    has_reward: bool = True
    """Whether `calc_reward` is asked at the end of a session."""

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None) -> None:
        self.config = dict(config or {})
        schema = tool_schema or type(self).tool_schema
        if not schema:
            raise ConfigError(f"tool {type(self).__qualname__} has no tool_schema. Pass one, or set it on the class.")
        self.tool_schema = checked_schema(schema)
        self._checker: ArgumentChecker | None = None
        self._context_keys: dict[str, str | None] = {}

    @property
    def name(self) -> str:
        """The name that the model calls."""
        name: str = self.tool_schema["function"]["name"]
        return name

    @property
    def checker(self) -> ArgumentChecker:
        """The compiled schema. Raises `ConfigError` if the parameters are not a JSON schema."""
        if self._checker is None:
            self._checker = ArgumentChecker(self.name, self.tool_schema["function"]["parameters"], closed=False)
        return self._checker

    def check(self) -> None:
        """Raise `ConfigError` if the tool cannot be called: its parameters are not a JSON schema."""
        _ = self.checker

    def context_key(self, method: str) -> str | None:
        """Name of the parameter with which the method asks for the `ToolContext`, if it does."""
        if method not in self._context_keys:
            self._context_keys[method] = context_parameter(getattr(self, method))
        return self._context_keys[method]

    def read_parameters(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The parameters for `execute`, checked. Raises `ToolError` with a text that the model can act on."""
        self.checker.check(arguments)
        return copy.deepcopy(arguments)  # the call is part of the conversation: a tool must not change it

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Make an instance for one session.

        Args:
            instance_id: unique id to keep the instance under.
            **kwargs: the task's ``tools_kwargs[name]["create_kwargs"]``.

        Returns:
            The id, and a response whose text precedes the result of the first call.
        """
        return instance_id or new_id(), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Run one call.

        Args:
            instance_id: of the session.
            parameters: checked against the schema.

        Returns:
            Response, reward (None: none) and metrics.

        Raises:
            ToolError: its text is the answer to the model. Anything else is a fault and ends the session.
        """
        raise NotImplementedError(f"tool {self.name!r} ({type(self).__qualname__}) does not define execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The reward of the whole session, asked once at its end."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Give back what the instance holds; called exactly once for every instance whose create succeeded."""


class FunctionTool(BaseTool, Generic[P, R]):
    """A function as a tool; made by `function_tool`. Calling it calls the function.

    As a class attribute it is a method: ``instance.tool`` is the tool bound to the instance.
    """

    has_reward = False

    def __init__(
        self,
        fn: Callable[P, R],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout: float | None = None,
        inline: bool = False,
        namespace: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(fn, (type, BaseTool)):
            raise ConfigError(f"function_tool got {fn!r}; expected a function")
        if timeout is not None and timeout <= 0:
            raise ConfigError(f"function_tool: timeout={timeout}: expected a number of seconds above 0")
        name = name or getattr(fn, "__name__", None)
        if name is None:
            raise ConfigError(f"function_tool: {fn!r} has no name. Pass one: function_tool(name=...)(fn)")
        self._context_key = context_parameter(fn)
        self._is_method = _is_unbound_method(fn)
        first = list(inspect.signature(fn).parameters)[:1] if self._is_method else []
        hidden = [*first, *([self._context_key] if self._context_key else [])]
        derived = derive_schema(fn, name=name, description=description, leave_out=hidden, namespace=namespace)
        super().__init__({}, derived.schema)
        self._adapters = derived.adapters
        self.timeout = timeout
        self.inline = inline and not _is_async(fn)
        """True: a call never suspends, and no time limit can end it."""
        self._on_loop = inline or _is_async(fn)
        self._bind(fn)

    def _bind(self, fn: Callable[P, R]) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        # A mutable default would be shared by all sessions: each call gets a copy.
        self._copied_defaults = {
            key: parameter.default
            for key, parameter in inspect.signature(fn).parameters.items()
            if key in self._adapters and isinstance(parameter.default, (list, dict, set, bytearray))
        }

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.fn(*args, **kwargs)

    def __get__(self, instance: object | None, owner: type | None = None) -> FunctionTool[..., R]:
        if instance is None or not self._is_method:
            return self
        bound: FunctionTool[..., R] = copy.copy(self)
        bound._checker = self.checker  # compiled once for all instances
        bound._is_method = False
        bound._bind(self.fn.__get__(instance, owner))
        return bound

    @property
    def checker(self) -> ArgumentChecker:
        """The compiled schema; parameters that the function does not have are refused."""
        if self._checker is None:
            self._checker = ArgumentChecker(self.name, self.tool_schema["function"]["parameters"], closed=True)
        return self._checker

    def check(self) -> None:
        """Raise `ConfigError` if the tool cannot be called: it is a method without an instance."""
        if self._is_method:
            raise ConfigError(
                f"tool {self.name!r} is a method, taken from its class; take it from an instance: instance.{self.name}"
            )
        super().check()

    def read_parameters(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments in the types of the hints. Raises `ToolError` with a text that the model can act on."""
        self.checker.check(arguments)
        return convert_arguments(self.checker, self._adapters, arguments)

    async def create(self, instance_id: str | None = None) -> tuple[str, ToolResponse]:  # type: ignore[override]
        """Nothing to create: a function takes no ``create_kwargs``."""
        return await super().create(instance_id)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], context: ToolContext | None = None, **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Call the function: on a thread, or on the event loop if it is async or ``inline``."""
        arguments: dict[str, Any] = {**copy.deepcopy(self._copied_defaults), **parameters}
        if self._context_key is not None:
            arguments[self._context_key] = context
        call: Callable[..., Any] = self.fn
        try:
            value = call(**arguments) if self._on_loop else await run_in_thread(call, **arguments)
            if inspect.isawaitable(value):
                value = await value
        except SystemExit as error:
            raise RuntimeError(f"tool {self.name!r} tried to exit the process: {error!r}") from error
        return read_result(value, self.name)

    def __repr__(self) -> str:
        return f"<function tool {self.name!r}>"


@overload
def function_tool(fn: Callable[P, R], /) -> FunctionTool[P, R]: ...
@overload
def function_tool(
    name: str | None = None,
    /,
    *,
    description: str | None = None,
    timeout: float | None = None,
    inline: bool = False,
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...
@overload
def function_tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    inline: bool = False,
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...
def function_tool(
    fn: Callable[P, R] | str | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    inline: bool = False,
) -> FunctionTool[P, R] | Callable[[Callable[P, R]], FunctionTool[P, R]]:
    """Make a tool of a function: ``@function_tool``, ``@function_tool("name")`` or ``@function_tool(timeout=5)``.

    The schema comes from the type hints and the docstring (see `agentgym.tool_schema.derive_schema`). The function may
    return text, JSON-like data, None, bytes or a `ToolResponse` (see `agentgym.tool_results.as_response`), or a tuple
    ``(response, reward)`` or ``(response, reward, metrics)``. Sync functions run in threads, async ones on the loop.

    Args:
        fn: the function, or the name of the tool.
        name: of the tool; the function's by default.
        description: for the model; the docstring's by default.
        timeout: seconds one call may take; the toolbox's limit by default. A sync function cannot be stopped: the
            model is answered in time, the thread is quarantined and counted.
        inline: run a sync function on the event loop, without a thread and without a time limit. Only for pure
            functions that always end within microseconds; it saves the way to the thread and back.

    Raises:
        ConfigError: the schema cannot be derived; the message names the parameter.
    """
    # Hints written as strings may name what is local to the caller.
    namespace = sys._getframe(1).f_locals
    if callable(fn):
        return FunctionTool(fn, namespace=namespace)
    if fn is not None and not isinstance(fn, str):
        raise ConfigError(f"function_tool got {fn!r}; expected a function or the tool's name")

    def decorate(function: Callable[P, R]) -> FunctionTool[P, R]:
        return FunctionTool(
            function,
            name=fn or name,
            description=description,
            timeout=timeout,
            inline=inline,
            namespace=namespace,
        )

    return decorate


def context_parameter(fn: Callable[..., Any]) -> str | None:
    """Name of the parameter whose hint is `ToolContext` (also as a string, and with ``| None``), if there is one."""
    for name, parameter in inspect.signature(fn).parameters.items():
        hint = parameter.annotation
        if isinstance(hint, str):
            options = [part.strip(" '\"").rpartition(".")[2] for part in hint.split("|")]
        else:
            options = [getattr(part, "__name__", "") for part in (hint, *typing.get_args(hint))]
        if ToolContext.__name__ in options:
            return name
    return None


def _is_async(fn: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def _is_unbound_method(fn: Callable[..., Any]) -> bool:
    """True for a function defined in a class body: its first parameter is ``self``, without a hint."""
    first = next(iter(inspect.signature(fn).parameters.values()), None)
    return inspect.isfunction(fn) and first is not None and first.name == "self" and first.annotation is first.empty

"""`Toolbox`: the tools of one session. It checks calls, runs them side by side, answers each, and releases the tools.

Concurrency: the calls of one `Toolbox.execute` run as tasks of their own, each bounded by its time limit. Instances are
created in tasks that outlive the call which caused them (a cancelled or timed-out call never leaves a half-made
instance behind) and end at the latest in `Toolbox.release`, which itself cannot be interrupted.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agentgym.errors import ConfigError, SessionClosed, ToolError, did_you_mean
from agentgym.ids import new_id
from agentgym.resources import Entry, Resources, release_all
from agentgym.tool import BaseTool, FunctionTool, ToolContext
from agentgym.tool_arguments import read_arguments
from agentgym.tool_instance import Answer, ToolInstance, bounded, failed, together
from agentgym.tool_results import ByteCutter, CutSide, TokenCutter, ToolResult, join_responses
from agentgym.tool_schema import ToolSchema
from agentgym.types import ToolCall

__all__ = ["TokenCutter", "ToolLimits", "ToolResult", "Toolbox", "read_tools_kwargs", "select_tools"]


class ToolLimits(BaseModel):
    """Limits on the calls of one session."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_parallel_calls: int = Field(default=8, ge=1)
    """Calls of one turn that run, all at the same time; those beyond are answered with an error."""
    call_timeout: float = Field(default=30.0, gt=0)
    """Seconds for one call, the creation of the tool included; a tool's own ``timeout`` goes before it."""
    release_timeout: float = Field(default=5.0, gt=0)
    """Seconds for the release of all tools together; each may use an equal share of what is left."""
    max_tool_response_tokens: int | None = Field(default=None, ge=1)
    """Longer text is cut to so many tokens, with a marker that says how many are gone; None: no limit."""
    truncate_side: CutSide = "middle"
    """The part of a long text that is cut away."""


class Toolbox:
    """The live tools of one session.

    Example:
        >>> toolbox = Toolbox([calculator])
        >>> [result] = await toolbox.execute([ToolCall(name="calculator", arguments={"expression": "6*7"})])
        >>> result.response.text
        '42'
        >>> await toolbox.release()

    Args:
        tools: all tools of the environment.
        selection: names of those that may be used; None: all, empty: none.
        tools_kwargs: per tool name ``{"create_kwargs": {...}}``; None counts as absent.
        limits: see `ToolLimits`.
        context: of the session; a fresh one by default.
        cutter: counts and cuts tokens; None: four UTF-8 bytes are one token. May be set later.

    Raises:
        ConfigError: two tools of one name, an unknown name, a tool that cannot be called, or create arguments that it
            does not take.
    """

    def __init__(
        self,
        tools: Sequence[BaseTool],
        *,
        selection: Sequence[str] | None = None,
        tools_kwargs: Mapping[str, Mapping[str, Any] | None] | None = None,
        limits: ToolLimits | None = None,
        context: ToolContext | None = None,
        cutter: TokenCutter | None = None,
    ) -> None:
        self.context = context or ToolContext(session_id=new_id())
        self.limits = limits or ToolLimits()
        self.cutter = cutter
        where = f"task {self._task_id!r}" if self._task_id is not None else f"session {self.context.session_id}"
        self._tools = {tool.name: tool for tool in select_tools(tools, selection, where=where)}
        self._create_kwargs = read_tools_kwargs(tools, tools_kwargs or {}, where=where)
        self._instances: dict[str, ToolInstance] = {}
        self._resources = Resources()
        self._resources.owner = self.context.session_id
        self._rewards: dict[str, float] | None = None
        self._released = False

    @property
    def tools(self) -> tuple[BaseTool, ...]:
        """The selected tools, in the order in which they were given."""
        return tuple(self._tools.values())

    @property
    def schemas(self) -> list[ToolSchema]:
        """OpenAI function schemas of the selected tools."""
        return [tool.tool_schema for tool in self._tools.values()]

    async def execute(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run the calls of one turn, side by side.

        Returns:
            One result per call, in the order of the calls. What is wrong with a call is told in its result.

        Raises:
            EnvError: a fault in a tool's code; the other calls have ended, cancelled if they had to be.
            InfraError: a tool lost a connection.
            SessionClosed: the tools were released.
        """
        if self._released:
            raise SessionClosed(f"the tools of session {self.context.session_id} were released")
        accepted = calls[: self.limits.max_parallel_calls]
        if len(accepted) == 1:
            answers = [await self._answer(accepted[0])]
        else:
            answers = await together([self._answer(call) for call in accepted])
        answers += [self._refuse_surplus(call, len(calls)) for call in calls[len(accepted) :]]
        return [self._finish(answer) for answer in answers]

    def configure(self, name: str, create_kwargs: Mapping[str, Any]) -> None:
        """Set the arguments with which a tool will be created; one that was created keeps those it had.

        Raises:
            ConfigError: an unknown tool, or arguments that it does not take.
        """
        where = f"session {self.context.session_id}"
        kwargs = {name: {"create_kwargs": create_kwargs}}
        self._create_kwargs |= read_tools_kwargs(self.tools, kwargs, where=where)

    async def rewards(self) -> dict[str, float]:
        """`BaseTool.calc_reward` per tool that was created in this session (functions have none), asked once."""
        if self._rewards is None:
            self._rewards = {
                name: await instance.reward()
                for name, instance in self._instances.items()
                if instance.created and instance.tool.has_reward
            }
        return dict(self._rewards)

    async def release(self) -> None:
        """Release every created tool, in reverse order of creation, exactly once; a failure is logged, not raised.

        Cancelling it, also repeatedly, does not interrupt it: ``CancelledError`` is raised at the end.
        """
        self._released = True
        await self._release(self._resources.drain(close=True))

    @property
    def _task_id(self) -> str | None:
        return self.context.task.id if self.context.task is not None else None

    async def _answer(self, call: ToolCall) -> Answer:
        """Check and run one call; what the model should be told becomes the answer."""
        tool = self._tools.get(call.name)
        if tool is None:
            return failed(call, self._unknown(call.name))
        try:
            parameters = tool.read_parameters(read_arguments(call.arguments))
        except ToolError as error:
            return failed(call, f"Error: {error}")
        instance = self._instance(tool)
        seconds = tool.timeout or self.limits.call_timeout
        try:
            if isinstance(tool, FunctionTool) and tool.inline:
                return await instance.execute(call, parameters)
            return await bounded(self._run(call, instance, parameters), seconds, what=f"tool {tool.name!r}")
        except ToolError as error:  # of the creation
            return failed(call, str(error))
        except TimeoutError:
            return failed(call, f"Error: the call of {tool.name!r} took more than {seconds:g} s and was given up.")
        finally:
            if tool.lifecycle == "call":
                await self._release([Entry(f"tool {tool.name!r}", instance.release)])

    async def _run(self, call: ToolCall, instance: ToolInstance, parameters: dict[str, Any]) -> Answer:
        try:
            await instance.ready()
        finally:
            if instance.failed and self._instances.get(call.name) is instance:
                del self._instances[call.name]  # the next call tries again
        return await instance.execute(call, parameters)

    async def _release(self, entries: Sequence[Entry]) -> None:
        report = await release_all(entries, owner=self.context.session_id, timeout=self.limits.release_timeout)
        if report.interrupted is not None:
            raise report.interrupted

    def _instance(self, tool: BaseTool) -> ToolInstance:
        """The session's instance, whose creation starts here if it is the first call; a new one for ``"call"``."""
        instance = self._instances.get(tool.name)
        if instance is None:
            instance = ToolInstance(tool, self.context, self._create_kwargs.get(tool.name, {}))
            if tool.lifecycle == "session":
                self._resources.push(f"tool {tool.name!r}", instance.release)
                self._instances[tool.name] = instance
        return instance

    def _unknown(self, name: str) -> str:
        if not self._tools:
            return f"Error: unknown tool {name!r}. No tools are available; answer without."
        known = ", ".join(self._tools)
        return f"Error: unknown tool {name!r}.{did_you_mean(name, self._tools)} Available tools: {known}."

    def _refuse_surplus(self, call: ToolCall, count: int) -> Answer:
        limit = self.limits.max_parallel_calls
        return failed(
            call,
            f"Error: {count} calls in one turn, but at most {limit} run; this one did not. Repeat it in another turn.",
        )

    def _finish(self, answer: Answer) -> ToolResult:
        """Put the text of the creation first, cut the text."""
        response = answer.result.response
        if answer.instance is not None and answer.instance.greeting is not None:
            response = join_responses(answer.instance.greeting, response)
            answer.instance.greeting = None
        limit = self.limits.max_tool_response_tokens
        if limit is not None and response.text:
            text = (self.cutter or ByteCutter()).cut(response.text, limit, self.limits.truncate_side)
            response = replace(response, text=text)
        return answer.result if response is answer.result.response else replace(answer.result, response=response)


def select_tools(tools: Sequence[BaseTool], selection: Sequence[str] | None, *, where: str) -> list[BaseTool]:
    """The tools that a task may use, in the order of ``tools``.

    Args:
        tools: all tools of the environment.
        selection: names (also as a numpy array); None: all, empty: none.
        where: the task or the row of the data file, for messages.

    Raises:
        ConfigError: two tools of one name, an unknown name, or a tool that cannot be called.
    """
    for tool in tools:
        tool.check()
    known = {tool.name: tool for tool in tools}
    if len(known) < len(tools):
        names = [tool.name for tool in tools]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(f"tools of the same name: {', '.join(map(repr, twice))}. Rename or remove one of each.")
    if selection is None:
        return list(tools)
    if isinstance(selection, str):
        raise ConfigError(f"{where}: tool_selection {selection!r}: expected a list of names, e.g. [{selection!r}]")
    wanted = [str(name) for name in selection]
    _check_names(wanted, known, f"{where}: tool_selection")
    return [tool for tool in tools if tool.name in wanted]


def read_tools_kwargs(
    tools: Sequence[BaseTool], tools_kwargs: Mapping[str, Mapping[str, Any] | None], *, where: str
) -> dict[str, dict[str, Any]]:
    """The ``create_kwargs`` per tool name; None counts as absent at both levels.

    Raises:
        ConfigError: an unknown tool, a key other than ``create_kwargs``, or arguments that `create` does not take.
    """
    found: dict[str, dict[str, Any]] = {}
    known = {tool.name: tool for tool in tools}
    for name, settings in tools_kwargs.items():
        if settings is None:
            continue
        _check_names([name], known, f"{where}: tools_kwargs")
        unknown = set(settings) - {"create_kwargs"}
        if unknown:
            raise ConfigError(f"{where}: tools_kwargs[{name!r}] has {sorted(unknown)}; the only key is 'create_kwargs'")
        kwargs = dict(settings.get("create_kwargs") or {})
        try:
            inspect.signature(known[name].create).bind(None, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{where}: create_kwargs {sorted(kwargs)} of tool {name!r}: {error}") from error
        found[name] = kwargs
    return found


def _check_names(names: Sequence[str], known: Mapping[str, object], where: str) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{where}: unknown tool {name!r}.{did_you_mean(name, known)} Known: {', '.join(known) or 'none'}."
            )

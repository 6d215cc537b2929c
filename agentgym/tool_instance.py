"""One tool in one session: its creation, its calls within their time limit, its release."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from agentgym.errors import EnvError, ToolError, boundary
from agentgym.ids import new_id
from agentgym.resources import CANCEL_GRACE, Resources, outlast
from agentgym.tool import BaseTool, FunctionTool, ToolContext
from agentgym.tool_results import ToolResult, read_result
from agentgym.types import ToolCall, ToolResponse

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """A result, and the instance that gave it (None: the call did not reach a tool)."""

    result: ToolResult
    instance: ToolInstance | None = None


def failed(call: ToolCall, text: str, instance: ToolInstance | None = None) -> Answer:
    """The answer that tells the model what went wrong."""
    return Answer(ToolResult(call=call, response=ToolResponse(text=text), metrics={}, error=True), instance)


class ToolInstance:
    """A tool's instance in a session.

    The creation is a task that starts with the first `ready` and outlives a call that is cancelled or runs out of time:
    later calls wait for the same one, and `release` ends it and releases what it made.

    Args:
        tool: the tool.
        session: context of the session; the instance gets one with `ToolContext.resources` of its own.
        create_kwargs: for `BaseTool.create`.
    """

    def __init__(self, tool: BaseTool, session: ToolContext, create_kwargs: Mapping[str, Any]) -> None:
        self.tool = tool
        self.greeting: ToolResponse | None = None
        """The response of the creation, until a result has carried it."""
        self._context = replace(session, resources=Resources())
        self._context.resources.owner = session.session_id
        self._create_kwargs = create_kwargs
        self._creation: asyncio.Task[None] | None = None
        self._id = ""
        if isinstance(tool, FunctionTool):
            self._id = session.session_id  # nothing to create

    @property
    def created(self) -> bool:
        """True once the creation succeeded."""
        return bool(self._id)

    @property
    def failed(self) -> bool:
        """True once the creation failed or was cancelled."""
        return self._creation is not None and self._creation.done() and not self.created

    async def ready(self) -> None:
        """Wait for the creation, the same for all callers. Raises what it raised."""
        if self.created:
            return
        if self._creation is None:
            self._creation = asyncio.create_task(self._create(), name=f"create of tool {self.tool.name!r}")
        await asyncio.shield(self._creation)

    async def execute(self, call: ToolCall, parameters: dict[str, Any]) -> Answer:
        """Run one call; a `ToolError` becomes the answer."""
        try:
            with self._boundary("execute"):
                value = await self.tool.execute(self._id, parameters, **self._asked("execute"))
                response, reward, metrics = read_result(value, self.tool.name)
        except ToolError as error:
            return failed(call, str(error), self)
        return Answer(ToolResult(call=call, response=response, reward=reward, metrics=metrics), self)

    async def reward(self) -> float:
        """What `BaseTool.calc_reward` says."""
        with self._boundary("calc_reward"):
            return float(await self.tool.calc_reward(self._id, **self._asked("calc_reward")))

    async def release(self) -> None:
        """End the creation if it still runs, and release what it made."""
        if self._creation is not None:
            self._creation.cancel()
            await asyncio.wait({self._creation})
            if not self.created and not self._creation.cancelled():
                self._creation.exception()  # its caller was told; one that is gone did not ask
        if not self.created:
            return
        try:
            await self.tool.release(self._id, **self._asked("release"))
        finally:
            await self._context.resources.release()

    async def _create(self) -> None:
        tool = self.tool
        instance_id = f"{self._context.session_id}-{tool.name}-{new_id()}"
        try:
            with self._boundary("create"):
                value = await tool.create(instance_id, **self._asked("create"), **self._create_kwargs)
                match value:
                    case (str(made), ToolResponse() as response) if made:
                        self._id, self.greeting = made, response
                    case _:
                        raise TypeError(f"create returned {value!r}; expected (instance_id, ToolResponse)")
        except BaseException:
            await self._context.resources.release()
            raise

    def _boundary(self, what: str) -> AbstractContextManager[None]:
        task = self._context.task
        return boundary(f"{what} of tool {self.tool.name!r}", task_id=task.id if task is not None else None)

    def _asked(self, method: str) -> dict[str, Any]:
        """The context, for a method that asks for it."""
        key = self.tool.context_key(method)
        return {key: self._context} if key is not None else {}


async def bounded(coroutine: Coroutine[Any, Any, T], seconds: float, *, what: str) -> T:
    """Await foreign code in a task of its own, for at most ``seconds``.

    A task that ignores its cancellation is left behind after a grace period.

    Raises:
        TimeoutError: the time ran out.
        EnvError: the code cancelled itself; only the caller of this function may do that.
    """
    task = asyncio.create_task(coroutine, name=what)
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _stop(task)
        raise
    if not task.done():
        interrupted = await _stop(task)
        if interrupted is not None:
            raise interrupted
        raise TimeoutError
    if task.cancelled():
        raise EnvError(f"{what} raised CancelledError although nobody cancelled it", error_type="CancelledError")
    return task.result()


async def together(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. At the first error the others are cancelled and awaited; the first in order is raised.

    The coroutines must end when they are cancelled, as `bounded` does.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    interrupted: asyncio.CancelledError | None = None
    if tasks:
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError as error:
            interrupted = error
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    for task in running:
        interrupted = await outlast(task) or interrupted
    failures = [task.exception() for task in tasks if not task.cancelled()]
    if interrupted is not None:
        raise interrupted
    for failure in failures:
        if failure is not None:
            raise failure
    return [task.result() for task in tasks]


async def _stop(task: asyncio.Task[Any]) -> asyncio.CancelledError | None:
    """Cancel and wait for the end. Returns a cancellation of the caller that was put off meanwhile."""
    task.cancel()
    task.add_done_callback(_forget)
    interrupted = await outlast(task, CANCEL_GRACE)
    if not task.done():
        logger.error("%s ignores its cancellation, left behind", task.get_name())
    return interrupted


def _forget(task: asyncio.Task[Any]) -> None:
    """Whatever a cancelled call ends with is of no interest; asking keeps asyncio from complaining."""
    if not task.cancelled():
        task.exception()

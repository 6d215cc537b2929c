from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Awaitable
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from agentgym.errors import ConfigError, ToolError
from agentgym.tool import BaseTool, FunctionTool, ToolContext, context_parameter, function_tool
from agentgym.types import ToolResponse


class Point(BaseModel):
    x: float
    y: float = 0.0


async def call(tool: BaseTool, context: ToolContext | None = None, **arguments: Any) -> str | None:
    parameters = tool.read_parameters(arguments)
    extra = {"context": context} if isinstance(tool, FunctionTool) else {}
    response, _, _ = await tool.execute("instance", parameters, **extra)
    return response.text


def test_decorator_bare_named_and_with_settings() -> None:
    @function_tool
    def bare(a: int) -> int:
        """One."""
        return a

    @function_tool("named")
    def first(a: int) -> int:
        """Two."""
        return a

    @function_tool(name="other", description="Three.", timeout=2.0)
    def second(a: int) -> int:
        """Not this."""
        return a

    described = [
        (tool.name, tool.tool_schema["function"]["description"], tool.timeout) for tool in (bare, first, second)
    ]
    assert described == [("bare", "One.", None), ("named", "Two.", None), ("other", "Three.", 2.0)]


def test_a_function_tool_is_still_the_function() -> None:
    @function_tool
    def add(a: int, b: int = 1) -> int:
        """Add."""
        return a + b

    assert add(2) == 3
    assert add(a=2, b=2) == 4
    assert add.__doc__ == "Add."
    assert copy.deepcopy(add)(1) == 2


@pytest.mark.parametrize("wrong", [int, 3])
def test_only_functions_become_tools(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="expected a function"):
        function_tool(wrong)


def test_a_tool_is_not_wrapped_twice() -> None:
    @function_tool
    def f() -> None: ...

    with pytest.raises(ConfigError, match="expected a function"):
        function_tool(f)


async def test_arguments_arrive_in_the_types_of_the_hints() -> None:
    seen: list[Any] = []

    @function_tool(inline=True)
    def f(x: float, n: int, point: Point, kind: Literal["a"], points: list[Point] | None = None) -> None:
        seen.append((x, type(x), n, type(n), point, kind, points))

    await call(f, x=3, n=4.0, point={"x": 1}, kind="a", points=[{"x": 2, "y": 3}])
    assert seen == [(3.0, float, 4, int, Point(x=1), "a", [Point(x=2, y=3)])]


def test_values_that_the_type_refuses_are_told() -> None:
    from datetime import date

    @function_tool
    def f(day: date) -> None: ...

    assert f.read_parameters({"day": "2024-02-29"}) == {"day": date(2024, 2, 29)}
    with pytest.raises(ToolError, match=r"parameter 'day': Input should be a valid date.*got string \"2024-02-30\""):
        f.read_parameters({"day": "2024-02-30"})


def test_unknown_parameters_of_a_function_are_refused() -> None:
    @function_tool
    def f(expression: str) -> None: ...

    with pytest.raises(ToolError, match=r"unknown parameter 'expr', did you mean 'expression'"):
        f.read_parameters({"expression": "1", "expr": "1"})


async def test_sync_functions_run_on_a_thread_async_and_inline_ones_on_the_loop() -> None:
    @function_tool
    def sync() -> str:
        return threading.current_thread().name

    @function_tool
    async def coroutine() -> str:
        return threading.current_thread().name

    @function_tool(inline=True)
    def inline() -> str:
        return threading.current_thread().name

    @function_tool
    def gives_a_coroutine() -> Awaitable[str]:
        return coroutine.fn()

    here = threading.current_thread().name
    assert (await call(sync) or "").startswith("agentgym-tool-")
    assert [await call(coroutine), await call(inline), await call(gives_a_coroutine)] == [here] * 3


async def test_mutable_defaults_are_not_shared_by_calls() -> None:  # D8
    @function_tool
    def remember(item: str, seen: list[str] = []) -> list[str]:  # noqa: B006
        seen.append(item)
        return seen

    assert [await call(remember, item=item) for item in "ab"] == ['["a"]', '["b"]']


async def test_the_context_is_injected() -> None:
    @function_tool
    def f(a: int, where: ToolContext) -> str:
        where.state["a"] = a
        return where.session_id

    context = ToolContext(session_id="s1")
    assert await call(f, context, a=3) == "s1"
    assert context.state == {"a": 3}


class Room:
    """An environment with methods as tools."""

    def __init__(self) -> None:
        self.place = 0

    @function_tool
    def move(self, steps: int) -> int:
        """Move on.

        Args:
            steps: how far
        """
        self.place += steps
        return self.place

    @staticmethod
    @function_tool
    def double(n: int) -> int:
        return 2 * n


async def test_methods_are_bound_to_their_instance() -> None:  # A18
    one, two = Room(), Room()
    assert one.move.tool_schema["function"]["parameters"]["properties"] == {
        "steps": {"type": "integer", "description": "how far"}
    }
    assert [await call(one.move, steps=2), await call(one.move, steps=2), await call(two.move, steps=1)] == [
        "2",
        "4",
        "1",
    ]
    assert one.move(1) == 5
    assert await call(one.double, n=4) == "8"


def test_an_unbound_method_says_so() -> None:
    with pytest.raises(ConfigError, match=r"'move' is a method, taken from its class; take it from an instance"):
        Room.move.check()
    Room().move.check()
    Room.double.check()


def test_parameters_that_are_no_schema_are_found_before_a_call() -> None:
    tool = BaseTool({}, {"function": {"name": "f", "parameters": {"type": "object", "properties": 3}}})
    with pytest.raises(ConfigError, match=r"'f': parameters are not a JSON schema: at \$\.properties"):
        tool.check()


@pytest.mark.parametrize("timeout", [0, -1.0])
def test_a_time_limit_is_positive(timeout: float) -> None:
    with pytest.raises(ConfigError, match=r"timeout=.* above 0"):
        function_tool(timeout=timeout)(lambda: None)


async def test_a_tool_kept_as_a_class_attribute_stays_itself() -> None:
    @function_tool
    def f(a: int) -> int:
        return a

    class Holder:
        tool = f

    assert Holder().tool is f


async def test_exit_in_a_tool_is_a_fault_not_the_end_of_the_process() -> None:
    @function_tool
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match=r"'leave' tried to exit the process: SystemExit\(3\)"):
        await call(leave)


def test_context_parameter_is_found_by_its_hint() -> None:
    def plain(context: str) -> None: ...
    def typed(a: int, c: ToolContext) -> None: ...

    assert context_parameter(plain) is None
    assert context_parameter(typed) == "c"
    assert context_parameter(BaseTool.execute) is None


SCHEMA = {"type": "function", "function": {"name": "echo", "description": "Echo.", "parameters": {"type": "object"}}}


class Echo(BaseTool):
    tool_schema = SCHEMA

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        parameters["seen"] = True
        parameters.get("items", []).append(1)
        return ToolResponse(text=str(sorted(parameters))), None, {}


async def test_schema_of_the_class_or_of_the_constructor() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    assert (Echo().name, Echo({}, other).name, Echo({"k": 1}).config) == ("echo", "other", {"k": 1})
    with pytest.raises(ConfigError, match="BaseTool has no tool_schema"):
        BaseTool()


async def test_a_tool_cannot_change_the_recorded_call() -> None:
    items = [0]
    assert await call(Echo(), items=items) == "['items', 'seen']"
    assert items == [0]


async def test_defaults_of_the_base_class() -> None:
    tool = BaseTool({}, SCHEMA)
    assert await tool.create("id") == ("id", ToolResponse())
    assert len((await tool.create())[0]) == 16
    assert await tool.calc_reward("id") == 0.0
    await tool.release("id")
    with pytest.raises(NotImplementedError, match=r"'echo' \(BaseTool\) does not define execute"):
        await tool.execute("id", {})


async def test_one_function_tool_serves_several_loops() -> None:
    @function_tool
    def f() -> str:
        return "x"

    results: list[str | None] = []
    thread = threading.Thread(target=lambda: results.append(asyncio.run(call(f))))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert [*results, await call(f)] == ["x", "x"]

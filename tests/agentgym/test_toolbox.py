from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.errors import ConfigError, EnvError, InfraError, SessionClosed, ToolError
from agentgym.tool import BaseTool, Lifecycle, ToolContext, function_tool
from agentgym.tool_results import CutSide, ToolResult
from agentgym.tool_threads import run_in_thread
from agentgym.toolbox import Toolbox, ToolLimits, select_tools
from agentgym.types import Task, ToolCall, ToolResponse

CONTEXT = ToolContext(session_id="s1", task=Task(id="t1", prompt="p"))


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, id="call00001")


async def answer(toolbox: Toolbox, name: str, /, **arguments: Any) -> str | None:
    [result] = await toolbox.execute([call(name, **arguments)])
    return result.response.text


class Recorder(BaseTool):
    """A tool with state that writes down what is done with it."""

    def __init__(self, name: str = "recorder", log: list[str] | None = None, **behaviour: Any) -> None:
        super().__init__({}, {"type": "function", "function": {"name": name}})
        self.log: list[str] = [] if log is None else log
        self.behaviour = behaviour
        self.lifecycle: Lifecycle = behaviour.get("lifecycle", "session")
        self.counts: dict[str, int] = {}
        self.reached: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def _do(self, what: str) -> None:
        self.log.append(f"{what} {self.name}")
        self.reached[what].set()
        action = self.behaviour.get(what)
        if isinstance(action, BaseException):
            raise action
        if isinstance(action, float):
            await asyncio.sleep(action)
        elif isinstance(action, asyncio.Event):
            await action.wait()

    async def create(self, instance_id: str | None = None, start: int = 0, **kwargs: Any) -> tuple[str, ToolResponse]:
        assert instance_id is not None
        await self._do("create")
        self.counts[instance_id] = start
        self.log.append(f"created {self.name}")
        self.reached["created"].set()
        return instance_id, ToolResponse(text=self.behaviour.get("greeting"))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        await self._do("execute")
        self.counts[instance_id] += 1
        return ToolResponse(text=str(self.counts[instance_id])), 0.5, {"n": self.counts[instance_id]}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        await self._do("calc_reward")
        return float(self.counts[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._do("release")
        del self.counts[instance_id]
        self.log.append(f"released {self.name}")


@function_tool
def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b


@function_tool
async def reset_memory() -> str:
    return "forgotten"


# -- answers ---------------------------------------------------------------------------------------------------------


async def test_a_call_is_answered_by_a_tool_message() -> None:
    [result] = await Toolbox([add]).execute([call("add", a=2)])
    assert result == ToolResult(call=call("add", a=2), response=ToolResponse(text="3"), metrics={})
    assert result.message() == {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "3"}


@pytest.mark.parametrize("arguments", ["", "  ", {}, None])
async def test_no_arguments_in_any_spelling(arguments: Any) -> None:  # A9
    [result] = await Toolbox([reset_memory]).execute([ToolCall(name="reset_memory", arguments=arguments)])
    assert (result.response.text, result.error) == ("forgotten", False)


@pytest.mark.parametrize("arguments", ["", "  ", {}, None])
async def test_missing_required_parameter_is_named(arguments: Any) -> None:  # A9, A14
    [result] = await Toolbox([add]).execute([ToolCall(name="add", arguments=arguments)])
    assert result.error
    assert result.response.text == (
        "Error: invalid arguments for 'add': missing required parameter 'a' (integer). "
        "Parameters: a (integer, required), b (integer)"
    )


async def test_unknown_tool_lists_what_exists() -> None:  # A14
    toolbox = Toolbox([add, reset_memory])
    assert await answer(toolbox, "solve_integral") == (
        "Error: unknown tool 'solve_integral'. Available tools: add, reset_memory."
    )
    assert (
        await answer(toolbox, "ad")
        == "Error: unknown tool 'ad'. Did you mean 'add'? Available tools: add, reset_memory."
    )
    assert await answer(Toolbox([add], selection=[]), "add") == (
        "Error: unknown tool 'add'. No tools are available; answer without."
    )


async def test_tool_error_is_the_answer_verbatim() -> None:
    @function_tool
    def refuse() -> None:
        raise ToolError("not today")

    [result] = await Toolbox([refuse]).execute([call("refuse")])
    assert (result.response.text, result.error, result.reward) == ("not today", True, None)


async def test_reward_and_metrics_of_a_result() -> None:
    @function_tool
    def f() -> tuple[str, float, dict[str, int]]:
        return "x", 0.25, {"steps": 3}

    [result] = await Toolbox([f]).execute([call("f")])
    assert (result.response.text, result.reward, result.metrics) == ("x", 0.25, {"steps": 3})


async def test_no_calls_give_no_results() -> None:
    assert await Toolbox([add]).execute([]) == []


# -- several calls ---------------------------------------------------------------------------------------------------


async def test_results_keep_the_order_of_the_calls_and_surplus_calls_are_answered() -> None:  # A15
    running, peak, lock = 0, 0, threading.Lock()
    a_runs, b_done = threading.Event(), threading.Event()

    @contextmanager
    def counted() -> Iterator[None]:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        yield
        with lock:
            running -= 1

    @function_tool
    def a() -> str:
        with counted():
            a_runs.set()
            b_done.wait(5)  # ends after b
        return "A"

    @function_tool
    async def b() -> str:
        with counted():
            await run_in_thread(a_runs.wait, 5)  # while a runs
        b_done.set()
        return "B"

    @function_tool
    def c() -> str:
        with counted():
            return "C"

    toolbox = Toolbox([a, b, c], limits=ToolLimits(max_parallel_calls=2))
    texts = set()
    for _ in range(20):
        a_runs.clear()
        b_done.clear()
        results = await toolbox.execute([call("a"), call("b"), call("c")])
        texts.add(tuple(result.response.text for result in results))
        assert [result.error for result in results] == [False, False, True]
    surplus = "Error: 3 calls in one turn, but at most 2 run; this one did not. Repeat it in another turn."
    assert texts == {("A", "B", surplus)}
    assert peak == 2


async def test_wrong_calls_beside_right_ones() -> None:
    results = await Toolbox([add]).execute([call("nope"), call("add", a=1), call("add", a="1"), call("add", a=2)])
    assert [result.error for result in results] == [True, False, True, False]
    assert [results[1].response.text, results[3].response.text] == ["2", "3"]


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (ZeroDivisionError("oops"), EnvError, "execute of tool 'bad' .task t1. raised ZeroDivisionError: oops"),
        (ConnectionResetError("gone"), InfraError, "execute of tool 'bad' .task t1. lost its connection"),
        (TimeoutError("inner"), InfraError, "TimeoutError: inner"),
        (asyncio.CancelledError(), EnvError, "raised CancelledError although nobody cancelled it"),
    ],
)
async def test_a_fault_is_raised_after_the_others_have_ended(
    error: BaseException, expected: type[Exception], words: str
) -> None:
    log: list[str] = []
    tools = [Recorder("bad", log, execute=error), Recorder("slow", log, execute=60.0), Recorder("good", log)]
    toolbox = Toolbox(tools, context=CONTEXT)
    with pytest.raises(expected, match=words):
        await toolbox.execute([call("slow"), call("bad"), call("good")])
    await toolbox.release()
    assert [tool.counts for tool in tools] == [{}, {}, {}]
    assert sorted(line for line in log if line.startswith("released")) == [
        "released bad",
        "released good",
        "released slow",
    ]


async def test_a_fault_of_one_call_alone() -> None:
    @function_tool
    def f() -> object:
        return object()

    with pytest.raises(EnvError, match=r"task t1.*tool 'f' returned a object that has no JSON form") as caught:
        await Toolbox([f], context=CONTEXT).execute([call("f")])
    assert (caught.value.task_id, caught.value.error_type) == ("t1", "TypeError")


# -- time limits -----------------------------------------------------------------------------------------------------


async def test_a_call_that_takes_too_long_is_answered_and_the_session_goes_on() -> None:
    tool = Recorder(execute=60.0)
    toolbox = Toolbox([tool, add], limits=ToolLimits(call_timeout=0.3))
    [slow, quick] = await toolbox.execute([call("recorder"), call("add", a=1)])
    assert slow.response.text == "Error: the call of 'recorder' took more than 0.3 s and was given up."
    assert (slow.error, quick.response.text) == (True, "2")
    tool.behaviour.clear()
    assert await answer(toolbox, "recorder") == "1"  # the same instance


async def test_a_tool_has_its_own_limit() -> None:
    @function_tool(timeout=0.02)
    async def slow() -> None:
        await asyncio.sleep(60)

    assert await answer(Toolbox([slow]), "slow") == "Error: the call of 'slow' took more than 0.02 s and was given up."


async def test_a_stuck_thread_does_not_hold_up_the_answer() -> None:
    go = threading.Event()

    @function_tool(timeout=0.02)
    def stuck() -> None:
        go.wait(10)

    assert "was given up" in (await answer(Toolbox([stuck]), "stuck") or "")
    go.set()


async def test_a_tool_that_ignores_its_cancellation_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    go = asyncio.Event()

    @function_tool(timeout=0.02)
    async def stubborn() -> None:
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue

    assert "was given up" in (await answer(Toolbox([stubborn]), "stubborn") or "")
    assert "tool 'stubborn' ignores its cancellation" in caplog.text
    go.set()


async def test_a_creation_that_takes_too_long_goes_on_for_the_next_call() -> None:
    ready = asyncio.Event()
    tool = Recorder(create=ready)
    toolbox = Toolbox([tool], limits=ToolLimits(call_timeout=0.3))
    assert "was given up" in (await answer(toolbox, "recorder") or "")
    ready.set()
    assert await answer(toolbox, "recorder") == "1"
    assert tool.log.count("create recorder") == 1


# -- lifecycle -------------------------------------------------------------------------------------------------------


async def test_created_at_the_first_call_and_released_in_reverse_order() -> None:
    log: list[str] = []
    toolbox = Toolbox([Recorder(name, log) for name in "abc"])
    assert log == []
    assert [await answer(toolbox, name) for name in "bab"] == ["1", "1", "2"]
    assert await toolbox.rewards() == {"b": 2.0, "a": 1.0}
    await toolbox.release()
    assert log == [
        *("create b", "created b", "execute b", "create a", "created a", "execute a", "execute b"),
        *("calc_reward b", "calc_reward a", "release a", "released a", "release b", "released b"),
    ]


async def test_concurrent_first_calls_create_once() -> None:
    tool = Recorder(create=0.01)
    results = await Toolbox([tool]).execute([call("recorder")] * 4)
    assert sorted(result.response.text or "" for result in results) == ["1", "2", "3", "4"]
    assert tool.log.count("create recorder") == 1


async def test_sessions_do_not_see_each_other() -> None:  # D8
    tool = Recorder(execute=0.001)
    boxes = [Toolbox([tool]) for _ in range(4)]
    counts = await asyncio.gather(*(answer(box, "recorder") for box in boxes for _ in range(3)))
    assert sorted(count or "" for count in counts) == ["1"] * 4 + ["2"] * 4 + ["3"] * 4
    for box in boxes:
        await box.release()
    assert tool.counts == {}


async def test_lifecycle_call_makes_a_new_instance_every_time() -> None:
    tool = Recorder(lifecycle="call", greeting="hello")
    toolbox = Toolbox([tool])
    assert [await answer(toolbox, "recorder") for _ in range(2)] == ["hello\n1", "hello\n1"]
    once = [f"{what} recorder" for what in ("create", "created", "execute", "release", "released")]
    assert tool.log == once * 2
    assert await toolbox.rewards() == {}
    await toolbox.release()
    assert tool.log == once * 2


@pytest.mark.parametrize("behaviour", [{"execute": ToolError("x")}, {"execute": ValueError("x")}, {"execute": 60.0}])
async def test_lifecycle_call_releases_whatever_happens(behaviour: dict[str, Any]) -> None:
    tool = Recorder(lifecycle="call", **behaviour)
    toolbox = Toolbox([tool], limits=ToolLimits(call_timeout=0.02))
    with suppress(EnvError):
        [result] = await toolbox.execute([call("recorder")])
        assert result.error
    assert tool.log[-1] == "released recorder"


async def test_the_greeting_precedes_the_first_result_only() -> None:
    toolbox = Toolbox([Recorder(greeting="ready", create=0.01)])
    results = await toolbox.execute([call("recorder"), call("recorder")])
    assert [result.response.text for result in results] == ["ready\n1", "2"]
    assert await answer(toolbox, "recorder") == "3"


async def test_the_greeting_precedes_an_error_of_the_first_call() -> None:
    toolbox = Toolbox([Recorder(greeting="ready", execute=ToolError("broken"))])
    assert [await answer(toolbox, "recorder") for _ in range(2)] == ["ready\nbroken", "broken"]


async def test_create_kwargs_arrive_as_keyword_arguments() -> None:
    toolbox = Toolbox([Recorder()], tools_kwargs={"recorder": {"create_kwargs": {"start": 5}}})
    assert await answer(toolbox, "recorder") == "6"


async def test_rewards_are_asked_once_of_tools_that_were_used() -> None:
    tool = Recorder()
    toolbox = Toolbox([tool, Recorder("unused"), add])
    await toolbox.execute([call("recorder"), call("add", a=1)])
    assert await toolbox.rewards() == await toolbox.rewards() == {"recorder": 1.0}
    assert tool.log.count("calc_reward recorder") == 1


async def test_a_fault_in_calc_reward_is_an_env_error() -> None:
    toolbox = Toolbox([Recorder(calc_reward=KeyError("k"))], context=CONTEXT)
    await toolbox.execute([call("recorder")])
    with pytest.raises(EnvError, match=r"calc_reward of tool 'recorder' \(task t1\) raised KeyError"):
        await toolbox.rewards()


async def test_a_tool_that_asks_gets_the_context_of_the_session() -> None:
    class Curious(Recorder):
        async def create(  # type: ignore[override]
            self, instance_id: str | None = None, *, where: ToolContext, **kwargs: Any
        ) -> tuple[str, ToolResponse]:
            assert not kwargs
            where.state["created"] = where.session_id
            return await super().create(instance_id)

        async def execute(  # type: ignore[override]
            self, instance_id: str, parameters: dict[str, Any], context: ToolContext
        ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
            assert context.task is CONTEXT.task
            return ToolResponse(text=str(context.state)), None, {}

    assert await answer(Toolbox([Curious()], context=CONTEXT), "recorder") == "{'created': 's1'}"


async def test_tools_of_a_session_share_the_state_of_the_context() -> None:
    @function_tool
    def put(value: int, context: ToolContext) -> None:
        context.state["x"] = value

    @function_tool
    def get(context: ToolContext) -> int:
        value: int = context.state["x"]
        return value

    one, two = Toolbox([put, get]), Toolbox([put, get])
    await one.execute([call("put", value=1)])
    await two.execute([call("put", value=2)])
    assert [await answer(one, "get"), await answer(two, "get")] == ["1", "2"]


# -- failing and cancelled creations ---------------------------------------------------------------------------------


class Opening(Recorder):
    """Opens two things; between them something may happen."""

    async def create(  # type: ignore[override]
        self, instance_id: str | None = None, *, context: ToolContext
    ) -> tuple[str, ToolResponse]:
        async def close(name: str) -> None:
            self.log.append(f"closed {name}")

        context.resources.push("first", lambda: close("first"))
        made = await super().create(instance_id)
        context.resources.push("second", lambda: close("second"))
        return made


async def test_a_creation_that_fails_half_way_unwinds_and_is_never_released() -> None:  # D1
    tool = Opening(create=ToolError("no licence"))
    toolbox = Toolbox([tool])
    [result] = await toolbox.execute([call("recorder")])
    assert (result.response.text, result.error) == ("no licence", True)
    assert tool.log == ["create recorder", "closed first"]
    tool.behaviour.clear()
    assert await answer(toolbox, "recorder") == "1"  # the next call tries again
    await toolbox.release()
    assert tool.log[-4:] == ["release recorder", "released recorder", "closed second", "closed first"]
    assert tool.log.count("release recorder") == 1


async def test_a_faulty_creation_is_raised() -> None:
    class Wrong(Recorder):
        async def create(self, instance_id: str | None = None, start: int = 0, **kwargs: Any) -> Any:
            return instance_id

    for tool, words in ((Recorder(create=OSError("disk")), "OSError: disk"), (Wrong(), "create returned '")):
        toolbox = Toolbox([tool])
        with pytest.raises(EnvError, match=rf"create of tool 'recorder' raised .*{words}"):
            await toolbox.execute([call("recorder")])
        await toolbox.release()
        assert "release recorder" not in tool.log


@pytest.mark.parametrize("lifecycle", ["session", "call"])
async def test_cancelled_during_creation_leaves_nothing(lifecycle: Lifecycle) -> None:  # D1
    tool = Opening(create=asyncio.Event(), lifecycle=lifecycle)
    toolbox = Toolbox([tool])
    run = asyncio.ensure_future(toolbox.execute([call("recorder")]))
    await tool.reached["create"].wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await asyncio.wait_for(toolbox.release(), 1)
    assert tool.log == ["create recorder", "closed first"]


async def test_a_creation_that_finishes_after_its_caller_was_cancelled_is_released_once() -> None:  # D1
    ready = asyncio.Event()
    tool = Recorder(create=ready)
    toolbox = Toolbox([tool])
    run = asyncio.ensure_future(toolbox.execute([call("recorder")]))
    await tool.reached["create"].wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    ready.set()
    await tool.reached["created"].wait()
    await toolbox.release()
    assert tool.log == ["create recorder", "created recorder", "release recorder", "released recorder"]


async def test_a_creation_that_hangs_and_ignores_cancellation_does_not_hold_up_the_release() -> None:  # D1
    go = asyncio.Event()

    class Hanging(Recorder):
        async def create(
            self, instance_id: str | None = None, start: int = 0, **kwargs: Any
        ) -> tuple[str, ToolResponse]:
            while not go.is_set():
                try:
                    await go.wait()
                except asyncio.CancelledError:
                    continue
            raise ToolError("too late")

    other = Recorder("other")
    toolbox = Toolbox([other, Hanging()], limits=ToolLimits(call_timeout=0.05, release_timeout=0.1))
    await toolbox.execute([call("other"), call("recorder")])
    await asyncio.wait_for(toolbox.release(), 2)
    assert other.log[-1] == "released other"
    go.set()


# -- release ---------------------------------------------------------------------------------------------------------


async def test_every_release_is_attempted_and_failures_are_logged(caplog: pytest.LogCaptureFixture) -> None:  # D3
    log: list[str] = []
    tools = [
        Recorder("a", log),
        Recorder("b", log, release=RuntimeError("stuck lid")),
        Recorder("c", log, release=asyncio.CancelledError()),
        Recorder("d", log, release=60.0),
        Recorder("e", log),
    ]
    toolbox = Toolbox(tools, context=CONTEXT, limits=ToolLimits(release_timeout=0.2))
    await toolbox.execute([call(name) for name in "abcde"])
    log.clear()
    with caplog.at_level(logging.ERROR):
        await toolbox.release()
    assert log == ["release e", "released e", "release d", "release c", "release b", "release a", "released a"]
    assert all("session s1" in record.getMessage() for record in caplog.records)
    assert [name for name in "bcd" if f"tool '{name}'" in caplog.text] == ["b", "c", "d"]
    assert "stuck lid" in caplog.text


async def test_release_twice_releases_once_and_later_calls_are_refused() -> None:
    tool = Recorder()
    toolbox = Toolbox([tool], context=CONTEXT)
    await toolbox.execute([call("recorder")])
    await toolbox.release()
    await toolbox.release()
    assert tool.log.count("release recorder") == 1
    with pytest.raises(SessionClosed, match="tools of session s1 were released"):
        await toolbox.execute([call("recorder")])


@pytest.mark.parametrize("cancellations", [1, 3])
async def test_cancelling_a_release_does_not_interrupt_it(cancellations: int) -> None:  # D2
    log: list[str] = []
    go = asyncio.Event()
    last = Recorder("b", log, release=go)
    toolbox = Toolbox([Recorder("a", log), last])
    await toolbox.execute([call("a"), call("b")])
    release = asyncio.ensure_future(toolbox.release())
    await last.reached["release"].wait()
    for _ in range(cancellations):
        release.cancel()
        await asyncio.sleep(0)
    assert not release.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await release
    assert log[-4:] == ["release b", "released b", "release a", "released a"]


async def test_cancelled_inside_a_tool_and_again_during_its_release() -> None:  # D2
    """``lifecycle="call"``: the release belongs to the call."""
    go = asyncio.Event()
    tool = Recorder(lifecycle="call", execute=60.0, release=go)
    run = asyncio.ensure_future(Toolbox([tool]).execute([call("recorder")]))
    await tool.reached["execute"].wait()
    run.cancel()
    await tool.reached["release"].wait()
    run.cancel()
    await asyncio.sleep(0)
    assert not run.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert tool.log[-2:] == ["release recorder", "released recorder"]


Step = tuple[str, str]
BEHAVIOURS: list[Any] = [None, 0.0, 0.002, ToolError("told"), RuntimeError("fault"), asyncio.CancelledError()]


@settings(max_examples=60, deadline=None)
@given(
    behaviours=st.lists(
        st.fixed_dictionaries(
            {
                "create": st.sampled_from(BEHAVIOURS),
                "execute": st.sampled_from(BEHAVIOURS),
                "release": st.sampled_from(BEHAVIOURS),
                "lifecycle": st.sampled_from(["session", "call"]),
            }
        ),
        min_size=1,
        max_size=3,
    ),
    turns=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=3),
    cancel_after=st.none() | st.integers(0, 12),
)
def test_whatever_fails_every_creation_is_released_once(
    behaviours: Sequence[Mapping[str, Any]], turns: list[list[int]], cancel_after: int | None
) -> None:
    """Random faults and a cancellation at a random moment: creations that succeeded == releases attempted."""
    log: list[str] = []
    tools = [Recorder(name, log, **behaviour) for name, behaviour in zip("abc", behaviours, strict=False)]

    async def play() -> None:
        toolbox = Toolbox(tools)

        async def episode() -> None:
            for turn in turns:
                await toolbox.execute([call("abc"[index]) for index in turn])

        run = asyncio.ensure_future(episode())
        for _ in range(cancel_after or 0):
            await asyncio.sleep(0)
        if cancel_after is not None:
            run.cancel()
        await asyncio.wait({run})
        if not run.cancelled() and (error := run.exception()) is not None:
            assert isinstance(error, EnvError)
        await toolbox.release()

    logging.disable(logging.CRITICAL)
    try:
        asyncio.run(play())
    finally:
        logging.disable(logging.NOTSET)
    for tool in tools:
        assert log.count(f"created {tool.name}") == log.count(f"release {tool.name}")


# -- selection and settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        (None, ["add", "reset_memory"]),
        ([], []),
        (["reset_memory"], ["reset_memory"]),
        (["reset_memory", "add"], ["add", "reset_memory"]),
        (np.array(["add"]), ["add"]),
        (np.array(["add", "reset_memory"], dtype=object), ["add", "reset_memory"]),
        (np.array([], dtype=object), []),
    ],
)
async def test_selection(selection: Any, names: list[str]) -> None:  # E5
    toolbox = Toolbox([add, reset_memory], selection=selection)
    assert [tool.name for tool in toolbox.tools] == names
    assert [schema["function"]["name"] for schema in toolbox.schemas] == names


def test_unknown_selection_names_the_task_and_the_tools() -> None:  # E5
    words = "task 't1': tool_selection: unknown tool 'ad'. Did you mean 'add'. Known: add, reset_memory"
    with pytest.raises(ConfigError, match=words):
        Toolbox([add, reset_memory], selection=["ad"], context=CONTEXT)
    with pytest.raises(ConfigError, match=r"train\.parquet row 17: tool_selection: unknown"):
        select_tools([add], ["sub"], where="train.parquet row 17")
    with pytest.raises(ConfigError, match=r"expected a list of names, e\.g\. \['add'\]"):
        Toolbox([add], selection="add")


async def test_a_tool_that_was_not_selected_cannot_be_called() -> None:
    assert await answer(Toolbox([add, reset_memory], selection=["add"]), "reset_memory") == (
        "Error: unknown tool 'reset_memory'. Available tools: add."
    )


def test_two_tools_of_one_name_are_refused() -> None:
    @function_tool("add")
    def other() -> None: ...

    with pytest.raises(ConfigError, match="same name: 'add'"):
        Toolbox([add, other])


@pytest.mark.parametrize(
    ("tools_kwargs", "words"),
    [
        ({"ad": {"create_kwargs": {}}}, "unknown tool 'ad'. Did you mean 'add'"),
        ({"add": {"create_kwargs": {"x": 1}}}, r"create_kwargs \['x'\] of tool 'add'"),
        ({"add": {"execute_kwargs": {}}}, "the only key is 'create_kwargs'"),
    ],
)
def test_wrong_tools_kwargs_are_refused(tools_kwargs: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"task 't1': .*{words}"):
        Toolbox([add], tools_kwargs=tools_kwargs, context=CONTEXT)


@pytest.mark.parametrize("tools_kwargs", [{}, {"add": None}, {"add": {}}, {"add": {"create_kwargs": None}}])
async def test_absent_tools_kwargs(tools_kwargs: Any) -> None:
    assert await answer(Toolbox([add], tools_kwargs=tools_kwargs), "add", a=1) == "2"


@pytest.mark.parametrize(
    "wrong", [{"max_parallel_calls": 0}, {"call_timeout": 0}, {"truncate_side": "both"}, {"max_calls": 1}]
)
def test_limits_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        ToolLimits(**wrong)


# -- length of answers -----------------------------------------------------------------------------------------------


class Words:
    """Counts words, to see which cutter is used."""

    def cut(self, text: str, limit: int, side: CutSide) -> str:
        words = text.split()
        return text if len(words) <= limit else f"{' '.join(words[:limit])} <{side}>"


async def test_long_text_is_cut_once_with_a_marker() -> None:  # B12
    @function_tool
    def long() -> str:
        return "word " * 100

    toolbox = Toolbox([long], limits=ToolLimits(max_tool_response_tokens=10, truncate_side="right"))
    assert await answer(toolbox, "long") == "word word word w[... 121 tokens cut ...]"
    toolbox.cutter = Words()
    assert await answer(toolbox, "long") == "word " * 10 + "<right>"
    toolbox.cutter = None
    assert (await answer(toolbox, "long") or "").endswith("tokens cut ...]")


async def test_the_greeting_counts_for_the_limit() -> None:
    toolbox = Toolbox(
        [Recorder(greeting="one two three")], limits=ToolLimits(max_tool_response_tokens=3), cutter=Words()
    )
    assert await answer(toolbox, "recorder") == "one two three <middle>"


async def test_many_sessions_with_blocking_tools_do_not_queue() -> None:  # D7
    """256 sessions whose calls end only when all of them run."""
    everyone = threading.Barrier(256)
    ids = itertools.count()

    @function_tool
    def meet() -> int:
        everyone.wait(20)
        return next(ids)

    texts = await asyncio.gather(*(answer(Toolbox([meet]), "meet") for _ in range(256)))
    assert sorted(int(text or "") for text in texts) == list(range(256))

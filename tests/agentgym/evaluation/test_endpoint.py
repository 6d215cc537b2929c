"""Models behind an endpoint: what is sent, what is retried, what ends the evaluation, and real concurrency."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from stub_server import Script, Stub, call, serve

import agentgym
from agentgym import Task, ToolEnv, function_tool
from agentgym.config import load_config
from agentgym.console import Console
from agentgym.errors import ConfigError
from agentgym.evaluation import EvalReport, evaluate
from agentgym.evaluation_config import EvalConfig


@function_tool
def double(number: int) -> int:
    """Doubles it.

    Args:
        number: what to double.
    """
    return 2 * number


class Doubles(ToolEnv):
    """``task i``: the answer is 2 i."""

    tools = (double,)
    system_prompt = "Answer with the number."

    def tasks(self, split: str) -> list[Task]:
        return [Task(id=f"{split}-{i}", prompt=f"{i}", data={"i": i}) for i in range(64)]

    def score(self, task: Task, answer: str) -> float:
        return float(answer == str(2 * task.data["i"]))


agentgym.register("doubles-test", Doubles, max_turns=4, override=True)


@contextmanager
def served(script: Script, **attributes: Any) -> Iterator[Stub]:
    """The stub on an event loop of its own, since `evaluate` runs one itself."""
    stub = Stub(script, **attributes)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    serving = serve(stub)

    def on_loop(awaitable: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(awaitable, loop).result(30)

    with ExitStack() as stack:
        stack.callback(loop.close)
        stack.callback(thread.join)
        stack.callback(lambda: loop.call_soon_threadsafe(loop.stop))
        on_loop(serving.__aenter__())
        stack.callback(lambda: on_loop(serving.__aexit__(None, None, None)))
        yield stub


def run(stub: Stub, *overrides: str) -> EvalReport:
    settings = ["env=doubles-test", f"endpoint={stub.url}", "model=some-model", *overrides]
    return evaluate(load_config(EvalConfig, overrides=settings), Console(file=io.StringIO()))


def solve(number: int, body: Any) -> Any:
    """Calls the tool, then says what it said."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return last["content"]
    return {"content": None, "tool_calls": [call("double", {"number": int(last["content"])})]}


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_model_with_tools_is_evaluated(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    with served(solve, key="secret") as stub:
        report = run(stub, "tasks=3", f"endpoint.stream={stream}", "endpoint.key_env=MY_KEY", "rollout.temperature=0.5")
    assert (report.mean, report.errors, report.turns, report.tool_calls, report.tokens) == (1.0, 0, 2.0, 1.0, 6.0)
    assert report.policy == f"some-model at {stub.url}"
    second = next(body for body in stub.bodies if len(body["messages"]) == 4)
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "tool"]
    assert second["messages"][2]["tool_calls"][0]["function"]["arguments"].startswith('{"number": ')
    assert second["messages"][3]["tool_call_id"] == "call_1"
    assert second["tools"][0]["function"]["name"] == "double"
    assert (second["model"], second["temperature"], second["max_tokens"]) == ("some-model", 0.5, 1024 - 3)


def test_calls_in_the_text_are_read_where_the_server_reads_none() -> None:
    def script(number: int, body: Any) -> Any:
        last = body["messages"][-1]
        if last["role"] == "tool":
            return last["content"]
        return f'<tool_call>{{"name": "double", "arguments": {{"number": {last["content"]}}}}}</tool_call>'

    with served(script) as stub:
        assert run(stub, "tasks=2").mean == 1.0


def test_bad_arguments_are_answered_to_the_model() -> None:
    # A7, A9
    def script(number: int, body: Any) -> Any:
        if "not valid JSON" in body["messages"][-1]["content"]:
            return "0"
        return {"content": None, "tool_calls": [call("double", '{"number": ')]}

    with served(script) as stub:
        report = run(stub, "tasks=1")
    assert (report.mean, report.parse_errors, report.tool_calls) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize("trouble", [429, 500, 503, "stall", "reset", "half"])
def test_a_passing_trouble_is_retried(trouble: Any) -> None:
    def script(number: int, body: Any) -> Any:
        return trouble if number < 2 else solve(number, body)

    with served(script) as stub:
        stream = f"endpoint.stream={'true' if trouble == 'half' else 'false'}"
        report = run(stub, "tasks=1", "endpoint.timeout=0.5", stream)
    assert (report.mean, report.errors) == (1.0, 0)
    assert len(stub.bodies) == 4


@pytest.mark.parametrize("trouble", [429, 502, "reset"])
def test_a_lasting_trouble_is_an_error_and_no_zero(trouble: Any) -> None:
    # I4
    def script(number: int, body: Any) -> Any:
        return trouble if body["messages"][1]["content"] == "2" else solve(number, body)

    with served(script) as stub:
        report = run(stub, "tasks=4", "endpoint.max_retries=1")
    assert (report.mean, report.errors, report.coverage) == (1.0, 1, 0.75)
    assert report.reward_errors_as_zero == 0.75
    assert report.error_types == {"InfraError": 1}
    assert "also after 1 retries" in str(report.first_error)
    assert any("ERRORS: 1 of 4" in line for line in report.lines())


def test_nothing_but_errors_has_no_number() -> None:
    # I4
    with served(lambda number, body: 500) as stub:
        report = run(stub, "tasks=2", "endpoint.max_retries=0")
    assert (report.mean, report.solved, report.errors, list(report.at_k)) == (None, None, 2, [])


@pytest.mark.parametrize(("status", "part"), [(403, "key"), (404, "model")])
def test_what_would_fail_every_time_stops_at_once(status: int, part: str) -> None:
    with served(lambda number, body: status) as stub, pytest.raises(ConfigError, match=part):
        run(stub, "rollout.session_limit=2")
    assert len(stub.bodies) <= 4


def test_a_wrong_key_stops_at_once() -> None:
    with served(solve, key="secret") as stub, pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        run(stub)


def test_a_conversation_beyond_the_context_is_truncated() -> None:
    with served(lambda number, body: 400) as stub:
        report = run(stub, "tasks=1")
    assert report.statuses == {"truncated_tokens": 1}
    assert (report.mean, report.errors) == (0.0, 0)


def test_the_budget_of_tokens_is_kept() -> None:
    with served(lambda number, body: {"tool_calls": [call("double", {"number": 1})]}) as stub:
        report = run(stub, "tasks=1", "rollout.max_response_length=5")
    assert [body["max_tokens"] for body in stub.bodies] == [5, 2]
    assert report.statuses == {"truncated_tokens": 1}


def test_a_cut_call_never_runs() -> None:
    # A6
    message = {"tool_calls": [call("double", {"number": 1})], "finish_reason": "length"}
    with served(lambda number, body: dict(message)) as stub:
        stub._answer = _length(stub)  # type: ignore[method-assign]
        report = run(stub, "tasks=1")
    assert report.tool_calls == 0
    assert report.statuses == {"truncated_tokens": 1}


def _length(stub: Stub) -> Any:
    from aiohttp import web

    async def answer(request: Any, body: Any, act: Any) -> Any:
        reason = act.pop("finish_reason")
        choice = {"index": 0, "message": {"role": "assistant", "content": None, **act}, "finish_reason": reason}
        base = {"id": "x", "created": 1, "model": "m", "object": "chat.completion", "choices": [choice]}
        return web.json_response(base)

    return answer


def test_a_rate_limit_is_kept() -> None:
    with served(solve) as stub:
        run(stub, "tasks=3", "endpoint.requests_per_minute=1200")
    gaps = [later - earlier for earlier, later in zip(stub.times, stub.times[1:], strict=False)]
    assert len(gaps) == 5
    assert stub.times[-1] - stub.times[0] >= 5 * 0.05 - 0.04


def test_sixty_four_sessions_are_really_concurrent() -> None:
    with served(solve, delay=1.5) as stub:  # time for all to arrive, on a busy machine too
        start = time.monotonic()
        report = run(stub)
        seconds = time.monotonic() - start
    assert (report.mean, report.samples) == (1.0, 64)
    assert stub.peak == 64
    assert seconds < 0.25 * 64 * 2 * 0.4  # one after the other it would be 192 s


def test_the_concurrency_is_bounded() -> None:
    with served(solve, delay=0.05) as stub:
        run(stub, "tasks=12", "rollout.session_limit=3")
    assert stub.peak == 3

"""The recording endpoint, met by the plain ``openai`` client: exact ids, segments, tools, streaming, errors."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from agentgym.errors import InfraError
from agentgym.generation import Generation, SamplingParams
from agentgym.loops.base import LoopSampling
from agentgym.proxy.recorder import REWRITTEN, Recorder
from agentgym.proxy.server import ProxyServer, ProxySession
from agentgym.tokens import Renderer, get_parser
from agentgym.trainer.model import load_tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


class Engine:
    """Plays texts; keeps what it was asked and what it gave."""

    def __init__(self, renderer: Renderer, texts: Sequence[str | Exception]) -> None:
        self.renderer = renderer
        self.texts = list(texts)
        self.prompts: list[list[int]] = []
        self.sampled: list[list[int]] = []
        self.asked: list[SamplingParams] = []
        self.busy = self.peak = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, session_id: str) -> Generation:
        self.busy += 1
        self.peak = max(self.peak, self.busy)
        await asyncio.sleep(0.01)
        self.busy -= 1
        text = self.texts[len(self.prompts)]
        self.prompts.append(list(prompt_ids))
        self.asked.append(sampling)
        if isinstance(text, Exception):
            raise text
        ids = [*self.renderer.encode(text), self.renderer.stop_tokens["<|im_end|>"]]
        reason = "stop" if len(ids) <= sampling.max_tokens else "length"
        ids = ids[: sampling.max_tokens]
        self.sampled.append(ids)
        logprobs = [-0.25 - i / 100 for i in range(len(ids))]
        return Generation(token_ids=ids, logprobs=logprobs, finish_reason=reason, weight_version=3)  # type: ignore[arg-type]

    async def release(self, session_id: str) -> None:
        """Nothing is kept."""


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(load_tokenizer("tiny"))


class Bench:
    """A proxy over texts, and a client for it."""

    def __init__(self, engine: Engine, server: ProxyServer, url: str, ended: list[ProxySession]) -> None:
        self.engine, self.server, self.url, self.ended = engine, server, url, ended
        self.client = AsyncOpenAI(base_url=url, api_key="k1", max_retries=0)

    @property
    def recorder(self) -> Recorder:
        return self.server.sessions["k1"].recorder

    async def ask(self, *messages: dict[str, Any], **parameters: Any) -> Any:
        return await self.client.chat.completions.create(model="m", messages=list(messages), **parameters)  # type: ignore[call-overload]


@asynccontextmanager
async def proxy(
    renderer: Renderer, *texts: str | Exception, fixed: bool = False, **limits: int
) -> AsyncIterator[Bench]:
    engine = Engine(renderer, texts)
    sampling = LoopSampling(**{"max_prompt_length": 500, "max_response_length": 500, **limits}, temperature=0.7, seed=1)
    ended: list[ProxySession] = []

    def make(key: str) -> Recorder:
        return Recorder(
            generator=engine, renderer=renderer, parser=get_parser("hermes"), key=key, sampling=sampling, fixed=fixed
        )

    server = ProxyServer(model="m", make_recorder=make, ended=ended.append)
    async with server.serve() as url:
        bench = Bench(engine, server, url, ended)
        async with bench.client:
            yield bench


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_a_conversation_with_a_tool_is_one_exact_segment(renderer: Renderer) -> None:
    async with proxy(renderer, CALL, "It is 7.") as bench:
        first = await bench.ask(user("3 plus 4?"), tools=[TOOL])
        choice = first.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        call = choice.message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 3, "b": 4})
        answer = {"role": "tool", "tool_call_id": call.id, "content": "7"}
        second = await bench.ask(user("3 plus 4?"), choice.message.model_dump(), answer, tools=[TOOL])
        assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("It is 7.", "stop")
        (segment,) = bench.recorder.outputs()
    sampled = bench.engine.sampled
    model_ids = [i for i, mask in zip(segment.response_ids, segment.response_mask, strict=True) if mask]
    assert model_ids == [*sampled[0], *sampled[1]]  # to the byte what the engine returned
    assert bench.engine.prompts[1] == [*segment.prompt_ids, *segment.response_ids][: len(bench.engine.prompts[1])]
    assert bench.engine.prompts[1][: len(bench.engine.prompts[0])] == bench.engine.prompts[0]
    assert [span.kind for span in segment.spans] == ["model", "environment", "model"]
    assert [span.weight_version for span in segment.spans] == [3, None, 3]
    assert segment.response_logprobs[: len(sampled[0])] == pytest.approx(
        [-0.25 - i / 100 for i in range(len(sampled[0]))]
    )
    middle = segment.spans[1]
    assert renderer.tokenizer.decode(segment.response_ids[middle.start : middle.stop]).count("7") == 1
    assert second.usage.prompt_tokens == len(bench.engine.prompts[1])
    assert bench.engine.asked[0].temperature == 0.7


async def test_a_rewritten_history_starts_a_new_segment(renderer: Renderer) -> None:
    # B2
    async with proxy(renderer, "one", "two", "three") as bench:
        await bench.ask(user("a"))
        await bench.ask(user("a"), {"role": "assistant", "content": " one "}, user("b"))  # white space is no rewrite
        await bench.ask(user("a"), {"role": "assistant", "content": "summary"}, user("c"))
        segments = bench.recorder.outputs()
    assert len(segments) == 2
    assert [len(s.spans) for s in segments] == [3, 1]
    assert segments[1].extra_fields == {"new_segment": REWRITTEN}
    trained = [[i for i, m in zip(s.response_ids, s.response_mask, strict=True) if m] for s in segments]
    sampled = bench.engine.sampled
    assert trained == [[*sampled[0], *sampled[1]], sampled[2]]


async def test_two_conversations_of_one_session_are_told_apart(renderer: Renderer) -> None:
    async with proxy(renderer, *["x"] * 4) as bench:
        said = {"role": "assistant", "content": "x"}
        await asyncio.gather(bench.ask(user("plan")), bench.ask(user("critic")))
        await bench.ask(user("critic"), said, user("more"))
        await bench.ask(user("plan"), said, user("more"))
        segments = bench.recorder.outputs()
    assert sorted(len(s.spans) for s in segments) == [3, 3]
    assert bench.engine.peak == 1  # one after the other: the engine keeps one row for a session


async def test_asking_again_is_another_sample(renderer: Renderer) -> None:
    async with proxy(renderer, "one", "two") as bench:
        for _ in range(2):
            await bench.ask(user("a"))
        segments = bench.recorder.outputs()
    assert [s.prompt_ids for s in segments] == [segments[0].prompt_ids] * 2
    assert bench.engine.asked[0].seed != bench.engine.asked[1].seed


async def test_streams_hold_the_same_as_answers(renderer: Renderer) -> None:
    async with proxy(renderer, "First line.\n  second  ", CALL) as bench:
        text, usage = "", None
        async for chunk in await bench.ask(user("a"), stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == "First line.\n  second  "
        assert usage is not None
        assert usage.completion_tokens == len(bench.engine.sampled[0])
        calls: list[Any] = []
        reasons = []
        async for chunk in await bench.ask(user("b"), stream=True, tools=[TOOL]):
            for choice in chunk.choices:
                calls += choice.delta.tool_calls or []
                reasons.append(choice.finish_reason)
        assert [json.loads(call.function.arguments) for call in calls] == [{"a": 3, "b": 4}]
        assert reasons[-1] == "tool_calls"


async def test_logprobs_and_ids_are_shown_on_request(renderer: Renderer) -> None:
    async with proxy(renderer, "yes") as bench:
        reply = await bench.ask(user("a"), logprobs=True, extra_body={"return_token_ids": True})
    assert reply.choices[0].token_ids == bench.engine.sampled[0]
    assert reply.prompt_token_ids == bench.engine.prompts[0]
    assert [entry.logprob for entry in reply.choices[0].logprobs.content][:2] == pytest.approx([-0.25, -0.26])


async def test_a_request_says_how_it_is_sampled_unless_training_does(renderer: Renderer) -> None:
    wishes: dict[str, Any] = {"temperature": 0.0, "top_p": 0.5, "seed": 9, "max_tokens": 3, "stop": ["END"]}
    for fixed in (False, True):
        async with proxy(renderer, "a long answer", fixed=fixed) as bench:
            reply = await bench.ask(user("a"), **wishes)
        asked = bench.engine.asked[0]
        assert (asked.max_tokens, list(asked.stop)) == (3, ["END"])
        assert reply.choices[0].finish_reason == "length"
        if fixed:
            assert (asked.temperature, asked.top_p) == (0.7, 1.0)
        else:
            assert (asked.temperature, asked.top_p, asked.seed) == (0.0, 0.5, 9)


async def test_a_cut_call_stays_text(renderer: Renderer) -> None:
    # A6
    async with proxy(renderer, CALL) as bench:
        whole = len(renderer.encode(CALL))
        reply = await bench.ask(user("a"), tools=[TOOL], max_tokens=whole)  # complete, but for its end token
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.tool_calls is None
    assert "add" in reply.choices[0].message.content


async def test_without_tools_a_call_is_text(renderer: Renderer) -> None:
    async with proxy(renderer, CALL, CALL) as bench:
        plain = await bench.ask(user("a"))
        refused = await bench.ask(user("a"), tools=[TOOL], tool_choice="none")
    assert plain.choices[0].message.content == refused.choices[0].message.content == CALL


async def test_the_budget_is_that_of_the_session(renderer: Renderer) -> None:
    # B11
    async with proxy(renderer, "one two", "three", max_response_length=12) as bench:
        reply = await bench.ask(user("a"))
        message = reply.choices[0].message.model_dump()
        with pytest.raises(openai.BadRequestError) as caught:
            await bench.ask(user("a"), message, user("a text that is far too long for what is left"))
        assert caught.value.code == "context_length_exceeded"
        assert bench.recorder.exhausted
        assert len(bench.engine.prompts) == 1
    async with proxy(renderer, "never", max_prompt_length=5) as bench:
        with pytest.raises(openai.BadRequestError, match="max_prompt_length"):
            await bench.ask(user("a"))


async def test_a_lost_engine_is_503_and_remembered(renderer: Renderer) -> None:
    async with proxy(renderer, InfraError("gone"), "back") as bench:
        with pytest.raises(openai.InternalServerError, match="gone"):
            await bench.ask(user("a"))
        assert isinstance(bench.recorder.lost, InfraError)
        assert bench.recorder.outputs() == []
        await bench.ask(user("a"))
        assert len(bench.recorder.outputs()) == 1


@pytest.mark.parametrize(
    ("messages", "parameters", "part"),
    [
        ([], {}, "at least one"),
        ([{"role": "assistant", "content": "x"}], {}, "assistant"),
        ([{"role": "critic", "content": "x"}], {}, "critic"),
        ([user("a")], {"n": 2}, "n=2"),
        ([user("a")], {"response_format": {"type": "json_object"}}, "response_format"),
        ([user("a")], {"max_tokens": 0}, "max_tokens"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], {}, "text only"),
    ],
)
async def test_what_cannot_be_done_is_said(
    renderer: Renderer, messages: list[Any], parameters: dict[str, Any], part: str
) -> None:
    async with proxy(renderer, "x") as bench:
        with pytest.raises(openai.BadRequestError, match=part):
            await bench.ask(*messages, **parameters)


async def test_sessions_by_key_header_and_path_and_their_records(renderer: Renderer) -> None:
    async with proxy(renderer, "1", "2", "3", "4") as bench:
        await bench.ask(user("a"))
        await bench.ask(user("b"), extra_headers={"X-Session": "k2"})
        root = bench.url.removesuffix("/v1")
        async with AsyncOpenAI(base_url=f"{root}/s/k3/v1", api_key="other") as third:
            await third.chat.completions.create(model="m", messages=[{"role": "user", "content": "c"}])
            assert [model.id async for model in third.models.list()] == ["m"]
        assert list(bench.server.sessions) == ["k1", "k2", "k3"]

        def call(method: str, path: str, data: bytes | None = None) -> Any:
            with urllib.request.urlopen(urllib.request.Request(root + path, data, method=method)) as response:
                return json.loads(response.read())

        await asyncio.to_thread(call, "POST", "/sessions/k2/reward", b'{"reward": 0.5}')
        shown = await asyncio.to_thread(call, "GET", "/sessions/k2")
        assert shown["reward"] == 0.5
        assert shown["segments"][0]["response_ids"] == bench.engine.sampled[1]
        await asyncio.to_thread(call, "DELETE", "/sessions/k2")
        assert [session.key for session in bench.ended] == ["k2"]
    assert [session.key for session in bench.ended] == ["k2", "k1", "k3"]


async def test_a_client_that_leaves_cancels_its_generation(renderer: Renderer) -> None:
    async with proxy(renderer, "x", "y") as bench:
        started = asyncio.Event()
        cancelled = asyncio.Event()

        async def hang(prompt_ids: Any, sampling: Any, session_id: str) -> Any:
            started.set()
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        usual, bench.engine.generate = bench.engine.generate, hang  # type: ignore[method-assign]
        asked = asyncio.create_task(bench.ask(user("a")))
        await started.wait()
        asked.cancel()
        await asyncio.wait_for(cancelled.wait(), 5)
        bench.engine.generate = usual  # type: ignore[method-assign]
        await bench.ask(user("a"))
        assert len(bench.recorder.outputs()) == 1

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agentgym.env import Env
from agentgym.errors import ConfigError
from agentgym.generation import SamplingParams
from agentgym.trainer.rollout.scripted import ScriptedEngine, oracle_player, texts
from agentgym.types import AssistantTurn, Task, ToolCall

END = 256


async def test_texts_are_played_turn_by_turn_and_again_after_release(tokenizer: Any) -> None:
    engine = ScriptedEngine(texts({"a": ["one", "two"], "b": ["other"]}), tokenizer=tokenizer)
    sampling = SamplingParams(max_tokens=50, stop_token_ids=[7, END])

    async def play(session: str) -> str:
        generation = await engine.generate([1], sampling, session)
        assert generation.token_ids[-1] == END
        assert set(generation.logprobs) == {0.0}
        assert generation.finish_reason == "stop"
        text: str = tokenizer.decode(generation.token_ids[:-1])
        return text

    assert [await play("a"), await play("b"), await play("a")] == ["one", "other", "two"]
    await engine.release("a")
    assert await play("a") == "one"
    with pytest.raises(ConfigError, match="the script has 1 texts for session 'b', turn 1 was asked for"):
        await play("b")


async def test_texts_are_cut_like_sampled_ones(tokenizer: Any) -> None:
    engine = ScriptedEngine(lambda *_: "call </t> more", tokenizer=tokenizer)
    cut = await engine.generate([1], SamplingParams(max_tokens=4, stop_token_ids=[END]), "a")
    assert (tokenizer.decode(cut.token_ids), cut.finish_reason) == ("call", "length")
    stopped = await engine.generate([1], SamplingParams(max_tokens=50, stop_token_ids=[END], stop=["</t>"]), "b")
    assert (tokenizer.decode(stopped.token_ids), stopped.finish_reason) == ("call </t>", "stop")
    exact = await engine.generate([1], SamplingParams(max_tokens=15, stop_token_ids=[END]), "c")
    assert (len(exact.token_ids), exact.finish_reason) == (15, "stop")


async def test_weights_change_the_version_alone(tokenizer: Any) -> None:
    engine = ScriptedEngine(lambda *_: "x", tokenizer=tokenizer)
    await engine.update_weights({}, 4)
    assert (await engine.generate([1], SamplingParams(max_tokens=3), "a")).weight_version == 4


class Sums(Env):
    """Two sums of which one begins like the other."""

    def tasks(self, split: str) -> Sequence[Task]:
        if split == "validation":
            return []
        return [
            Task(id="short", prompt="What is 1+1?"),
            Task(id="long", prompt=[{"role": "user", "content": "What is 1+1?5"}]),
        ]

    def oracle(self, task: Task) -> list[AssistantTurn]:
        call = ToolCall(name="calculator", arguments={"expression": task.id})
        return [AssistantTurn(tool_calls=(call,)), AssistantTurn(content="#### 2")]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        raise NotImplementedError

    def step(self, action: Any) -> Any:
        raise NotImplementedError


async def test_the_oracle_plays_the_task_whose_prompt_is_shown(tokenizer: Any) -> None:
    engine = ScriptedEngine(oracle_player([Sums()], "hermes", tokenizer), tokenizer=tokenizer)
    for prompt, name in (("user: What is 1+1?", "short"), ("user: What is 1+1?5 ", "long")):
        ids = tokenizer.encode(prompt)
        turns = [await engine.generate(ids, SamplingParams(max_tokens=200), name) for _ in range(2)]
        call, answer = (tokenizer.decode(turn.token_ids) for turn in turns)
        assert call.startswith("<tool_call>")
        assert f'"{name}"' in call
        assert answer == "#### 2"
        with pytest.raises(ConfigError, match=f"the oracle has no turn 2 for session '{name}'"):
            await engine.generate(ids, SamplingParams(max_tokens=200), name)
    with pytest.raises(ConfigError, match="shows the prompt of 0 tasks"):
        await engine.generate(tokenizer.encode("Who?"), SamplingParams(max_tokens=9), "other")

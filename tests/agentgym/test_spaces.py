"""Observation and action spaces."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.passive_env_checker import check_action_space, check_observation_space

from agentgym.errors import ConfigError
from agentgym.spaces import Assistant, Messages
from agentgym.types import AssistantTurn, ParseError, ToolCall

TURN = AssistantTurn(
    content="so",
    tool_calls=(ToolCall(name="calculator", arguments={"expression": "6*7"}, id="call00001"),),
    errors=(ParseError(message="no name", raw="{}"),),
    finish_reason="length",
    raw="so <tool_call>...",
)


@pytest.mark.parametrize(
    "observation",
    [
        (),
        ({"role": "user", "content": ""},),
        ({"role": "system", "content": "a b\n東京 🎯"}, {"role": "user", "content": "x"}),
        ({"role": "tool", "content": "42", "name": "calculator", "tool_call_id": "call00001"},),
        ({"role": "assistant", "content": "x", "tool_calls": [{"type": "function"}]},),
        ({"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "image": "a.png"}]},),
        ({"role": "user", "content": [{"type": "video", "video": b"..."}]},),
        ({"role": "user", "content": []},),
    ],
)
def test_messages_contains_tuples_of_messages(observation: Any) -> None:
    assert observation in Messages()


@pytest.mark.parametrize(
    "observation",
    [
        None,
        "text",
        {"role": "user", "content": "x"},
        [{"role": "user", "content": "x"}],
        ("text",),
        ({"role": "user"},),
        ({"content": "x"},),
        ({"role": "robot", "content": "x"},),
        ({"role": "user", "content": None},),
        ({"role": "user", "content": 3},),
        ({"role": "user", "content": ["x"]},),
        ({"role": "user", "content": [{"text": "x"}]},),
        ({"role": "user", "content": [{"type": "text"}]},),
        ({"role": "user", "content": [{"type": ["text"], "text": "x"}]},),
        ({"role": "user", "content": [{"type": "audio", "audio": "x"}]},),
        ({"role": "user", "content": "x", "extra": 1},),
        ({"role": "tool", "content": "x", "name": 3},),
        ({"role": "tool", "content": "x", "tool_call_id": None},),
        ({"role": "assistant", "content": "x", "tool_calls": "none"},),
        ({"role": "user", "content": "x"}, None),
    ],
)
def test_messages_refuses_everything_else(observation: Any) -> None:
    assert observation not in Messages()


@pytest.mark.parametrize("action", ["", " ", "garbage <tool_call>{", "東京 🎯\x00", "\ud800", TURN, AssistantTurn()])
def test_any_text_and_any_turn_is_an_action(action: Any) -> None:
    assert action in Assistant()


@pytest.mark.parametrize(
    "action",
    [
        None,
        b"bytes",
        3,
        np.array(["x"]),
        {"content": "x"},
        ["x"],
        AssistantTurn(content=None),  # type: ignore[arg-type]
        AssistantTurn(tool_calls=({"name": "x"},)),  # type: ignore[arg-type]
        AssistantTurn(errors=("bad",)),  # type: ignore[arg-type]
        AssistantTurn(finish_reason="eos"),  # type: ignore[arg-type]
    ],
)
def test_nothing_else_is_an_action(action: Any) -> None:
    assert action not in Assistant()


@pytest.mark.parametrize("space_type", [Messages, Assistant])
def test_samples_are_valid_depend_on_the_seed_and_vary(space_type: type[gymnasium.Space[Any]]) -> None:
    space, same, other = space_type(seed=1), space_type(), space_type(seed=2)
    same.seed(1)
    samples = [space.sample() for _ in range(200)]
    assert all(sample in space for sample in samples)
    assert samples == [same.sample() for _ in range(200)]
    assert samples != [other.sample() for _ in range(200)]
    assert len({str(sample) for sample in samples}) > 120


def test_samples_of_actions_include_silence_and_broken_calls() -> None:
    space = Assistant(seed=0)
    samples = [space.sample() for _ in range(300)]
    assert "" in samples
    assert any("<tool_call>" in str(sample) for sample in samples)


def test_samples_of_observations_include_every_role() -> None:
    space = Messages(seed=0)
    assert {message["role"] for _ in range(100) for message in space.sample()} == {
        "system",
        "user",
        "assistant",
        "tool",
    }


@pytest.mark.parametrize("space", [Messages(), Assistant()])
@pytest.mark.parametrize("name", ["mask", "probability"])
def test_masks_are_refused(space: gymnasium.Space[Any], name: str) -> None:
    with pytest.raises(ConfigError, match="neither mask nor probability"):
        space.sample(**{name: np.ones(1)})


def test_spaces_of_a_kind_are_equal_and_hashable() -> None:
    assert Messages(seed=1) == Messages(seed=2)
    assert Assistant() == Assistant()
    assert Messages() != Assistant()
    assert Messages() != gymnasium.spaces.Discrete(2)
    assert len({Messages(), Messages(), Assistant()}) == 2
    assert repr(Messages()) == "Messages()"
    assert repr(Assistant()) == "Assistant()"


@pytest.mark.parametrize("space", [Messages(seed=3), Assistant(seed=3)])
def test_samples_survive_json(space: gymnasium.Space[Any]) -> None:
    samples = [space.sample() for _ in range(50)]
    assert space.from_jsonable(json.loads(json.dumps(space.to_jsonable(samples)))) == samples


def test_a_turn_survives_json() -> None:
    space = Assistant()
    (turn, text) = space.from_jsonable(json.loads(json.dumps(space.to_jsonable([TURN, "x"]))))
    assert (turn, text) == (TURN, "x")
    assert turn in space


@pytest.mark.parametrize("space_type", [Messages, Assistant])
def test_copies_and_pickles_go_on_where_the_original_stood(space_type: type[gymnasium.Space[Any]]) -> None:
    space = space_type(seed=4)
    space.sample()
    copies = [copy.deepcopy(space), pickle.loads(pickle.dumps(space))]
    following = space.sample()
    assert [c.sample() for c in copies] == [following, following]


def test_gymnasiums_space_checks_accept_them() -> None:
    check_observation_space(Messages())
    check_action_space(Assistant())
    assert Messages().is_np_flattenable is False
    assert Assistant().is_np_flattenable is False

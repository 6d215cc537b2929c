"""Simulated users: how they are found, made and listened to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from agentgym.errors import ConfigError, EnvError, InfraError, RegistrationError, UnknownName
from agentgym.interaction import Interaction, Reply, interactions, make_interaction, register_interaction, respond
from agentgym.tool_env import ToolEnv
from agentgym.types import Message, Task


@register_interaction("test-echo")
class Echo(Interaction):
    """Says what it heard."""

    async def respond(self, messages: Sequence[Message]) -> Any:
        answer = self.config.get("answer")
        if isinstance(answer, Exception):
            raise answer
        return answer if answer is not None else (False, str(messages[-1]["content"]), 0.5, {"words": 1})


SAID: list[Message] = [{"role": "assistant", "content": "hello"}]


async def test_users_are_made_by_class_by_name_and_by_target() -> None:
    target = {"_target_": "agentgym.envs.twenty_questions:Guesser", "level": 3}
    for which, cls, config in (
        (Echo, "Echo", {"mood": "kind"}),
        ("test-echo", "Echo", {"mood": "kind"}),
        (target, "Guesser", {"mood": "kind", "level": 3}),
    ):
        settings = {"mood": "kind"}
        user = make_interaction(which, settings)
        settings["mood"] = "changed"
        assert type(user).__name__ == cls
        assert user.config == config
        assert make_interaction(which) is not user


def test_a_wrong_user_is_a_short_message() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'test-echo'"):
        make_interaction("test-eco")
    with pytest.raises(ConfigError, match="string '_target_'"):
        make_interaction({"target": "x"})
    with pytest.raises(ConfigError, match="expected a subclass of Interaction"):
        make_interaction({"_target_": "agentgym.types:Task"})
    with pytest.raises(RegistrationError, match="test-echo"):

        @register_interaction("test-echo")
        class Other(Interaction):
            pass

    assert interactions.get("test-echo") is Echo


async def test_a_reply_is_read_and_may_be_short() -> None:
    assert await respond(make_interaction("test-echo"), SAID) == Reply(False, "hello", 0.5, {"words": 1})
    for answer, expected in (
        ((1, "bye"), Reply(True, "bye", None, {})),
        (Reply(done=False, text="go on"), Reply(False, "go on", None, {})),
    ):
        reply = await respond(Echo({"answer": answer}), SAID)
        assert reply == expected
        assert isinstance(reply.done, bool)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("text", EnvError),
        ((False,), EnvError),
        ((False, None), EnvError),
        (KeyError("bug"), EnvError),
        (ConnectionResetError("peer"), InfraError),
    ],
    ids=str,
)
async def test_a_reply_that_is_none_is_a_fault(answer: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="respond of interaction Echo"):
        await respond(Echo({"answer": answer}), SAID)


class Talk(ToolEnv):
    """No user of its own."""

    def __init__(self, *, names: Mapping[str, Any]) -> None:
        super().__init__()
        self.names = names

    def tasks(self, split: str) -> list[Task]:
        return [Task(id="t", prompt="hi", interaction_kwargs=self.names)]

    def score(self, task: Task, answer: str) -> float:
        return 1.0


async def test_a_task_names_its_user() -> None:
    env = Talk(names={"name": "test-echo"})
    await env.areset()
    observation, _, terminated, _, info = await env.astep("hello")
    assert observation == ({"role": "user", "content": "hello"},)
    assert not terminated
    assert info["turn_score"] == 0.5
    await env.aclose()
    env = Talk(names={})
    await env.areset()
    assert (await env.astep("hello"))[2]
    await env.aclose()

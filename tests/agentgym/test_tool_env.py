"""`ToolEnv`: what answers a turn, what is scored, and that episodes share nothing."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from agentgym import register
from agentgym.errors import ConfigError, EnvError, InfraError, ToolError
from agentgym.interaction import Interaction, Reply
from agentgym.registration import EnvSpec, make
from agentgym.session import SessionManager
from agentgym.tool import BaseTool, ToolContext, function_tool
from agentgym.tool_env import ToolEnv
from agentgym.tool_results import CutSide
from agentgym.toolbox import ToolLimits
from agentgym.types import AssistantTurn, Message, ParseError, RolloutStatus, Task, ToolCall, ToolResponse


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


@function_tool
def fail(how: str) -> str:
    """Fail.

    Args:
        how: the kind
    """
    if how == "told":
        raise ToolError("that is not allowed")
    if how == "lost":
        raise ConnectionResetError("peer")
    raise KeyError("a bug")


class Sums(ToolEnv):
    """The 20 lines that an author writes."""

    tools = (add, fail)
    system_prompt = "Use the tools."

    def tasks(self, split: str) -> list[Task]:
        first = {"train": 0, "validation": 100}.get(split)
        if first is None:
            return []
        return [
            Task(id=f"{i}", prompt=f"What is {i} plus 17?", data={"answer": i + 17}) for i in range(first, first + 50)
        ]

    def score(self, task: Task, answer: str) -> float:
        return float(str(task.data["answer"]) in answer.split())


class Memory(BaseTool):
    """Remembers per session; counts its creations and releases."""

    created: list[str] = []  # noqa: RUF012 - emptied before each test
    released: list[str] = []  # noqa: RUF012 - emptied before each test

    def __init__(self, name: str = "memory", *, broken: bool = False) -> None:
        self.values: dict[str, dict[str, Any]] = {}
        self.broken = broken
        parameters = {"type": "object", "properties": {"key": {"type": "string"}, "value": {}}, "required": ["key"]}
        super().__init__({}, {"type": "function", "function": {"name": name, "parameters": parameters}})

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        assert instance_id is not None
        self.values[instance_id] = dict(kwargs)
        Memory.created.append(self.name)
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        values = self.values[instance_id]
        await asyncio.sleep(0)
        if "value" in parameters:
            values[parameters["key"]] = parameters["value"]
            return ToolResponse(text="stored"), 0.5, {"stores": 1, "note": "text is no metric"}
        if parameters["key"] not in values:
            raise ToolError(f"nothing is stored under {parameters['key']!r}")
        return ToolResponse(text=str(values[parameters["key"]])), None, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(len(self.values[instance_id]))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        Memory.released.append(self.name)
        if self.broken:
            raise RuntimeError("release failed")
        del self.values[instance_id]


class Remembering(ToolEnv):
    """One task; every kind of score."""

    def __init__(self, *, tools: Sequence[BaseTool] = (), score: Any = 1.0, task: Task | None = None, **common: Any):
        super().__init__(**common)
        self.tools = tools or (Memory(),)
        self.value = score
        self.only = task or Task(id="only", prompt="Remember.")
        self.answers: list[str] = []

    def tasks(self, split: str) -> list[Task]:
        return [self.only]

    def score(self, task: Task, answer: str) -> Any:
        self.answers.append(answer)
        return self.value(task, answer) if callable(self.value) else self.value


REMEMBERING = EnvSpec(id="agentgym/remembering-v0", entry_point=Remembering)


@pytest.fixture(autouse=True)
def forget() -> None:
    Memory.created.clear()
    Memory.released.clear()


def call(name: str, **arguments: Any) -> AssistantTurn:
    return AssistantTurn(tool_calls=[ToolCall(name=name, arguments=arguments)])


def text(*messages: Message) -> list[Any]:
    return [message["content"] for message in messages]


# -- tasks and prompts --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_gymnasiums_checker_has_nothing_to_say() -> None:
    register("sums-for-the-checker", Sums)
    env = make("sums-for-the-checker")
    check_env(env)
    env.close()


def test_an_episode_depends_on_seed_and_actions_only() -> None:
    def play(seed: int) -> list[Any]:
        env = Sums()
        record: list[Any] = [env.reset(seed=seed)]
        record += [env.step(call("add", a=1, b=2)), env.step("<tool_call>{</tool_call>"), env.step("17")]
        record.append(env.reset())
        env.close()
        return record

    assert play(3) == play(3)
    assert len({play(seed)[0][0][1]["content"] for seed in range(8)}) > 1


async def test_a_task_can_be_pinned_in_either_split() -> None:
    env = Sums()
    observation, info = await env.areset(options={"task_id": "120", "split": "validation"})
    assert text(*observation) == ["Use the tools.", "What is 120 plus 17?"]
    assert [message["role"] for message in observation] == ["system", "user"]
    assert info == {}
    assert env.task.id == "120"
    assert env.messages == list(observation)
    drawn = set()
    for seed in range(20):
        await env.areset(seed=seed)
        drawn.add(env.task.id)
    assert len(drawn) > 5
    with pytest.raises(ConfigError, match=r"split 'train' has no task '12O'. Did you mean '12'\?"):
        await env.areset(options={"task_id": "12O"})
    with pytest.raises(ConfigError, match="split 'test' has no tasks"):
        await env.areset(options={"split": "test"})
    await env.aclose()


class Counted(ToolEnv):
    """Notes how often its tasks are asked for."""

    asked: list[tuple[int, str]] = []  # noqa: RUF012 - emptied by the test

    def __init__(self, *, size: int = 3, extra: Any = None, **common: Any) -> None:
        super().__init__(**common)
        self.size = size

    def tasks(self, split: str) -> list[Task]:
        Counted.asked.append((self.size, split))
        time.sleep(0.01)
        return [Task(id=f"{i}", prompt="?", data={"seen": []}) for i in range(self.size)]

    def score(self, task: Task, answer: str) -> float:
        task.data["seen"].append(answer)
        return float(len(task.data["seen"]))


async def test_tasks_are_made_once_for_equal_arguments_and_never_shared_between_episodes() -> None:  # D8
    spec = EnvSpec(id="agentgym/counted-v0", entry_point=Counted)
    async with SessionManager() as manager:

        async def play(**kwargs: Any) -> float | None:
            async with manager.open(spec, task_id="1", env_kwargs=kwargs) as session:
                await session.step("x")
            return session.outcome.reward

        assert await asyncio.gather(*[play(size=size) for size in (3, 3, 3, 4, 4)]) == [1.0] * 5
        assert sorted(Counted.asked) == [(3, "train"), (4, "train")]
        Counted.asked.clear()
        assert [await play(size=3, extra=object()), await play(size=3, extra=object())] == [1.0, 1.0]
        assert len(Counted.asked) == 2  # what cannot be compared is not taken for equal
    Counted.asked.clear()
    env = Counted(size=5)
    for _ in range(3):
        await env.areset(options={"task_id": "4"})
        assert (await env.astep("x"))[1] == 1.0
    await env.aclose()
    assert Counted.asked == [(5, "train")]


async def test_a_prompt_of_messages_is_kept_and_brings_its_own_system_message() -> None:
    shot: Message = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
    for prompt, roles in (
        ([shot], ["system", "user"]),
        ([{"role": "system", "content": "Mine."}, shot], ["system", "user"]),
        ([shot, {"role": "assistant", "content": "hi"}, shot], ["system", "user", "assistant", "user"]),
    ):
        env = Remembering(task=Task(id="only", prompt=prompt))  # type: ignore[arg-type]
        env.system_prompt = "Default."
        observation, _ = await env.areset()
        assert [message["role"] for message in observation] == roles
        assert observation[0]["content"] == ("Mine." if prompt[0] is not shot else "Default.")
        observation[-1]["content"][0]["text"] = "changed"  # type: ignore[index]
        again, _ = await env.areset()
        assert again[-1]["content"][0]["text"] == "hello"  # type: ignore[index]
        await env.aclose()


# -- calls --------------------------------------------------------------------------------------------------------


async def test_calls_are_answered_in_order_and_the_answer_is_scored() -> None:
    env = Sums()
    await env.areset(options={"task_id": "3"})
    calls = [ToolCall(name="add", arguments={"a": i, "b": 10}) for i in range(3)]
    observation, reward, terminated, truncated, info = await env.astep(AssistantTurn(tool_calls=calls))
    assert text(*observation) == ["10", "11", "12"]
    assert [message["tool_call_id"] for message in observation] == ["call00001", "call00002", "call00003"]
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert (info["tool_calls"], info["tool_errors"], info["parse_errors"]) == (3, 0, 0)
    observation, reward, terminated, truncated, _ = await env.astep("It is 20")
    assert (observation, reward, terminated, truncated) == ((), 1.0, True, False)
    assert [message["role"] for message in env.messages] == ["system", "user", "assistant", *["tool"] * 3, "assistant"]
    await env.aclose()


async def test_an_unknown_tool_or_a_missing_argument_is_told_to_the_model() -> None:  # A14
    async with SessionManager() as manager:
        spec = EnvSpec(id="agentgym/sums-v0", entry_point=Sums)
        async with manager.open(spec, task_id="3") as session:
            result = await session.step(call("solve_integral", f="x"))
            assert "add" in result.observation[0]["content"]
            assert "solve_integral" in result.observation[0]["content"]
            result = await session.step(call("add", a=1))
            assert "b" in result.observation[0]["content"]
            assert not session.done
            await session.step("20")
        assert manager.stats().live == 0
    assert session.outcome.reward == 1.0
    assert (session.outcome.tool_calls, session.outcome.tool_errors) == (2, 2)


async def test_malformed_calls_are_answered_after_the_good_ones() -> None:
    env = Sums()
    await env.areset()
    errors = [ParseError(message="no JSON", raw="{"), ParseError(message="no name", raw="{}")]
    good = ToolCall(name="add", arguments={"a": 1, "b": 1})
    observation, _, terminated, _, info = await env.astep(AssistantTurn(tool_calls=[good], errors=errors))
    assert text(*observation) == ["2", "Error: no JSON", "Error: no name"]
    assert [message["name"] for message in observation] == ["add", "error", "error"]
    ids = [message["tool_call_id"] for message in observation]
    assert len(set(ids)) == 3
    assert all(len(id) == 9 and id.isalnum() for id in ids)
    assert not terminated
    assert (info["tool_calls"], info["parse_errors"]) == (1, 2)
    observation, *_ = await env.astep(AssistantTurn(errors=errors[:1]))
    assert observation[0]["tool_call_id"] not in ids
    await env.aclose()


async def test_an_empty_turn_is_an_empty_answer() -> None:  # B16
    env = Remembering(score=0.25)
    for turn in (AssistantTurn(), AssistantTurn(finish_reason="length")):
        await env.areset()
        observation, reward, terminated, truncated, _ = await env.astep(turn)
        assert (observation, reward) == ((), 0.25)
        assert (terminated, truncated) == ((True, False) if turn.finish_reason == "stop" else (False, True))
    assert env.answers == ["", ""]
    await env.aclose()


CUT_CALL = AssistantTurn(
    errors=[ParseError(message="unclosed tag")],
    finish_reason="length",
    raw='<tool_call>{"name":"memory","arguments":{"key":"12345*',
)
CUT_COMPLETE = AssistantTurn(
    tool_calls=[ToolCall(name="memory", arguments={"key": "x", "value": 1})], finish_reason="length"
)


@pytest.mark.parametrize("turn", [CUT_CALL, CUT_COMPLETE], ids=["cut inside", "complete"])
async def test_a_call_in_a_turn_cut_by_the_length_limit_never_runs(turn: AssistantTurn) -> None:  # A6
    async with SessionManager() as manager:
        async with manager.open(REMEMBERING) as session:
            result = await session.step(turn)
            assert not session.done
            [answer] = result.observation
            assert (answer["role"], answer["name"]) == ("tool", "error")
            assert "cut by the length limit" in answer["content"]
            await session.step(call("memory", key="x", value=2))
            await session.step(turn)  # not the second in a row
            assert not session.done
            result = await session.step(turn)
            assert (result.truncated, result.terminated) == (True, False)
        assert Memory.created == Memory.released == ["memory"]
    assert session.outcome.status is RolloutStatus.TRUNCATED_TOKENS
    assert session.outcome.tool_calls == 1
    assert session.outcome.parse_errors == 3
    assert session.outcome.reward == 1.0  # of the scorer, which is asked with an empty answer
    assert isinstance(session.env, Remembering)
    assert session.env.answers == [""]


async def test_an_answer_cut_by_the_length_limit_is_scored_and_truncated() -> None:  # A6
    env = Sums()
    await env.areset(options={"task_id": "3"})
    turn = AssistantTurn(content="The answer is 20 and the rea", finish_reason="length")
    observation, reward, terminated, truncated, _ = await env.astep(turn)
    assert (observation, reward, terminated, truncated) == ((), 1.0, False, True)
    await env.aclose()


async def test_an_error_of_a_tool_is_told_and_a_fault_ends_the_session() -> None:
    spec = EnvSpec(id="agentgym/sums-v0", entry_point=Sums)
    async with SessionManager() as manager:
        for how, error, status in (
            ("bug", EnvError, RolloutStatus.FAILED_ENV),
            ("lost", InfraError, RolloutStatus.FAILED_INFRA),
        ):
            session = manager.open(spec, task_id="3")
            async with session:
                result = await session.step(call("fail", how="told"))
                assert "not allowed" in str(result.observation[0]["content"])
                assert result.info["tool_errors"] == 1
                with pytest.raises(error) as caught:
                    await session.step(call("fail", how=how))
            assert session.outcome.status is status
            assert session.outcome.reward is None
            assert not isinstance(caught.value, EnvError) or caught.value.task_id == "3"


# -- state --------------------------------------------------------------------------------------------------------


async def test_state_lives_as_long_as_the_episode_and_is_never_shared() -> None:  # D8
    shared = Memory()
    async with SessionManager() as manager:

        async def play(i: int) -> str:
            async with manager.open(REMEMBERING, env_kwargs={"tools": (shared,)}) as session:
                await session.step(call("memory", key="x", value=i))
                result = await session.step(call("memory", key="x"))
                return str(result.observation[0]["content"])

        assert await asyncio.gather(*[play(i) for i in range(4)]) == ["0", "1", "2", "3"]
    assert shared.values == {}
    env = Remembering(tools=(shared,))
    for _ in range(2):  # the same environment again
        await env.areset()
        observation, *_ = await env.astep(call("memory", key="x"))
        assert "nothing is stored" in str(observation[0]["content"])
        await env.astep(call("memory", key="x", value=1))
    await env.aclose()
    assert Memory.created == Memory.released
    assert len(Memory.created) == 6


@function_tool
def collect(item: str, bag: list[str] = []) -> list[str]:  # noqa: B006 - that is the point
    """Collect.

    Args:
        item: to add
        bag: to add to
    """
    bag.append(item)
    return bag


@function_tool
def tally(context: ToolContext) -> str:
    """Count the calls of this session."""
    context.state["n"] = context.state.get("n", 0) + 1
    return f"{context.state['n']} {context.task.id if context.task else None}"


async def test_mutable_defaults_and_the_context_state_are_fresh() -> None:  # D8
    env = Remembering(tools=(collect, tally))
    for _ in range(2):
        await env.areset()
        for expected in ("1 only", "2 only"):
            turn = AssistantTurn(
                tool_calls=[ToolCall(name="collect", arguments={"item": "a"}), ToolCall(name="tally", arguments={})]
            )
            observation, *_ = await env.astep(turn)
            assert text(*observation) == ['["a"]', expected]
    await env.aclose()


async def test_a_failing_release_does_not_skip_the_others(caplog: pytest.LogCaptureFixture) -> None:  # D3
    tools = (Memory("one", broken=True), Memory("two"), Memory("three"))
    async with SessionManager() as manager:
        async with manager.open(REMEMBERING, env_kwargs={"tools": tools}) as session:
            for name in ("one", "two", "three"):
                await session.step(call(name, key="x", value=1))
            await session.step("done")
        assert Memory.released == ["three", "two", "one"]
        assert manager.stats().live == 0
    assert session.outcome.status is RolloutStatus.COMPLETED
    assert any(session.id in record.getMessage() for record in caplog.records)


# -- tool selection -----------------------------------------------------------------------------------------------


class Two(Remembering):
    def tasks(self, split: str) -> list[Task]:
        return [self.only, Task(id="all", prompt="?")]


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        ([], []),
        (None, ["add", "fail"]),
        (["add"], ["add"]),
        (np.array(["add"]), ["add"]),
        (np.array(["fail", "add"]), ["add", "fail"]),
        (np.array([]), []),
    ],
    ids=str,
)
async def test_a_task_selects_its_tools(selection: Any, names: list[str]) -> None:  # E5
    env = Two(tools=(add, fail), task=Task(id="only", prompt="?", tool_selection=selection))
    for _ in range(2):
        await env.areset(options={"task_id": "only"})
        assert [tool.name for tool in env.tools] == names
    observation, _, terminated, _, info = await env.astep(call("add", a=1, b=2))
    assert (observation[0]["content"] == "3") == ("add" in names)
    assert info["tool_errors"] == int("add" not in names)
    assert not terminated
    await env.areset(options={"task_id": "all"})  # the selection does not stick
    assert [tool.name for tool in env.tools] == ["add", "fail"]
    await env.aclose()


async def test_an_unknown_tool_in_a_selection_names_the_task_and_the_tools() -> None:  # E5
    for task in (
        Task(id="row-17", prompt="?", tool_selection=["ad"]),
        Task(id="row-17", prompt="?", tools_kwargs={"ad": {"create_kwargs": {}}}),
    ):
        env = Remembering(tools=(add, fail), task=task)
        with pytest.raises(ConfigError, match=r"row-17.*'ad'.*Did you mean 'add'.*add, fail"):
            env.check_task(task)
        with pytest.raises(ConfigError, match="row-17"):
            await env.areset()
        await env.aclose()


async def test_create_kwargs_of_the_task_reach_the_tool() -> None:
    task = Task(id="only", prompt="?", tools_kwargs={"memory": {"create_kwargs": {"city": "Zürich"}}})
    env = Remembering(task=task)
    await env.areset()
    observation, *_ = await env.astep(call("memory", key="city"))
    assert text(*observation) == ["Zürich"]
    await env.aclose()


# -- scores -------------------------------------------------------------------------------------------------------


async def later(task: Task, answer: str) -> Mapping[str, Any]:
    await asyncio.sleep(0)
    return {"score": 0.5, "style": 0.25, "correct": True, "comment": "not a number"}


@pytest.mark.parametrize(
    ("score", "reward", "components"),
    [
        (1, 1.0, {}),
        (True, 1.0, {}),
        (np.float32(0.5), 0.5, {}),
        ({"score": 0.5, "style": 0.25}, 0.5, {"style": 0.25}),
        (later, 0.5, {"style": 0.25, "correct": 1.0}),
    ],
    ids=str,
)
async def test_scores_of_every_form(score: Any, reward: float, components: dict[str, float]) -> None:
    async with SessionManager() as manager, manager.open(REMEMBERING, env_kwargs={"score": score}) as session:
        await session.step("done")
    assert session.outcome.reward == reward
    assert session.outcome.reward_components == components


class Awaited(Remembering):
    """An async score runs on the event loop."""

    async def score(self, task: Task, answer: str) -> float:
        self.thread = threading.current_thread()
        await asyncio.sleep(0)
        return 0.75


async def test_an_async_score_stays_on_the_event_loop_and_a_sync_one_leaves_it() -> None:
    env = Awaited()
    await env.areset()
    assert (await env.astep("x"))[1] == 0.75
    assert env.thread is threading.current_thread()
    await env.aclose()

    beats: list[float] = []

    async def heartbeat() -> None:
        while True:
            beats.append(time.monotonic())
            await asyncio.sleep(0.005)

    threads = []

    def slow(task: Task, answer: str) -> float:
        threads.append(threading.current_thread())
        time.sleep(0.15)
        return 1.0

    blocking = Remembering(score=slow)
    await blocking.areset()
    beat = asyncio.create_task(heartbeat())
    await blocking.astep("x")
    beat.cancel()
    assert threads[0] is not threading.current_thread()
    assert max(b - a for a, b in itertools.pairwise(beats)) < 0.1
    await blocking.aclose()


@pytest.mark.parametrize(
    "score",
    [None, "good", float("nan"), {"style": 1.0}, {"score": None}, lambda task, answer: 1 / 0],
    ids=["None", "text", "nan", "no score", "score None", "raises"],
)
async def test_a_scorer_at_fault_is_a_failure_and_never_a_zero(score: Any) -> None:
    async with SessionManager() as manager:
        session = manager.open(REMEMBERING, env_kwargs={"score": score})
        with pytest.raises(EnvError) as caught:
            async with session:
                await session.step("done")
    assert caught.value.task_id == "only"
    assert session.outcome.status is RolloutStatus.FAILED_ENV
    assert session.outcome.reward is None


@pytest.mark.parametrize(("weight", "reward"), [(None, 1.0), (0.1, 1.0 + 0.1 * (0.5 + 0.5 + 2.0))])
async def test_tool_rewards_are_reported_and_enter_with_their_weight(weight: float | None, reward: float) -> None:
    async with (
        SessionManager() as manager,
        manager.open(REMEMBERING, env_kwargs={"tool_reward_weight": weight}) as session,
    ):
        await session.step(call("memory", key="x", value=1))
        await session.step(call("memory", key="y", value=2))
        await session.step("done")
    assert session.outcome.reward == pytest.approx(reward)
    assert session.outcome.tool_rewards == (0.5, 0.5)
    assert session.outcome.reward_components == {"tool/memory": 2.0}
    assert session.outcome.metrics == {"tool/memory/stores": 2.0}


async def test_a_limit_scores_the_episode_with_an_empty_answer() -> None:
    async with SessionManager() as manager:
        async with manager.open(REMEMBERING, max_turns=1, env_kwargs={"score": 0.125}) as session:
            result = await session.step(call("memory", key="x", value=1))
        assert result.truncated
    assert session.outcome.status is RolloutStatus.TRUNCATED_TURNS
    assert session.outcome.reward == 0.125
    assert isinstance(session.env, Remembering)
    assert session.env.answers == [""]


# -- the user -----------------------------------------------------------------------------------------------------


class Teacher(Interaction):
    """Praises until the third turn; counts its starts and finishes."""

    log: list[str] = []  # noqa: RUF012 - emptied before each test

    async def start(self, task: Task, mood: str = "kind", **kwargs: Any) -> None:
        self.mood, self.turns = mood, 0
        Teacher.log.append(f"start {task.id} {self.config}")
        if mood == "absent":
            raise RuntimeError("nobody came")

    async def respond(self, messages: Sequence[Message]) -> Any:
        assert messages[-1]["role"] == "assistant"
        self.turns += 1
        return self.turns == 3, f"{self.mood} {self.turns}", 0.5 if self.turns > 1 else None, {"praise": 1}

    async def finish(self) -> None:
        Teacher.log.append("finish")


class Lesson(Remembering):
    interaction = Teacher
    interaction_config = {"level": 2}  # noqa: RUF012 - read only


LESSON = EnvSpec(id="agentgym/lesson-v0", entry_point=Lesson)


async def test_turns_of_words_go_to_the_user_and_calls_to_the_tools() -> None:
    Teacher.log.clear()
    task = Task(id="only", prompt="?", interaction_kwargs={"mood": "strict"})
    async with SessionManager() as manager:
        kwargs = {"task": task, "turn_score_weight": 0.5}
        async with manager.open(LESSON, env_kwargs=kwargs) as session:
            first = await session.step("one")
            assert first.observation == ({"role": "user", "content": "strict 1"},)
            await session.step(call("memory", key="x", value=1))
            await session.step("two")
            last = await session.step("three")
            assert last.terminated
            assert text(*last.observation) == ["strict 3"]
    outcome = session.outcome
    assert Teacher.log == ["start only {'level': 2}", "finish"]
    assert outcome.turn_scores == (0.5, 0.5)
    assert outcome.num_user_turns == 3
    assert outcome.reward == 1.0 + 0.5 * (0.5 + 0.5)
    assert outcome.metrics["praise"] == 3.0
    assert isinstance(session.env, Lesson)
    assert session.env.answers == ["three"]


async def test_every_episode_has_its_own_user() -> None:  # D8
    Teacher.log.clear()
    async with SessionManager() as manager:

        async def play() -> int:
            async with manager.open(LESSON) as session:
                while not session.done:
                    await session.step("x")
                    await asyncio.sleep(0)
            return session.outcome.num_turns

        assert await asyncio.gather(*[play() for _ in range(4)]) == [3, 3, 3, 3]
    env = Lesson()
    for _ in range(2):
        await env.areset()
        assert text(*(await env.astep("x"))[0]) == ["kind 1"]
    await env.aclose()
    assert Teacher.log.count("finish") == len(Teacher.log) / 2 == 6


async def test_a_user_who_fails_to_start_or_answers_nonsense_is_a_fault() -> None:
    Teacher.log.clear()

    class Mute(Interaction):
        async def respond(self, messages: Sequence[Message]) -> Any:
            return "just text"

    async with SessionManager() as manager:
        absent = Task(id="only", prompt="?", interaction_kwargs={"mood": "absent"})
        with pytest.raises(EnvError, match="nobody came"):
            async with manager.open(LESSON, env_kwargs={"task": absent}):
                pass
        assert "finish" not in Teacher.log
        Lesson.interaction, before = Mute, Lesson.interaction  # type: ignore[assignment]
        try:
            session = manager.open(LESSON)
            with pytest.raises(EnvError, match="'just text', expected"):
                async with session:
                    await session.step("x")
        finally:
            Lesson.interaction = before
    assert session.outcome.status is RolloutStatus.FAILED_ENV


async def test_a_reply_may_leave_out_what_it_does_not_score() -> None:
    assert Reply(True, "bye") == (True, "bye", None, {})


# -- settings -----------------------------------------------------------------------------------------------------


class Letters:
    """A cutter that counts letters."""

    def cut(self, text: str, limit: int, side: CutSide) -> str:
        return text[:limit]


async def test_limits_and_the_token_cutter_reach_the_toolbox() -> None:
    for limits in ({"max_tool_response_tokens": 3, "max_parallel_calls": 1}, ToolLimits(max_tool_response_tokens=3)):
        env = Remembering(limits=limits)
        await env.areset()
        env.token_cutter = Letters()
        assert text(*(await env.astep(call("memory", key="x", value=1)))[0]) == ["sto"]
        await env.areset()  # kept for later episodes
        assert text(*(await env.astep(call("memory", key="x", value=1)))[0]) == ["sto"]
        await env.aclose()
    with pytest.raises(ConfigError, match="max_paralel_calls"):
        Remembering(limits={"max_paralel_calls": 1})


async def test_a_class_without_tasks_or_score_says_so() -> None:
    class Empty(ToolEnv):
        pass

    env = Empty()
    with pytest.raises(ConfigError, match=r"define tasks\(split\)"):
        await env.areset()
    await env.aclose()

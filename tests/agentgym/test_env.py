"""`Env`: two sides, one lifecycle."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils import env_checker

import agentgym
from agentgym.env import Action, Env, Info, Observation, Phase
from agentgym.errors import ConfigError, EnvError, ResetNeeded, SessionClosed, SessionError
from agentgym.sync import quarantined
from agentgym.types import AssistantTurn, ParseError, RolloutStatus, ToolCall

StepReturn = tuple[Observation, float, bool, bool, Info]
VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="unset")


def user(text: str) -> Observation:
    return ({"role": "user", "content": text},)


class Echo(Env):
    """Sync: say the digit back within three turns."""

    def __init__(self, *, digits: int = 1) -> None:
        self.digits = digits
        self.closings = 0
        self.closed = threading.Event()
        self.threads: list[threading.Thread] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        super().reset(seed=seed)
        self.threads.append(threading.current_thread())
        self.word = str(self.np_random.integers(10**self.digits))
        self.turns = 0
        return user(f"Say {self.word}"), {"digits": self.digits}

    def step(self, action: Action) -> StepReturn:
        self.threads.append(threading.current_thread())
        self.turns += 1
        right = self.to_turn(action).content == self.word
        return (() if right else user("No.")), float(right), right, self.turns == 3, {"turn": self.turns}

    def close(self) -> None:
        self.threads.append(threading.current_thread())
        self.closings += 1
        self.closed.set()


class AsyncEcho(Env):
    """The same, awaited."""

    def __init__(self) -> None:
        self.closings = 0
        self.loops: list[asyncio.AbstractEventLoop] = []

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        await super().areset(seed=seed)
        self.loops.append(asyncio.get_running_loop())
        self.word = str(self.np_random.integers(10))
        self.turns = 0
        return user(f"Say {self.word}"), {"digits": 1}

    async def astep(self, action: Action) -> StepReturn:
        self.loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        self.turns += 1
        right = self.to_turn(action).content == self.word
        return (() if right else user("No.")), float(right), right, self.turns == 3, {"turn": self.turns}

    async def aclose(self) -> None:
        self.loops.append(asyncio.get_running_loop())
        self.closings += 1


BOTH = pytest.mark.parametrize("cls", [Echo, AsyncEcho])


def play_sync(env: Env, actions: list[str], seed: int = 7) -> list[Any]:
    return [env.reset(seed=seed), *(env.step(action) for action in actions)]


async def play_async(env: Env, actions: list[str], seed: int = 7) -> list[Any]:
    return [await env.areset(seed=seed), *[await env.astep(action) for action in actions]]


# -- which side wins ---------------------------------------------------------------------------------------------------


def test_both_sides_of_both_kinds_of_environment_play_the_same_episode() -> None:
    actions = ["wrong", "", "9"]
    expected = play_sync(Echo(), actions)
    assert expected[0][0] == ({"role": "user", "content": "Say 9"},)
    assert [step[1:4] for step in expected[1:]] == [(0.0, False, False), (0.0, False, False), (1.0, True, True)]
    assert play_sync(AsyncEcho(), actions) == expected
    assert asyncio.run(play_async(Echo(), actions)) == expected
    assert asyncio.run(play_async(AsyncEcho(), actions)) == expected


def reward_of(side: str) -> Callable[..., Any]:
    values = {"a": 1.0, "b": 2.0, "mixin": 3.0}
    name, kind = side.split()

    def step(self: Env, action: Action) -> StepReturn:
        return (), values[name], True, False, {}

    async def astep(self: Env, action: Action) -> StepReturn:
        return (), values[name], True, False, {}

    return step if kind == "step" else astep


def classes(*sides: str) -> type[Env]:
    """Echo, and below it one class for each (name, side); a mixin comes before the class it is mixed into."""
    cls: type[Env] = Echo
    for side in sides:
        name, kind = side.split()
        if name == "mixin":
            mixin = type("Mixin", (), {kind: reward_of(side)})
            cls = type("Mixed", (mixin, cls), {})
        else:
            cls = type(name.upper(), (cls,), {kind: reward_of(side)})
    return type("Leaf", (cls,), {})


@pytest.mark.parametrize(
    ("sides", "expected"),
    [
        (["a step"], 1.0),
        (["a astep"], 1.0),
        (["a step", "b step"], 2.0),
        (["a astep", "b astep"], 2.0),
        (["a step", "b astep"], 2.0),
        (["a astep", "b step"], 2.0),
        (["a step", "mixin astep"], 3.0),
        (["a astep", "mixin step"], 3.0),
        (["mixin step", "b astep"], 2.0),
        (["a astep", "mixin step", "b astep"], 2.0),
    ],
)
def test_the_most_derived_class_that_defines_either_side_wins(sides: list[str], expected: float) -> None:
    cls = classes(*sides)
    env = cls()
    env.reset(seed=0)
    assert env.step("x")[1] == expected

    async def awaited() -> float:
        env = cls()
        await env.areset(seed=0)
        return (await env.astep("x"))[1]

    assert asyncio.run(awaited()) == expected


def test_a_class_may_define_both_sides() -> None:
    class Both(Echo):
        def step(self, action: Action) -> StepReturn:
            return (), 1.0, True, False, {}

        async def astep(self, action: Action) -> StepReturn:
            return (), 2.0, True, False, {}

    async def awaited() -> float:
        env = Both()
        await env.areset()
        return (await env.astep(""))[1]

    env = Both()
    env.reset()
    assert env.step("")[1] == 1.0
    assert asyncio.run(awaited()) == 2.0


@pytest.mark.parametrize("missing", ["reset", "step"])
def test_a_class_without_reset_or_step_on_either_side_is_refused_at_its_definition(missing: str) -> None:
    members = {name: vars(Echo)[name] for name in ("reset", "step") if name != missing}
    with pytest.raises(TypeError, match=rf"class Broken defines neither {missing}\(\) nor a{missing}\(\)"):
        type("Broken", (Env,), members)


def test_an_abstract_class_leaves_them_to_its_subclasses() -> None:
    class Base(Env, abstract=True):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
            return (), {}

    with pytest.raises(TypeError, match="neither step"):
        type("Still", (Base,), {})

    class Whole(Base):
        async def astep(self, action: Action) -> StepReturn:
            return (), 5.0, True, False, {}

    env = Whole()
    env.reset()
    assert env.step("")[1] == 5.0
    env.close()


def test_a_sync_name_for_a_coroutine_function_is_refused_at_the_definition() -> None:
    async def step(self: Env, action: Action) -> StepReturn:
        return (), 0.0, True, False, {}

    with pytest.raises(TypeError, match="call it astep"):
        type("Wrong", (Echo,), {"step": step})


def test_super_reaches_the_other_side_and_the_lifecycle_counts_once() -> None:
    class SyncOverAsync(AsyncEcho):
        def step(self, action: Action) -> StepReturn:
            observation, reward, terminated, truncated, info = super().step(action)
            return observation, reward + 10, terminated, truncated, {**info, "over": True}

    class AsyncOverThat(SyncOverAsync):
        async def astep(self, action: Action) -> StepReturn:
            observation, reward, terminated, truncated, info = await super().astep(action)
            return observation, reward + 100, terminated, truncated, info

    expected = (user("No."), 110.0, False, False, {"turn": 1, "over": True})
    env = AsyncOverThat()
    assert play_sync(env, ["x"])[1] == expected
    assert len(set(env.loops)) == 1
    env.close()

    async def awaited() -> Any:
        env = AsyncOverThat()
        steps = await play_async(env, ["x"])
        assert set(env.loops) == {asyncio.get_running_loop()}
        await env.aclose()
        return steps[1]

    assert asyncio.run(awaited()) == expected


def test_super_step_that_ends_the_episode_does_not_end_it_for_the_overriding_class() -> None:
    class Endless(Echo):
        def step(self, action: Action) -> StepReturn:
            observation, reward, *_ = super().step(action)
            return observation, reward, False, False, {}

    env = Endless()
    env.reset(seed=7)
    assert [env.step("9")[2] for _ in range(5)] == [False] * 5


# -- lifecycle ---------------------------------------------------------------------------------------------------------


@BOTH
def test_step_is_refused_before_reset_after_the_end_and_after_close(cls: type[Env]) -> None:
    env = cls()
    phases = [env.phase]
    with pytest.raises(ResetNeeded, match="has not been reset"):
        env.step("x")
    env.reset(seed=7)
    phases.append(env.phase)
    env.step("9")
    phases.append(env.phase)
    assert phases == [Phase.NEW, Phase.RUNNING, Phase.ENDED]
    with pytest.raises(ResetNeeded, match="has ended its episode"):
        env.step("x")
    env.reset()
    for _ in range(3):
        *_, truncated, _info = env.step("wrong")
    assert truncated is True
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("x")
    env.close()
    for call in (lambda: env.step("x"), env.reset, lambda: env.truncate(RolloutStatus.TIMED_OUT)):
        with pytest.raises(SessionClosed, match="closed"):
            call()
    assert issubclass(SessionClosed, gymnasium.error.ClosedEnvironmentError)


@BOTH
async def test_the_awaited_side_has_the_same_lifecycle(cls: type[Env]) -> None:
    env = cls()
    with pytest.raises(ResetNeeded):
        await env.astep("x")
    await env.areset(seed=7)
    await env.astep("9")
    with pytest.raises(ResetNeeded):
        await env.astep("x")
    await env.aclose()
    with pytest.raises(SessionClosed):
        await env.areset()


@BOTH
async def test_close_runs_the_authors_code_once_whichever_side_is_called(cls: type[Any]) -> None:
    env = cls()
    await env.areset()
    await env.aclose()
    await env.aclose()
    await asyncio.to_thread(env.close)
    assert env.closings == 1


@BOTH
def test_close_before_reset_and_with_statement(cls: type[Any]) -> None:
    with cls() as env:
        pass
    env.close()
    assert env.closings == 1


def test_an_error_in_close_is_raised_once_and_the_threads_end() -> None:
    class Broken(Echo):
        def close(self) -> None:
            raise OSError("disk gone")

    async def main() -> Broken:
        env = Broken()
        await env.areset()
        with pytest.raises(OSError, match="disk gone"):
            await env.aclose()
        await env.aclose()
        return env

    env = asyncio.run(main())
    assert env.phase is Phase.CLOSED
    assert env.sync_thread.close() is True


@BOTH
def test_a_failing_reset_leaves_the_environment_unreset(cls: type[Env]) -> None:
    class Failing(cls):  # type: ignore[misc, valid-type]
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            if options:
                raise ValueError("no such option")
            return super().reset(seed=seed)

    env = Failing()
    env.reset()
    with pytest.raises(ValueError, match="no such option"):
        env.reset(options={"x": 1})
    with pytest.raises(ResetNeeded):
        env.step("x")


def test_truncate_ends_the_episode_and_gives_the_final_reward() -> None:
    class Partial(Echo):
        def truncate(self, status: RolloutStatus) -> float | None:
            return None if status is RolloutStatus.TIMED_OUT else 0.25

    class AsyncPartial(AsyncEcho):
        async def atruncate(self, status: RolloutStatus) -> float | None:
            return 0.75

    async def awaited(env: Env) -> float | None:
        await env.areset()
        reward = await env.atruncate(RolloutStatus.TRUNCATED_TURNS)
        with pytest.raises(ResetNeeded):
            await env.astep("x")
        await env.aclose()
        return reward

    assert [asyncio.run(awaited(env)) for env in (Echo(), Partial(), AsyncPartial())] == [0.0, 0.25, 0.75]
    env = Partial()
    with pytest.raises(ResetNeeded):
        env.truncate(RolloutStatus.TIMED_OUT)
    env.reset()
    assert env.truncate(RolloutStatus.TIMED_OUT) is None
    with pytest.raises(ResetNeeded):
        env.truncate(RolloutStatus.TIMED_OUT)


# -- what the author's code returns ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("text", r"returned 'text'; expected \(observation, reward"),
        (((), 0.0, True, {}), "expected .observation, reward, terminated"),
        (("hello", 0.0, True, False, {}), "the observation 'hello'; expected a tuple of messages"),
        (([{"role": "user", "content": "x"}], 0.0, True, False, {}), "expected a tuple of messages"),
        ((({"role": "robot", "content": "x"},), 0.0, True, False, {}), "robot"),
        ((({"role": "user", "content": None},), 0.0, True, False, {}), "None"),
        (((), None, True, False, {}), "the reward None; expected a finite number"),
        (((), float("nan"), True, False, {}), "the reward nan"),
        (((), np.float32("inf"), True, False, {}), "inf"),
        (((), "1", True, False, {}), "the reward '1'"),
        (((), 0.0, None, False, {}), "terminated=None; expected True or False"),
        (((), 0.0, False, 1, {}), "truncated=1"),
        (((), 0.0, True, False, None), "the info None; expected a dict"),
    ],
)
def test_a_malformed_step_is_an_error_of_the_environment(result: Any, message: str) -> None:
    class Malformed(Echo):
        def step(self, action: Action) -> Any:
            return result

    env = Malformed()
    env.reset()
    with pytest.raises(EnvError, match=message):
        env.step("x")


@pytest.mark.parametrize("result", [(), ((), {}, {}), "x", (user("x"), None), ("x", {})])
def test_a_malformed_reset_is_an_error_of_the_environment(result: Any) -> None:
    class Malformed(AsyncEcho):
        async def areset(self, **_: Any) -> Any:
            return result

    with pytest.raises(EnvError, match=r"reset\(\) of environment 'test_a_.*Malformed'"):
        Malformed().reset()


def test_numbers_of_numpy_become_python_numbers() -> None:
    class Numpy(Echo):
        def step(self, action: Action) -> Any:
            return (), np.float32(0.5), np.True_, np.bool_(False), {}

    env = Numpy()
    env.reset()
    _, reward, terminated, truncated, _ = env.step("x")
    assert (type(reward), reward) == (float, 0.5)
    assert terminated is True
    assert truncated is False


def test_an_integer_reward_becomes_a_float() -> None:
    class Whole(Echo):
        def step(self, action: Action) -> Any:
            return (), 1, True, False, {}

    env = Whole()
    env.reset()
    assert type(env.step("x")[1]) is float


# -- threads and loops -------------------------------------------------------------------------------------------------


async def test_awaited_sync_code_runs_on_one_thread_of_the_instance() -> None:
    first, second = Echo(), Echo()
    for env in (first, second):
        await env.areset()
        await env.astep("x")
        await env.aclose()
    assert [len(set(env.threads)) for env in (first, second)] == [1, 1]
    assert len({first.threads[0], second.threads[0], threading.current_thread()}) == 3


def test_sync_callers_run_on_their_own_thread() -> None:
    env = Echo()
    play_sync(env, ["x"])
    env.close()
    assert set(env.threads) == {threading.current_thread()}


async def test_sync_calls_join_the_thread_once_there_is_one() -> None:
    env = Echo()
    await env.areset()
    env.step("x")
    env.close()
    assert len(set(env.threads)) == 1


async def test_context_variables_reach_sync_code() -> None:  # D7
    class Reads(Echo):
        def step(self, action: Action) -> StepReturn:
            return user(VARIABLE.get()), 0.0, True, False, {}

    VARIABLE.set("of the task")
    env = Reads()
    await env.areset()
    assert (await env.astep("x"))[0] == user("of the task")
    await env.aclose()


def test_context_variables_reach_async_code_on_its_private_loop() -> None:
    class Reads(AsyncEcho):
        async def astep(self, action: Action) -> StepReturn:
            return user(VARIABLE.get()), 0.0, True, False, {}

    VARIABLE.set("of the caller")
    env = Reads()
    env.reset()
    assert env.step("x")[0] == user("of the caller")
    env.close()


async def test_blocking_steps_of_many_environments_overlap() -> None:  # D7
    barrier = threading.Barrier(8)  # broken unless all eight are inside a step at once

    class Blocking(Echo):
        def step(self, action: Action) -> StepReturn:
            barrier.wait(20)
            return (), 1.0, True, False, {}

    envs = [Blocking() for _ in range(8)]
    for env in envs:
        await env.areset()
    results = await asyncio.gather(*(env.astep("x") for env in envs))
    assert [result[1] for result in results] == [1.0] * 8
    for env in envs:
        await env.aclose()


async def test_instances_do_not_share_state_and_a_new_episode_starts_afresh() -> None:  # D8
    class Notes(Echo):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
            self.notes: list[str] = []
            return (), {}

        def step(self, action: Action) -> StepReturn:
            self.notes.append(str(action))
            return user(" ".join(self.notes)), 0.0, False, False, {}

    envs = [Notes() for _ in range(4)]

    async def rollout(env: Notes, number: int) -> Observation:
        await env.areset()
        await env.astep(f"x={number}")
        return (await env.astep("read"))[0]

    seen = await asyncio.gather(*(rollout(env, i) for i, env in enumerate(envs)))
    assert seen == [user(f"x={i} read") for i in range(4)]
    await envs[0].areset()
    assert (await envs[0].astep("read"))[0] == user("read")
    for env in envs:
        await env.aclose()


async def test_async_code_may_use_the_thread_on_which_its_sync_caller_waits() -> None:
    class Scored(AsyncEcho):
        async def astep(self, action: Action) -> StepReturn:
            reward = await self.sync_thread.run(lambda: 0.5)
            return (), reward, True, False, {}

    class Over(Scored):
        def step(self, action: Action) -> StepReturn:
            return super().step(action)

    for cls in (Scored, Over):
        env = cls()
        await env.sync_thread.run(env.reset)  # as a wrapped environment is played
        assert (await asyncio.wait_for(env.sync_thread.run(env.step, "x"), 10))[1] == 0.5
        await env.sync_thread.run(env.close)
        await env.aclose()
        assert env.closings == 1
    env = Over()
    await env.areset()
    assert (await asyncio.wait_for(env.astep("x"), 10))[1] == 0.5
    await env.aclose()


def test_a_sync_caller_of_an_async_environment_gets_one_private_loop() -> None:
    env = AsyncEcho()
    play_sync(env, ["x", "y"])
    env.close()
    assert len(env.loops) == 4
    assert len(set(env.loops)) == 1
    assert env.loops[0].is_closed()


async def test_a_sync_caller_inside_a_running_loop_gets_a_private_loop_too() -> None:
    env = AsyncEcho()  # as in a notebook
    play_sync(env, ["x"])
    env.close()
    assert asyncio.get_running_loop() not in env.loops


async def test_an_async_caller_after_a_sync_one_stays_on_the_private_loop() -> None:
    env = AsyncEcho()
    env.reset()
    await env.astep("x")
    await env.aclose()
    assert len(set(env.loops)) == 1
    assert asyncio.get_running_loop() not in env.loops


async def test_a_sync_caller_in_another_thread_uses_the_loop_of_the_environment() -> None:
    env = AsyncEcho()
    await env.areset()
    await asyncio.to_thread(env.step, "x")
    await env.aclose()
    assert set(env.loops) == {asyncio.get_running_loop()}


async def test_a_sync_call_that_would_block_its_own_loop_says_so() -> None:
    env = AsyncEcho()
    await env.areset()
    for call in (env.close, lambda: env.step("x"), env.reset):
        with pytest.raises(SessionError, match="await areset"):
            call()
    await env.areset()
    await env.astep("x")
    await env.aclose()
    assert env.closings == 1


def test_an_instance_never_changes_its_event_loop() -> None:
    env = AsyncEcho()
    asyncio.run(play_async(env, ["x"]))
    for call in (lambda: env.step("x"), lambda: asyncio.run(env.astep("x")), env.reset):
        with pytest.raises(SessionError, match="event loop that has ended"):
            call()
    env.close()  # what the author's code holds is released all the same
    assert env.closings == 1


async def test_a_step_that_outlives_its_timeout_is_quarantined_at_close() -> None:
    event = threading.Event()

    class Stuck(Echo):
        def step(self, action: Action) -> StepReturn:
            event.wait(60)
            return (), 1.0, True, False, {}

    before = quarantined()
    env = Stuck()
    env.close_timeout = 0.1
    await env.areset()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(env.astep("x"), 0.05)
    await asyncio.wait_for(env.aclose(), 5)
    assert quarantined() == before + 1
    assert env.closings == 0
    event.set()
    assert await asyncio.to_thread(env.closed.wait, 10)  # the author's close runs behind the call, when that returns
    assert len(set(env.threads)) == 1


async def test_sync_close_waits_for_a_stuck_thread_no_longer_than_the_limit() -> None:
    event = threading.Event()

    class Stuck(Echo):
        def step(self, action: Action) -> StepReturn:
            event.wait(60)
            return (), 1.0, True, False, {}

    before = quarantined()
    env = Stuck()
    env.close_timeout = 0.1
    await env.areset()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(env.astep("x"), 0.05)
    env.close()
    assert quarantined() == before + 1
    event.set()


async def test_a_late_call_that_returns_within_the_limit_is_no_leak() -> None:
    event = threading.Event()

    class Slow(Echo):
        def step(self, action: Action) -> StepReturn:
            event.wait(60)
            return (), 1.0, True, False, {}

    before = quarantined()
    env = Slow()
    await env.areset()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(env.astep("x"), 0.05)
    asyncio.get_running_loop().call_later(0.1, event.set)
    await env.aclose()
    assert (env.closings, quarantined()) == (1, before)


async def test_closing_that_is_cancelled_still_closes() -> None:
    event = threading.Event()

    class SlowClose(Echo):
        def close(self) -> None:
            event.wait(60)
            super().close()

    env = SlowClose()
    await env.areset()
    closing = asyncio.create_task(env.aclose())
    await asyncio.sleep(0.02)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    event.set()
    assert await asyncio.to_thread(env.closed.wait, 10)
    assert env.closings == 1


@BOTH
def test_a_forgotten_environment_leaves_no_thread(cls: type[Env]) -> None:
    before = set(threading.enumerate())
    env = cls()
    if cls is Echo:
        asyncio.run(play_async(env, ["x"]))
    else:
        play_sync(env, ["x"])
    own = set(threading.enumerate()) - before
    assert len(own) == 1
    del env
    gc.collect()
    for thread in own:
        thread.join(5)
        assert not thread.is_alive()


# -- seeds, actions, attributes ----------------------------------------------------------------------------------------


@BOTH
def test_the_seed_decides_and_no_seed_goes_on(cls: type[Any]) -> None:
    env = cls()
    first = [env.reset(seed=3)[0], env.reset()[0], env.reset()[0]]
    assert [env.reset(seed=3)[0], env.reset()[0], env.reset()[0]] == first
    assert len({str(observation) for observation in first}) > 1


def test_a_seed_counts_also_if_the_author_does_not_call_super() -> None:
    class Forgets(AsyncEcho):
        async def areset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[Observation, Info]:
            return user(str(self.np_random.integers(10**9))), {}

    assert Forgets().reset(seed=5) == Forgets().reset(seed=5)
    assert Forgets().reset(seed=5) != Forgets().reset(seed=6)


def test_text_is_parsed_and_calls_get_ids_in_order() -> None:
    env = Echo()
    env.reset()
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
    turn = env.to_turn(f"I compute.\n{call}{call}")
    assert turn.content.strip() == "I compute."
    assert [(c.name, c.arguments, c.id) for c in turn.tool_calls] == [
        ("calculator", {"expression": "6*7"}, "call00001"),
        ("calculator", {"expression": "6*7"}, "call00002"),
    ]
    assert turn.raw == f"I compute.\n{call}{call}"
    assert env.to_turn(call).tool_calls[0].id == "call00003"
    env.reset()
    assert env.to_turn(call).tool_calls[0].id == "call00001"


def test_a_malformed_call_is_no_final_answer() -> None:
    env = Echo()
    turn = env.to_turn('<tool_call>{"name": "calculator", "arg</tool_call>')
    assert turn.tool_calls == ()
    assert len(turn.errors) == 1


def test_a_parsed_turn_passes_as_it_is_and_ids_of_the_loop_are_kept() -> None:
    env = Echo()
    turn = AssistantTurn(content="x", errors=(ParseError(message="bad"),), finish_reason="length")
    assert env.to_turn(turn) is turn
    named = AssistantTurn(
        tool_calls=(ToolCall(name="a", arguments={}, id="call00009"), ToolCall(name="b", arguments={}))
    )
    assert [call.id for call in env.to_turn(named).tool_calls] == ["call00009", "call00001"]


def test_the_parser_of_the_environment_reads_text_actions() -> None:
    class Pythonic(Echo):
        parser = "llama3_json"

    text = '{"name": "calculator", "parameters": {"expression": "1+1"}}'
    assert [call.name for call in Pythonic().to_turn(text).tool_calls] == ["calculator"]
    assert Echo().to_turn(text).tool_calls == ()


@pytest.mark.parametrize("action", [None, 3, {"content": "x"}, ["x"]])
def test_an_action_that_is_neither_text_nor_a_turn_is_refused(action: Any) -> None:
    env = Echo()
    env.reset()
    with pytest.raises(SessionError, match="expected the assistant's text or an AssistantTurn"):
        env.step(action)


def test_spaces_belong_to_the_instance() -> None:
    first, second = Echo(), Echo()
    assert first.action_space == second.action_space
    assert first.action_space is first.action_space
    assert first.action_space is not second.action_space
    assert first.observation_space is not second.observation_space


def test_an_environment_without_tasks_or_oracle_says_so() -> None:
    env = Echo()
    with pytest.raises(ConfigError, match="does not list its tasks"):
        env.tasks("train")
    with pytest.raises(ConfigError, match="has no oracle"):
        env.oracle(agentgym.Task(id="1", prompt="x"))


# -- Gymnasium ---------------------------------------------------------------------------------------------------------


@BOTH
def test_gymnasiums_checker_passes_without_a_warning(cls: type[Env]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env_checker.check_env(cls(), skip_render_check=True)


def test_signatures_are_those_of_gymnasium() -> None:
    import inspect

    for cls in (Env, Echo, AsyncEcho):
        assert list(inspect.signature(cls().reset).parameters) == ["seed", "options"]
        assert list(inspect.signature(cls().step).parameters) == ["action"]
        assert not inspect.iscoroutinefunction(cls.step)
        assert inspect.iscoroutinefunction(cls.astep)
        assert cls.astep.__name__ == "astep"
        assert cls.step.__name__ == "step"

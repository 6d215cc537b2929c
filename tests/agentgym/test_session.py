"""Sessions: the life of one episode, its limits, and its release on every path."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import gymnasium
import pytest

from agentgym import sync
from agentgym.env import Env
from agentgym.errors import (
    ConfigError,
    EnvError,
    InfraError,
    ResetNeeded,
    SessionClosed,
    SessionError,
    SessionTimeout,
)
from agentgym.registration import EnvSpec
from agentgym.session import Session, SessionManager, SessionState, SessionStats
from agentgym.tool_env import ToolEnv
from agentgym.types import AssistantTurn, Message, RolloutStatus, Task, ToolCall

T = TypeVar("T")
Hook = Callable[[], Awaitable[None]]

USER: Message = {"role": "user", "content": "go on"}


async def nothing() -> None:
    pass


async def hang() -> None:
    await asyncio.Event().wait()


def raises(error: BaseException) -> Hook:
    async def hook() -> None:
        raise error

    return hook


def sleeps(seconds: float) -> Hook:
    async def hook() -> None:
        await asyncio.sleep(seconds)

    return hook


class Probe(Env):
    """Runs the given hooks inside its methods and writes down what was called."""

    made: list[Probe] = []  # noqa: RUF012 - emptied before each test

    def __init__(
        self,
        *,
        on_make: Callable[[], None] = lambda: None,
        on_reset: Hook = nothing,
        on_step: Hook = nothing,
        on_truncate: Hook = nothing,
        on_close: Hook = nothing,
        steps: int = 3,
        ends: str = "terminated",
        reward: float = 1.0,
        final: float | None = 0.5,
        info: dict[str, Any] | None = None,
    ) -> None:
        on_make()
        self.calls: list[str] = []
        self.hooks = {"reset": on_reset, "step": on_step, "truncate": on_truncate, "close": on_close}
        self.steps, self.ends, self.reward, self.final, self.info = steps, ends, reward, final, info
        self.done = 0
        Probe.made.append(self)

    async def call(self, name: str) -> None:
        self.calls.append(name)
        await self.hooks[name]()

    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        await self.call("reset")
        self.task = Task(id=(options or {}).get("task_id", "task-7"), prompt="")
        return ({"role": "user", "content": f"seed {seed}, options {options}"},), {}

    async def astep(self, action: Any) -> Any:
        await self.call("step")
        self.done += 1
        last = self.done == self.steps
        over = {"terminated": self.ends == "terminated" and last, "truncated": self.ends == "truncated" and last}
        return (dict(USER),), self.reward, over["terminated"], over["truncated"], dict(self.info or {})

    async def atruncate(self, status: RolloutStatus) -> float | None:
        await self.call("truncate")
        return self.final

    async def aclose(self) -> None:
        await self.call("close")


PROBE = EnvSpec(id="agentgym/probe-v0", entry_point=Probe)


@pytest.fixture(autouse=True)
def forget_probes() -> None:
    Probe.made.clear()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer: exact times, and no waiting."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            timers = [timer.when() for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
            self.now = max(self.now, min(timers, default=self.now))
        super()._run_once()  # type: ignore[misc]


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def clean(stats: SessionStats) -> bool:
    return stats.live == 0 and stats.opened == stats.closed


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


# -- the life of a session -------------------------------------------------------------------------------------------


async def test_a_session_counts_collects_and_adds_up() -> None:
    info = {
        "tool_calls": 2,
        "tool_errors": 1,
        "parse_errors": 1,
        "tool_rewards": [0.25],
        "turn_score": 0.5,
        "reward_components": {"style": 0.1},
        "metrics": {"x": 2.0},
    }
    turn = AssistantTurn(content="hm", tool_calls=[ToolCall(name="add", arguments={"a": 1})])
    async with SessionManager() as manager:
        session = manager.open(PROBE, seed=3, task_id="t1", options={"split": "train"}, env_kwargs={"info": info})
        states = [session.state]
        async with session:
            states.append(session.state)
            assert session.conversation == [
                {"role": "user", "content": "seed 3, options {'split': 'train', 'task_id': 't1'}"}
            ]
            assert session.task is not None
            assert session.task.id == "t1"
            while not session.done:
                result = await session.step(turn)
            states.append(session.state)
            assert result.terminated
        assert [*states, session.state] == list(SessionState)
    outcome = session.outcome
    assert outcome.status is RolloutStatus.COMPLETED
    assert outcome.reward == 3.0
    assert (outcome.num_turns, outcome.num_user_turns) == (3, 3)
    assert (outcome.tool_calls, outcome.tool_errors, outcome.parse_errors) == (6, 3, 3)
    assert outcome.tool_rewards == (0.25, 0.25, 0.25)
    assert outcome.turn_scores == (0.5, 0.5, 0.5)
    assert outcome.reward_components == {"style": pytest.approx(0.3)}
    assert outcome.metrics == {"x": 6.0}
    assert outcome.error is None
    assert session.conversation[1:3] == [
        {
            "role": "assistant",
            "content": "hm",
            "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        USER,
    ]
    assert Probe.made[0].calls == ["reset", "step", "step", "step", "close"]


async def test_illegal_transitions_raise() -> None:
    async with SessionManager() as manager:
        session = manager.open(PROBE, env_kwargs={"steps": 1})
        with pytest.raises(ResetNeeded, match="before it is open"):
            await session.step("x")
        with pytest.raises(SessionError, match="no outcome yet"):
            _ = session.outcome
        async with session:
            with pytest.raises(SessionError, match="second time"):
                async with session:
                    pass
            with pytest.raises(SessionError, match="expected one of truncated_turns"):
                await session.truncate(RolloutStatus.COMPLETED)
            await session.step("x")
            with pytest.raises(ResetNeeded, match="after its episode ended as completed"):
                await session.step("x")
            with pytest.raises(ResetNeeded):
                await session.truncate(RolloutStatus.TRUNCATED_TURNS)
        for use in (session.step("x"), session.truncate(RolloutStatus.TRUNCATED_TURNS), session.guard(nothing())):
            with pytest.raises(SessionClosed):
                await use
        with pytest.raises(SessionError, match="second time"):
            async with session:
                pass
    assert session.outcome.status is RolloutStatus.COMPLETED


async def test_two_steps_at_once_are_refused() -> None:
    async with SessionManager() as manager, manager.open(PROBE, env_kwargs={"on_step": hang}) as session:
        first = asyncio.create_task(session.step("x"))
        await settle()
        with pytest.raises(SessionError, match="another call is under way"):
            await session.step("y")
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    assert session.outcome.status is RolloutStatus.CANCELLED


# -- limits of turns -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("final", "reward"),
    [(0.5, 2.5), (0.0, 2.0), (None, None)],
)
async def test_the_turn_limit_truncates_and_asks_once_for_the_final_reward(
    final: float | None, reward: float | None
) -> None:
    async with (
        SessionManager() as manager,
        manager.open(PROBE, max_turns=2, env_kwargs={"steps": 9, "final": final}) as session,
    ):
        assert not (await session.step("x")).truncated
        result = await session.step("x")
        assert (result.truncated, result.terminated, result.reward) == (True, False, 1.0 + (final or 0.0))
        assert session.done
    assert session.outcome.status is RolloutStatus.TRUNCATED_TURNS
    assert session.outcome.reward == reward
    assert Probe.made[0].calls.count("truncate") == 1


async def test_a_step_that_ends_the_episode_at_the_turn_limit_is_not_truncated() -> None:
    async with SessionManager() as manager, manager.open(PROBE, max_turns=3) as session:
        while not session.done:
            await session.step("x")
    assert session.outcome.status is RolloutStatus.COMPLETED
    assert "truncate" not in Probe.made[0].calls


async def test_limits_come_from_the_spec_and_the_caller_overrides_them() -> None:
    spec = EnvSpec(id="agentgym/probe-v0", entry_point=Probe, max_turns=5, max_user_turns=2, kwargs={"steps": 9})
    async with SessionManager() as manager:
        for max_turns, max_user_turns, turns in ((None, None, 2), (None, 4, 4), (1, None, 1)):
            async with manager.open(spec, max_turns=max_turns, max_user_turns=max_user_turns) as session:
                while not session.done:
                    await session.step("x")
            assert session.outcome.num_turns == turns
            assert session.outcome.status is RolloutStatus.TRUNCATED_TURNS
        with pytest.raises(ConfigError, match="max_turns=0"):
            manager.open(spec, max_turns=0)


async def test_an_episode_the_environment_truncates_is_truncated_by_turns_or_by_tokens() -> None:
    async with SessionManager() as manager:
        for reason, status in (("stop", RolloutStatus.TRUNCATED_TURNS), ("length", RolloutStatus.TRUNCATED_TOKENS)):
            async with manager.open(PROBE, env_kwargs={"steps": 1, "ends": "truncated"}) as session:
                await session.step(AssistantTurn(content="x", finish_reason=reason))  # type: ignore[arg-type]
            assert session.outcome.status is status
            assert session.outcome.reward == 1.0
    assert "truncate" not in Probe.made[0].calls


async def test_the_loop_truncates_when_its_tokens_are_used_up() -> None:
    async with SessionManager() as manager, manager.open(PROBE) as session:
        await session.step("x")
        await session.truncate(RolloutStatus.TRUNCATED_TOKENS)
        assert session.done
    assert session.outcome.status is RolloutStatus.TRUNCATED_TOKENS
    assert session.outcome.reward == 1.5


# -- failures --------------------------------------------------------------------------------------------------------


async def test_a_fault_in_the_environment_is_data_and_never_a_reward_of_zero() -> None:
    async with SessionManager() as manager:
        session = manager.open(PROBE, env_kwargs={"on_step": raises(KeyError("gone"))})
        with pytest.raises(EnvError, match="KeyError") as caught:
            async with session:
                await session.step("x")
        assert manager.stats().failed == 1
        assert clean(manager.stats())
    assert caught.value.task_id == "task-7"
    outcome = session.outcome
    assert outcome.status is RolloutStatus.FAILED_ENV
    assert outcome.reward is None
    assert outcome.error_type == "KeyError"
    assert outcome.error is not None
    assert "Traceback" in outcome.error
    assert Probe.made[0].calls == ["reset", "step", "close"]


async def test_a_lost_connection_is_a_failure_of_the_infrastructure() -> None:
    async with SessionManager() as manager:
        session = manager.open(PROBE, env_kwargs={"on_step": raises(ConnectionResetError("peer"))})
        with pytest.raises(InfraError):
            async with session:
                await session.step("x")
    assert session.outcome.status is RolloutStatus.FAILED_INFRA
    assert session.outcome.reward is None


@pytest.mark.parametrize(
    "kwargs",
    [
        {"reward": math.nan},
        {"reward": "much"},
        {"info": {"tool_calls": "two"}},
        {"info": {"reward_components": {"style": "good"}}},
    ],
    ids=str,
)
async def test_what_a_step_returns_is_checked(kwargs: dict[str, Any]) -> None:
    async with SessionManager() as manager:
        session = manager.open(PROBE, env_kwargs=kwargs)
        with pytest.raises(EnvError):
            async with session:
                await session.step("x")
    assert session.outcome.status is RolloutStatus.FAILED_ENV
    assert session.outcome.reward is None


async def test_the_kind_of_error_that_leaves_the_block_is_the_status() -> None:
    for error, status in (
        (InfraError("engine lost"), RolloutStatus.FAILED_INFRA),
        (ValueError("a bug in the loop"), RolloutStatus.FAILED_ENV),
        (asyncio.CancelledError(), RolloutStatus.CANCELLED),
        (KeyboardInterrupt(), RolloutStatus.CANCELLED),
    ):
        async with SessionManager() as manager:
            session = manager.open(PROBE)
            with pytest.raises(type(error)):
                async with session:
                    raise error
            assert session.outcome.status is status
            assert session.outcome.reward is None
            assert clean(manager.stats())


async def test_leaving_before_the_end_cancels() -> None:
    async with SessionManager() as manager, manager.open(PROBE) as session:
        await session.step("x")
    assert session.outcome.status is RolloutStatus.CANCELLED
    assert session.outcome.reward is None
    assert manager.stats().cancelled == 1


async def test_a_loop_that_fails_after_the_end_spoils_the_rollout_and_a_cancellation_does_not() -> None:
    for error, status, reward in (
        (ValueError("late"), RolloutStatus.FAILED_ENV, None),
        (InfraError("late"), RolloutStatus.FAILED_INFRA, None),
        (asyncio.CancelledError("late"), RolloutStatus.COMPLETED, 1.0),
    ):
        async with SessionManager() as manager:
            session = manager.open(PROBE, env_kwargs={"steps": 1})

            async def play(session: Session = session, error: BaseException = error) -> None:
                async with session:
                    await session.step("x")
                    raise error

            with pytest.raises(type(error), match="late"):
                await play()
        assert session.outcome.status is status
        assert session.outcome.reward == reward


# -- clocks ----------------------------------------------------------------------------------------------------------


def test_a_step_over_its_limit_is_a_failure_of_the_infrastructure() -> None:
    async def main() -> Session:
        async with SessionManager(step_timeout=2.0) as manager:
            session = manager.open(PROBE, env_kwargs={"on_step": hang})
            with pytest.raises(InfraError, match="took more than 2 s"):
                async with session:
                    await session.step("x")
            assert asyncio.get_running_loop().time() == 2.0
            assert clean(manager.stats())
        return session

    session = run_virtual(main())
    assert session.outcome.status is RolloutStatus.FAILED_INFRA
    assert Probe.made[0].calls == ["reset", "step", "close"]


def test_the_wall_clock_starts_with_the_opening_and_truncates_inside_a_step() -> None:  # D12
    async def main() -> tuple[Session, Session, float]:
        slow = {"on_reset": sleeps(0.4), "on_step": sleeps(0.4), "final": 0.25}
        async with SessionManager(session_timeout=1.0) as manager:

            async def play(kwargs: dict[str, Any]) -> tuple[Session, float]:
                async with manager.open(PROBE, env_kwargs=kwargs) as session:
                    while not session.done:
                        result = await session.step("x")
                    ended = asyncio.get_running_loop().time()
                    assert result.truncated == (session.status is RolloutStatus.TIMED_OUT)
                return session, ended

            (timed_out, ended), (other, _) = await asyncio.gather(play(slow), play({"on_step": sleeps(0.3)}))
            assert manager.stats().timed_out == 1
            assert clean(manager.stats())
        return timed_out, other, ended

    timed_out, other, ended = run_virtual(main())
    assert ended == pytest.approx(1.0)
    assert timed_out.outcome.status is RolloutStatus.TIMED_OUT
    assert timed_out.outcome.reward == 1.25  # one whole step, and what truncate() gave
    assert timed_out.outcome.num_turns == 2
    assert other.outcome.status is RolloutStatus.COMPLETED
    assert sorted(probe.calls.count("close") for probe in Probe.made) == [1, 1]


def test_the_wall_clock_does_not_run_while_a_session_waits_for_a_permit() -> None:
    async def main() -> list[Session]:
        async with SessionManager(1, session_timeout=1.0) as manager:

            async def play() -> Session:
                async with manager.open(PROBE, env_kwargs={"on_step": sleeps(0.3)}) as session:
                    while not session.done:
                        await session.step("x")
                return session

            return await asyncio.gather(*[play() for _ in range(4)])

    assert [session.outcome.status for session in run_virtual(main())] == [RolloutStatus.COMPLETED] * 4


def test_a_step_after_the_wall_clock_is_not_run() -> None:
    async def main() -> Session:
        async with SessionManager(session_timeout=1.0) as manager, manager.open(PROBE) as session:
            await asyncio.sleep(3.0)
            assert (await session.step("x")).truncated
        return session

    session = run_virtual(main())
    assert session.outcome.status is RolloutStatus.TIMED_OUT
    assert session.outcome.reward == 0.5
    assert Probe.made[0].calls == ["reset", "truncate", "close"]


@pytest.mark.parametrize(
    ("kwargs", "reward", "seconds"),
    [
        ({"final": 0.5}, 0.5, 1.0),
        ({"final": None}, None, 1.0),
        ({"on_truncate": raises(ValueError("half-done state"))}, None, 1.0),
        ({"on_truncate": hang}, None, 3.0),
    ],
    ids=["scored", "not scorable", "raises", "hangs"],
)
def test_a_timed_out_session_is_scored_if_it_can_be(
    kwargs: dict[str, Any], reward: float | None, seconds: float
) -> None:
    async def main() -> Session:
        manager = SessionManager(session_timeout=1.0, close_timeout=2.0)
        async with manager, manager.open(PROBE, env_kwargs={"on_step": hang, **kwargs}) as session:
            result = await session.step("x")
            assert (result.truncated, result.terminated, result.observation) == (True, False, ())
            assert asyncio.get_running_loop().time() == pytest.approx(seconds)
        return session

    outcome = run_virtual(main()).outcome
    assert outcome.status is RolloutStatus.TIMED_OUT
    assert outcome.reward == reward


def test_guard_puts_a_generation_under_the_wall_clock() -> None:
    async def main() -> Session:
        async with SessionManager(session_timeout=1.0) as manager, manager.open(PROBE) as session:
            assert await session.guard(asyncio.sleep(0.25, "text")) == "text"
            with pytest.raises(SessionTimeout, match="1 s ran out"):
                await session.guard(asyncio.sleep(5))
            assert asyncio.get_running_loop().time() == 1.0
            assert session.done
            with pytest.raises(ResetNeeded):
                await session.guard(asyncio.sleep(5))
        return session

    outcome = run_virtual(main()).outcome
    assert outcome.status is RolloutStatus.TIMED_OUT
    assert outcome.reward == 0.5


async def test_a_timeout_of_the_guarded_code_itself_stays_what_it_is() -> None:
    async with SessionManager(session_timeout=100) as manager, manager.open(PROBE) as session:
        with pytest.raises(TimeoutError, match="from the engine"):
            await session.guard(raises(TimeoutError("from the engine"))())
        assert not session.done


async def test_guard_without_a_wall_clock_just_awaits() -> None:
    async with SessionManager() as manager, manager.open(PROBE) as session:
        assert await session.guard(asyncio.sleep(0, 7)) == 7


async def test_a_timeout_inside_the_environment_is_not_the_wall_clock() -> None:
    async with SessionManager(session_timeout=100) as manager:
        session = manager.open(PROBE, env_kwargs={"on_step": raises(TimeoutError("of a socket"))})
        with pytest.raises(InfraError, match="TimeoutError: of a socket"):
            async with session:
                await session.step("x")
    assert session.outcome.status is RolloutStatus.FAILED_INFRA


def test_a_late_result_of_a_step_that_ignored_its_cancellation_does_not_count() -> None:
    async def stubborn() -> None:
        try:
            await hang()
        except asyncio.CancelledError:
            await asyncio.sleep(0.5)

    async def main() -> Session:
        async with (
            SessionManager(session_timeout=1.0) as manager,
            manager.open(PROBE, env_kwargs={"on_step": stubborn, "final": 0.0}) as session,
        ):
            assert (await session.step("x")).truncated
        return session

    outcome = run_virtual(main()).outcome
    assert outcome.status is RolloutStatus.TIMED_OUT
    assert outcome.reward == 0.0


# -- opening ---------------------------------------------------------------------------------------------------------


async def test_cancelling_during_the_opening_leaves_nothing_behind() -> None:  # D1
    async with SessionManager() as manager:
        session = manager.open(PROBE, env_kwargs={"on_reset": hang})
        opening = asyncio.create_task(session.__aenter__())
        await settle()
        assert manager.stats().live == 1
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert clean(manager.stats())
    assert Probe.made[0].calls == ["reset", "close"]
    assert session.outcome.status is RolloutStatus.CANCELLED


def test_an_opening_that_hangs_ends_at_its_limit() -> None:  # D1
    async def main() -> None:
        async with SessionManager(open_timeout=3.0) as manager:
            session = manager.open(PROBE, env_kwargs={"on_reset": hang})
            with pytest.raises(InfraError, match=r"opening .* took more than 3 s"):
                async with session:
                    pass
            assert asyncio.get_running_loop().time() == 3.0
            assert session.outcome.status is RolloutStatus.FAILED_INFRA
            assert clean(manager.stats())

    run_virtual(main())
    assert Probe.made[0].calls == ["reset", "close"]


def test_an_opening_longer_than_the_wall_clock_times_out_unscored() -> None:
    async def main() -> None:
        async with SessionManager(session_timeout=1.0) as manager:
            session = manager.open(PROBE, env_kwargs={"on_reset": hang})
            with pytest.raises(SessionTimeout):
                async with session:
                    pass
            assert session.outcome.status is RolloutStatus.TIMED_OUT
            assert session.outcome.reward is None

    run_virtual(main())
    assert Probe.made[0].calls == ["reset", "close"]


async def test_an_opening_that_raises_half_way_is_released_once() -> None:  # D1
    async with SessionManager() as manager:
        with pytest.raises(EnvError, match="half-way"):
            async with manager.open(PROBE, env_kwargs={"on_reset": raises(RuntimeError("half-way"))}):
                pass
        assert clean(manager.stats())
        assert manager.stats().failed == 1
    assert Probe.made[0].calls == ["reset", "close"]


async def test_a_constructor_that_raises_leaves_nothing_to_release() -> None:  # D1
    def refuse() -> None:
        raise RuntimeError("no licence")

    async with SessionManager() as manager:
        with pytest.raises(EnvError, match="no licence"):
            async with manager.open(PROBE, env_kwargs={"on_make": refuse}):
                pass
        assert clean(manager.stats())
    assert Probe.made == []


async def test_a_wrapper_that_raises_leaves_the_environment_closed() -> None:
    def broken(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
        raise RuntimeError("broken wrapper")

    async with SessionManager() as manager:
        with pytest.raises(EnvError, match="broken wrapper"):
            async with manager.open(PROBE, wrappers=[broken]):
                pass
        assert clean(manager.stats())
    assert Probe.made[0].calls == ["close"]


# -- release ---------------------------------------------------------------------------------------------------------


class Gate:
    """A hook that says when it is reached and waits until it is let through."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()
        self.passed = 0

    async def __call__(self) -> None:
        self.reached.set()
        await self.opened.wait()
        self.passed += 1


async def test_further_cancellations_do_not_interrupt_the_release() -> None:  # D2
    gate = Gate()
    async with SessionManager() as manager:

        async def play() -> None:
            async with manager.open(PROBE, env_kwargs={"on_step": hang, "on_close": gate}) as session:
                await session.step("x")

        task = asyncio.create_task(play())
        await settle()
        task.cancel("first")
        await gate.reached.wait()
        for _ in range(3):
            task.cancel("again")
            await settle()
            assert not task.done()
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert gate.passed == 1
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
        assert clean(manager.stats())
    assert Probe.made[0].calls == ["reset", "step", "close"]


async def test_the_original_error_is_the_cause_of_a_cancellation_during_the_release() -> None:  # D2
    gate = Gate()
    async with SessionManager() as manager:

        async def play() -> None:
            async with manager.open(PROBE, env_kwargs={"on_close": gate}):
                raise LookupError("the loop's own")

        task = asyncio.create_task(play())
        await gate.reached.wait()
        task.cancel()
        await settle()
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert isinstance(caught.value.__cause__, LookupError)
        assert gate.passed == 1


async def test_everything_is_released_before_the_error_goes_on() -> None:
    async with SessionManager() as manager:

        async def play() -> None:
            async with manager.open(PROBE) as session:
                session.resources.push("sandbox", raises(OSError("gone")))
                raise LookupError

        with pytest.raises(LookupError):
            await play()
        assert Probe.made[0].calls[-1] == "close"
        assert clean(manager.stats())


async def test_failing_releases_do_not_skip_others(caplog: pytest.LogCaptureFixture) -> None:  # D3
    released: list[str] = []

    def release(name: str, error: Exception | None = None) -> Hook:
        async def hook() -> None:
            released.append(name)
            if error is not None:
                raise error

        return hook

    async with SessionManager() as manager:
        closing = release("environment", ValueError("close failed"))
        async with manager.open(PROBE, env_kwargs={"steps": 1, "on_close": closing}) as session:
            session.resources.push("tool 3", release("tool 3"))
            session.resources.push("tool 2", release("tool 2"))
            session.resources.push("tool 1", release("tool 1", RuntimeError("release failed")))
            await session.step("x")
        assert released == ["tool 1", "tool 2", "tool 3", "environment"]
        assert manager.stats().release_errors == 2
        assert clean(manager.stats())
    assert session.outcome.status is RolloutStatus.COMPLETED  # the result is kept
    assert session.outcome.reward == 1.0
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert all(session.id in error for error in errors)
    assert "release failed" in errors[0]
    assert "close failed" in errors[1]


@pytest.mark.parametrize("stubborn", [False, True], ids=["cancellable", "ignores cancellation"])
def test_a_release_that_hangs_leaves_time_for_the_others(stubborn: bool) -> None:
    async def endless() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if not stubborn or asyncio.get_running_loop().time() > 100:
                    raise

    async def main() -> float:
        async with SessionManager(close_timeout=10.0) as manager:
            async with manager.open(PROBE, env_kwargs={"steps": 1}) as session:
                session.resources.push("sandbox", endless)
                await session.step("x")
            ended = asyncio.get_running_loop().time()
            stats = manager.stats()
            assert clean(stats)
            assert (stats.release_errors, stats.quarantined) == (1, int(stubborn))
            assert session.outcome.status is RolloutStatus.COMPLETED
        await asyncio.sleep(200)  # the runner cancels what is left and waits for it
        return ended

    assert 5.0 <= run_virtual(main()) <= 6.0
    assert Probe.made[0].calls == ["reset", "step", "close"]


def test_releases_that_use_up_all_the_time_leave_some_for_each_of_the_others() -> None:
    async def slow() -> None:
        try:
            await hang()
        finally:
            await asyncio.sleep(1.0)

    async def main() -> SessionManager:
        async with SessionManager(close_timeout=0.5) as manager:
            async with manager.open(PROBE) as session:
                for i in range(4):
                    session.resources.push(f"sandbox {i}", slow)
            assert asyncio.get_running_loop().time() < 4.0
            await asyncio.sleep(10)
        return manager

    stats = run_virtual(main()).stats()
    assert clean(stats)
    assert stats.release_errors == 4
    assert Probe.made[0].calls == ["reset", "close"]


async def test_closing_twice_releases_once() -> None:
    async with SessionManager() as manager:
        async with manager.open(PROBE) as session:
            await session.aclose()
            await session.aclose()
            with pytest.raises(SessionClosed):
                await session.step("x")
        assert Probe.made[0].calls == ["reset", "close"]
        unused = manager.open(PROBE)
        await unused.aclose()
        with pytest.raises(SessionError):
            async with unused:
                pass
    assert manager.stats().opened == 1


async def test_closing_from_another_task_cancels_the_step_first() -> None:
    async with SessionManager() as manager:
        reached = asyncio.Event()

        async def step() -> None:
            reached.set()
            await hang()

        async def play() -> None:
            async with manager.open(PROBE, env_kwargs={"on_step": step}) as session:
                sessions.append(session)
                await session.step("x")

        sessions: list[Session] = []
        task = asyncio.create_task(play())
        await reached.wait()
        await sessions[0].aclose()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert Probe.made[0].calls == ["reset", "step", "close"]
        assert clean(manager.stats())


async def test_a_session_closed_while_it_waits_for_a_permit_never_opens() -> None:
    async with SessionManager(1) as manager:
        async with manager.open(PROBE):
            waiting = manager.open(PROBE)
            task = asyncio.create_task(waiting.__aenter__())
            await settle()
            await waiting.aclose()
        with pytest.raises(SessionClosed):
            await task
        assert clean(manager.stats())
    assert len(Probe.made) == 1


# -- resources -------------------------------------------------------------------------------------------------------


async def test_a_resource_whose_creation_is_cancelled_is_released_only_if_it_came_to_be() -> None:  # D1
    log: list[str] = []

    async def fragile() -> str:
        await hang()
        return "never"

    async def sturdy() -> str:
        try:
            await hang()
        except asyncio.CancelledError:
            log.append("made")
        return "container"

    async def broken() -> str:
        raise OSError("no daemon")

    async def release(name: str) -> None:
        log.append(f"released {name}")

    async with SessionManager() as manager:
        for create, expected in ((fragile, []), (sturdy, ["made", "released container"])):
            log.clear()

            async def play(create: Callable[[], Awaitable[str]] = create) -> None:
                async with manager.open(PROBE) as session:
                    await session.resources.acquire("sandbox", create, release)

            task = asyncio.create_task(play())
            await settle()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert log == expected
        log.clear()
        async with manager.open(PROBE) as session:
            with pytest.raises(OSError, match="no daemon"):
                await session.resources.acquire("sandbox", broken, release)
            assert await session.resources.acquire("other", lambda: asyncio.sleep(0, "it"), release) == "it"
        assert log == ["released it"]
        with pytest.raises(SessionClosed):
            session.resources.push("late", nothing)
        with pytest.raises(SessionClosed):
            await session.resources.acquire("late", broken, release)
        assert manager.stats().release_errors == 0


# -- sync environments and wrappers ----------------------------------------------------------------------------------

who = contextvars.ContextVar("who", default="nobody")


class Blocking(Env):
    """A sync environment that notes the thread and the context of each call."""

    seen: list[tuple[str, str]] = []  # noqa: RUF012 - emptied before each test

    def __init__(self, *, stuck: threading.Event | None = None) -> None:
        self.stuck = stuck

    def note(self) -> None:
        Blocking.seen.append((threading.current_thread().name, who.get()))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.note()
        self.n = 0
        return (dict(USER),), {}

    def step(self, action: Any) -> Any:
        self.note()
        if self.stuck is not None:
            self.stuck.wait(5)
        self.n += 1
        return (dict(USER),), 0.5, self.n == 2, False, {}

    def close(self) -> None:
        self.note()


BLOCKING = EnvSpec(id="agentgym/blocking-v0", entry_point=Blocking)


async def test_sync_code_of_a_session_runs_on_one_thread_with_the_callers_context() -> None:
    Blocking.seen.clear()
    who.set("me")
    async with SessionManager() as manager, manager.open(BLOCKING) as session:
        while not session.done:
            await session.step("x")
    assert session.outcome.reward == 1.0
    assert len(Blocking.seen) == 4
    assert len({thread for thread, _ in Blocking.seen}) == 1
    assert Blocking.seen[0][0] != threading.current_thread().name
    assert {name for _, name in Blocking.seen} == {"me"}


async def test_a_blocking_step_over_its_limit_is_left_alone_and_counted() -> None:
    stuck = threading.Event()
    before = sync.quarantined()
    async with SessionManager(step_timeout=0.05, close_timeout=0.1) as manager:
        session = manager.open(BLOCKING, env_kwargs={"stuck": stuck})
        with pytest.raises(InfraError):
            async with session:
                await session.step("x")
        assert clean(manager.stats())
        assert manager.stats().quarantined == 1
    assert sync.quarantined() == before + 1
    stuck.set()


class Doubled(gymnasium.RewardWrapper[Any, Any]):
    """Doubles rewards and counts its closings."""

    closed = 0

    def reward(self, reward: Any) -> float:
        return 2.0 * float(reward)

    def close(self) -> None:
        Doubled.closed += 1
        super().close()


def limited(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    return gymnasium.wrappers.TimeLimit(env, max_episode_steps=1)


@pytest.mark.parametrize("spec", [PROBE, BLOCKING], ids=["async", "sync"])
async def test_gymnasium_wrappers_are_stepped_through(spec: EnvSpec) -> None:
    Doubled.closed = 0
    Blocking.seen.clear()
    async with SessionManager() as manager:
        async with manager.open(spec, wrappers=[Doubled, limited]) as session:
            assert isinstance(session.env, Env)
            result = await session.step("x")
        assert result.truncated
        assert session.outcome.reward == (2.0 if spec is PROBE else 1.0)
        assert session.outcome.status is RolloutStatus.TRUNCATED_TURNS
        assert Doubled.closed == 1
        assert clean(manager.stats())
        assert manager.stats().release_errors == 0
    if spec is PROBE:
        assert Probe.made[0].calls == ["reset", "step", "close"]
    else:
        assert len({thread for thread, _ in Blocking.seen}) == 1
        assert len(Blocking.seen) == 3


class Sums(ToolEnv):
    """An async environment with sync parts of its own."""

    def tasks(self, split: str) -> list[Task]:
        return [Task(id="t", prompt="1+1")]

    def score(self, task: Task, answer: str) -> float:
        return float(answer == "2")


async def test_a_wrapped_environment_may_need_its_own_thread_during_a_step() -> None:
    spec = EnvSpec(id="agentgym/sums-v0", entry_point=Sums)
    async with SessionManager(step_timeout=10) as manager:
        async with manager.open(spec, wrappers=[Doubled]) as session:
            assert (await session.step("2")).reward == 2.0
        assert manager.stats().completed == 1


async def test_a_wrapped_step_that_is_stuck_is_left_alone_and_the_rest_released() -> None:
    stuck = threading.Event()
    async with SessionManager(step_timeout=0.05, close_timeout=0.2) as manager:
        session = manager.open(BLOCKING, env_kwargs={"stuck": stuck}, wrappers=[Doubled])
        with pytest.raises(InfraError):
            async with session:
                await session.step("x")
        assert clean(manager.stats())
        assert manager.stats().quarantined == 2  # the thread of the wrappers waits for that of the environment
    assert session.outcome.status is RolloutStatus.FAILED_INFRA
    stuck.set()

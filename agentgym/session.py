"""`Session`: one live episode of an environment, opened, stepped and closed exactly once, on every path.

    created -> open -> finished -> closed

``created``: made by `SessionManager.open`, holds nothing. ``open``: the environment is reset and waits for a turn.
``finished``: the episode has a status; only the release is left. ``closed``: everything is released.

Whatever leaves the ``async with`` block (success, exception, cancellation, timeout), the release runs in a task of its
own: it is started once, cancelling the session's task again does not interrupt it, and the error goes on only when it
is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import gymnasium

from agentgym import registration
from agentgym.errors import (
    AgentGymError,
    InfraError,
    ResetNeeded,
    SessionClosed,
    SessionError,
    SessionTimeout,
    boundary,
)
from agentgym.ids import new_id
from agentgym.messages import assistant_message
from agentgym.resources import Entry, ReleaseReport, Resources, outlast, release_all
from agentgym.sync import SyncThread
from agentgym.tally import Tally, status_of
from agentgym.types import AssistantTurn, Message, Outcome, RolloutStatus, StepResult, Task

if TYPE_CHECKING:
    from agentgym.env import Env
    from agentgym.registration import EnvSpec
    from agentgym.session_manager import SessionManager, SessionStats

__all__ = ["Session", "SessionManager", "SessionState", "SessionStats", "status_of"]

T = TypeVar("T")
Wrapper = Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]

logger = logging.getLogger(__name__)


THREAD_SHARE = 0.8
"""Part of the close limit that an environment waits for a thread inside a call: it gives up before it is given up."""


class SessionState(StrEnum):
    """Where a session stands in its life."""

    CREATED = "created"
    OPEN = "open"
    FINISHED = "finished"
    CLOSED = "closed"


class Wrapped:
    """An environment inside Gymnasium wrappers.

    Wrappers know only ``reset``, ``step`` and ``close``, so these are called on a thread. It is not the environment's
    own: an async environment may need that one while a step is under way.
    """

    def __init__(self, env: Env, wrappers: Sequence[Wrapper], session_id: str) -> None:
        _ = env.sync_thread  # once it exists, the environment's own sync code always runs there
        self.outer: gymnasium.Env[Any, Any] = env
        for wrapper in wrappers:
            self.outer = wrapper(self.outer)
        self.thread = SyncThread(f"agentgym-wrappers-{session_id}")

    async def aclose(self) -> None:
        """Close from the outside in, and end the thread."""
        try:
            await self.thread.run(self.outer.close)
        finally:
            await self.thread.aclose(0.1)


class Session:
    """One episode; made by `SessionManager.open`, entered with ``async with``.

    Of a step's ``info`` the session counts, all optional: ``tool_calls``, ``tool_errors``, ``parse_errors`` (added up),
    ``tool_rewards`` (list, collected), ``turn_score`` (number, collected), ``reward_components`` and ``metrics``
    (numbers by name, added up).

    Attributes:
        id: unique; the owner label of everything the session holds.
        env: the environment itself, without Gymnasium wrappers; exists from the opening on.
        env_id: its registered name.
        state: see the module.
        status: how the episode ended; None while it runs.
        conversation: all messages so far, those of the assistant included.
        resources: release of whatever else the session holds: before the environment, in reverse order.
        max_turns, max_user_turns: limits of assistant turns, and of user turns after the first prompt. The episode is
            truncated by the step that reaches one without ending the episode.
        error: what ended a failed session.
    """

    env: Env

    def __init__(
        self,
        manager: SessionManager,
        spec: EnvSpec,
        *,
        seed: int | None,
        options: Mapping[str, Any],
        max_turns: int | None,
        max_user_turns: int | None,
        env_kwargs: Mapping[str, Any],
        wrappers: Sequence[Wrapper],
        slots: int,
    ) -> None:
        self.id = new_id()
        self.env_id = spec.id
        self.state = SessionState.CREATED
        self.status: RolloutStatus | None = None
        self.conversation: list[Message] = []
        self.resources = Resources()
        self.max_turns = max_turns
        self.max_user_turns = max_user_turns
        self.slots = slots
        self.error: BaseException | None = None
        self._manager = manager
        self._spec = spec
        self._seed = seed
        self._options = dict(options)
        self._env_kwargs = dict(env_kwargs)
        self._wrappers = wrappers
        self._wrapped: Wrapped | None = None
        self._tally = Tally()
        self._deadline: float | None = None
        self._release: asyncio.Task[None] | None = None
        self._admitted = False
        self._busy: asyncio.Task[Any] | None = None
        self._idle: asyncio.Future[None] | None = None

    # -- what a loop sees ------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """True when the episode has ended, however."""
        return self.status is not None

    @property
    def task(self) -> Task | None:
        """The task that is played, if the environment names one."""
        return self.env.task if hasattr(self, "env") else None

    @property
    def tools(self) -> list[dict[str, Any]]:
        """OpenAI function schemas of the tools that may be called."""
        return [tool.tool_schema for tool in self.env.tools]

    @property
    def outcome(self) -> Outcome:
        """How the episode ended. Raises `SessionError` while it still runs."""
        if self.status is None:
            raise SessionError(f"session {self.id} is {self.state} and has no outcome yet; step it until session.done")
        return self._tally.outcome(self.status, self.error)

    @property
    def terminal_score(self) -> float:
        """The environment's own score of the episode: what it says itself, else the reward that came at the end."""
        own: float | None = getattr(self.env, "terminal_score", None)
        return self._tally.last if own is None else own

    async def step(self, action: str | AssistantTurn) -> StepResult:
        """Hand the assistant's turn to the environment.

        When the wall clock runs out, before or inside the step, the step is cancelled and the result is truncated, with
        no observation and status ``timed_out``.

        Args:
            action: a turn, or text that the environment's parser reads.

        Raises:
            EnvError: the environment failed; the session is finished as ``failed_env``.
            InfraError: something outside was lost, or the step took longer than ``step_timeout``: ``failed_infra``.
            ResetNeeded, SessionClosed: the session is not open.
        """
        with self._working("step"):
            try:
                return await self._step(action)
            except BaseException as error:
                self._fail(error)
                raise

    async def truncate(self, status: RolloutStatus) -> None:
        """End the episode because a budget is used up; the environment is asked once for the final reward.

        Args:
            status: ``truncated_turns``, ``truncated_tokens`` or ``timed_out``.
        """
        if not status.truncated:
            raise SessionError(f"truncate({status}): expected one of truncated_turns, truncated_tokens, timed_out")
        with self._working("truncate"):
            try:
                await self._truncate(status)
            except BaseException as error:
                self._fail(error)
                raise

    async def guard(self, awaitable: Awaitable[T]) -> T:
        """Await something, e.g. a generation, under the session's wall clock.

        Raises:
            SessionTimeout: the clock ran out: the awaitable was cancelled and the session ended as ``timed_out``.
        """
        if self.state is not SessionState.OPEN:
            if isinstance(awaitable, Coroutine):
                awaitable.close()
            self._refuse("guard")
        if self._deadline is None:
            return await awaitable
        scope = asyncio.timeout_at(self._deadline)
        try:
            async with scope:
                return await awaitable
        except TimeoutError as error:
            if not scope.expired():
                raise
            await self.truncate(RolloutStatus.TIMED_OUT)
            raise self._timeout_error() from error

    # -- opening and closing ---------------------------------------------------------------------------------------

    async def __aenter__(self) -> Session:
        if self.state is not SessionState.CREATED or self._busy is not None:
            raise SessionError(f"session {self.id} is entered a second time; open a new one for each episode")
        self._busy = asyncio.current_task()
        try:
            await self._manager.admit(self)
        except BaseException as error:
            self._busy = None
            self.state = SessionState.CLOSED
            self._fail(error)
            raise
        # From here on the session is live: there is no way out but through its release.
        self._admitted = True
        try:
            await self._open()
        except BaseException as error:
            self._fail(error)
            self._leave()
            await self._close(error)
            raise
        self._leave()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        spoiled = isinstance(error, Exception) and not isinstance(error, SessionTimeout)
        if spoiled and self.state is SessionState.FINISHED:
            self.status = None  # it may have ended well, but whoever played it failed: there is nothing to learn from
        self._fail(error if error is not None else asyncio.CancelledError("left before the episode ended"))
        await self._close(error)

    async def aclose(self) -> None:
        """Release everything, if that has not happened; a step under way is cancelled first. Idempotent.

        Errors of single releases are logged with the session's id and counted by the manager, never raised: they cannot
        spoil a finished episode.
        """
        await self._close(None)

    def start_release(self) -> asyncio.Task[None]:
        """The task that releases the session; the first call starts it."""
        if self._release is None:
            self.state = SessionState.CLOSED
            self._release = asyncio.create_task(self._release_everything(), name=f"release of session {self.id}")
        return self._release

    async def _close(self, error: BaseException | None) -> None:
        if not self._admitted:
            self.state = SessionState.CLOSED  # it holds nothing; if it waits for a permit, it will give that back
            return
        interrupted = await outlast(self.start_release())
        if interrupted is not None:
            raise interrupted from error

    async def _open(self) -> None:
        limits = self._manager
        self._refuse_if_closed()
        loop = asyncio.get_running_loop()
        if limits.session_timeout is not None:
            self._deadline = loop.time() + limits.session_timeout
        self.resources.owner = self.id
        await self._bounded("opening", limits.open_timeout, self._make_and_reset)
        self._refuse_if_closed()  # the environment may have ignored that it was cancelled
        self.state = SessionState.OPEN

    async def _make_and_reset(self) -> None:
        self.env = env = registration.make(self._spec, **self._env_kwargs)
        env.close_timeout = THREAD_SHARE * self._manager.close_timeout
        if isinstance(resources := getattr(env, "resources", None), Resources):
            resources.owner = self.id
            self.resources = resources
        options = self._options or None
        if self._wrappers:
            wrapped = self._wrapped = Wrapped(env, self._wrappers, self.id)
            observation, _ = await wrapped.thread.run(wrapped.outer.reset, seed=self._seed, options=options)
        else:
            observation, _ = await env.areset(seed=self._seed, options=options)
        self.conversation.extend(observation)

    async def _release_everything(self) -> None:
        if self._busy is not None:
            await self._interrupt()
        if self.status is None:
            self._fail(asyncio.CancelledError("closed before the episode ended"))
        entries = self.resources.drain(close=True)
        if self._wrapped is not None:
            entries.append(Entry("wrappers", self._wrapped.aclose))
        if hasattr(self, "env"):
            entries.append(Entry(f"environment {self.env_id!r}", self.env.aclose))
        report = ReleaseReport()
        try:
            report = await release_all(entries, owner=self.id, timeout=self._manager.close_timeout)
        finally:
            assert self.status is not None
            self._manager.dismiss(self, self.status, report)

    async def _interrupt(self) -> None:
        """Cancel the task that is inside the environment, and give it the close limit to come out."""
        assert self._busy is not None
        self._idle = asyncio.get_running_loop().create_future()
        self._busy.cancel(f"session {self.id} is being closed")
        await outlast(self._idle, self._manager.close_timeout)

    # -- one call into the environment -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _working(self, what: str) -> Iterator[None]:
        """Refuses calls that the state does not allow, and two at once."""
        if self.state is not SessionState.OPEN:
            self._refuse(what)
        if self._busy is not None:
            raise SessionError(f"{what} of session {self.id} while another call is under way; await that one first")
        self._busy = asyncio.current_task()
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._busy = None
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _refuse_if_closed(self) -> None:
        if self.state is SessionState.CLOSED:
            raise SessionClosed(f"session {self.id} was closed while it opened")

    def _refuse(self, what: str) -> None:
        if self.state is SessionState.CREATED:
            raise ResetNeeded(f"{what} of session {self.id} before it is open; use it inside 'async with'")
        if self.state is SessionState.CLOSED:
            raise SessionClosed(f"{what} of session {self.id} after it was closed; open a new one")
        raise ResetNeeded(f"{what} of session {self.id} after its episode ended as {self.status}; open a new one")

    async def _bounded(self, what: str, limit: float, call: Callable[[], Awaitable[T]]) -> T:
        """Await foreign code within ``limit`` seconds and within the wall clock.

        Raises:
            SessionTimeout: the wall clock ran out first.
            InfraError: the limit ran out.
            EnvError: the code raised.
        """
        when = asyncio.get_running_loop().time() + limit
        last = self._deadline is not None and self._deadline <= when
        scope = asyncio.timeout_at(self._deadline if last else when)
        try:
            async with scope:
                with self._boundary(what):
                    result = await call()
        except (TimeoutError, AgentGymError) as error:
            if not scope.expired():
                raise
            expiry: BaseException | None = error
        else:
            if not scope.expired():
                return result
            expiry = None  # the code swallowed its cancellation; its late result does not count
        if last:
            raise self._timeout_error() from expiry
        raise InfraError(f"{what} of environment {self.env_id!r} took more than {limit:g} s") from expiry

    def _boundary(self, what: str) -> contextlib.AbstractContextManager[None]:
        task = self.task
        return boundary(f"{what} of environment {self.env_id!r}", task_id=None if task is None else task.id)

    async def _step(self, action: str | AssistantTurn) -> StepResult:
        with self._boundary("action"):
            turn = self.env.to_turn(action)
        self.conversation.append(assistant_message(turn))
        tally = self._tally
        tally.turns += 1
        try:
            if self._deadline is not None and asyncio.get_running_loop().time() >= self._deadline:
                raise self._timeout_error()
            result = await self._bounded("step", self._manager.step_timeout, lambda: self._call_step(turn))
        except SessionTimeout:
            extra = await self._truncate(RolloutStatus.TIMED_OUT)
            return StepResult(observation=(), reward=extra, terminated=False, truncated=True, info={})
        self.conversation.extend(result.observation)
        with self._boundary("info"):
            tally.add(result.reward, result.observation, result.info)
        if result.terminated:
            self._finish(RolloutStatus.COMPLETED)
        elif result.truncated:
            cut = turn.finish_reason == "length"
            self._finish(RolloutStatus.TRUNCATED_TOKENS if cut else RolloutStatus.TRUNCATED_TURNS)
        elif _reached(tally.turns, self.max_turns) or _reached(tally.user_turns, self.max_user_turns):
            extra = await self._truncate(RolloutStatus.TRUNCATED_TURNS)
            return StepResult(
                observation=result.observation,
                reward=result.reward + extra,
                terminated=False,
                truncated=True,
                info=result.info,
            )
        return result

    async def _call_step(self, turn: AssistantTurn) -> StepResult:
        if self._wrapped is None:
            observation, reward, terminated, truncated, info = await self.env.astep(turn)
        else:
            step: Callable[..., Any] = self._wrapped.outer.step
            observation, reward, terminated, truncated, info = await self._wrapped.thread.run(step, turn)
        return StepResult(
            observation=tuple(observation),
            reward=_finite(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            info=info,
        )

    async def _truncate(self, status: RolloutStatus) -> float:
        """Finish with a status of truncation; gives back the final reward that was added (0.0 if there is none)."""
        limit = self._manager.step_timeout
        if status is RolloutStatus.TIMED_OUT:
            self._deadline = None  # it is over; what is left to do has the close limit
            limit = self._manager.close_timeout
        try:
            extra = await self._bounded("truncate", limit, lambda: self._call_truncate(status))
        except SessionTimeout:
            status, extra = RolloutStatus.TIMED_OUT, None
        except AgentGymError as error:
            if status is not RolloutStatus.TIMED_OUT:
                raise
            # An environment that was cancelled inside a step need not be able to score itself.
            logger.warning("session %s timed out and could not be scored: %s", self.id, error, exc_info=error)
            self.error = error
            extra = None
        self._tally.last = extra or 0.0
        if extra is None:
            self._tally.scored = False
        else:
            self._tally.add_final(extra)
        self._finish(status)
        return extra or 0.0

    async def _call_truncate(self, status: RolloutStatus) -> float | None:
        extra = await self.env.atruncate(status)
        return None if extra is None else _finite(extra)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _finish(self, status: RolloutStatus) -> None:
        if self.state is not SessionState.CLOSED:
            self.state = SessionState.FINISHED
        self.status = self.status or status

    def _fail(self, error: BaseException) -> None:
        if self.status is None:
            self.error = error
            self._tally.scored = False
            self._finish(status_of(error))

    def _timeout_error(self) -> SessionTimeout:
        return SessionTimeout(f"session {self.id}: its wall clock of {self._manager.session_timeout:g} s ran out")


def _finite(reward: Any) -> float:
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"reward {reward!r}: expected a finite number, or None from truncate() if it cannot be scored")
    return value


def _reached(count: int, limit: int | None) -> bool:
    return limit is not None and count >= limit


def __getattr__(name: str) -> Any:
    # The manager imports this module; looked up here, both import orders work.
    if name in ("SessionManager", "SessionStats"):
        from agentgym import session_manager

        return getattr(session_manager, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

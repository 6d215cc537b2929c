"""`SessionManager`: the one global limit on live sessions, their timeouts, and the guarantee that all of them end."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from agentgym import registration, sync, tool_threads
from agentgym.errors import ConfigError, SessionClosed, SessionError
from agentgym.registration import EnvSpec
from agentgym.resources import ReleaseReport, outlast
from agentgym.session import Session, Wrapper
from agentgym.types import RolloutStatus

if TYPE_CHECKING:
    from agentgym.settings import RolloutConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStats:
    """Counters of a manager since it was made."""

    opened: int
    """Sessions whose opening began, also those whose opening failed."""
    closed: int
    """Sessions that were released."""
    live: int
    """``opened - closed``; 0 after the manager's exit."""
    peak: int
    """The most sessions that were live at once."""
    waiting: int
    """Sessions that wait for a permit."""
    completed: int
    truncated: int
    """Ended by a limit of turns or tokens."""
    timed_out: int
    failed: int
    """``failed_env`` and ``failed_infra``."""
    cancelled: int
    release_errors: int
    """Releases that raised or ran out of time."""
    quarantined: int
    """Left behind: releases that ignored their cancellation, and threads of this process stuck inside a call."""


class Permits:
    """A counting limit that serves in the order of asking: a large request is not overtaken by small ones."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free = limit
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def acquire(self, slots: int) -> None:
        """Take ``slots`` permits, waiting behind everyone who asked before."""
        if not self._queue and slots <= self._free:
            self._free -= slots
            return
        granted = asyncio.get_running_loop().create_future()
        entry = (slots, granted)
        self._queue.append(entry)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._queue.remove(entry)
                self._serve()  # those behind may fit now
            elif granted.exception() is None:  # granted and cancelled in the same pass of the event loop
                self.release(slots)
            raise

    def release(self, slots: int) -> None:
        """Give permits back."""
        self._free += slots
        self._serve()

    def refuse(self, reason: str) -> None:
        """Send everyone who waits away with `SessionClosed`."""
        while self._queue:
            _, granted = self._queue.popleft()
            if not granted.done():
                granted.set_exception(SessionClosed(reason))

    def _serve(self) -> None:
        while self._queue and self._queue[0][0] <= self._free:
            slots, granted = self._queue[0]
            if granted.done():  # cancelled; its owner takes it out of the queue
                return
            self._queue.popleft()
            self._free -= slots
            granted.set_result(None)


class SessionManager:
    """Opens sessions under one global limit and closes whatever is still open when it exits.

    A session that waits for a permit has not started: its clocks begin when it opens. The order is first come, first
    served. One manager belongs to one event loop.

    Args:
        limit: permits; a session takes one, or ``slots`` of them.
        open_timeout: seconds for making and resetting the environment; then `InfraError`.
        step_timeout: seconds for each step; then `InfraError`.
        session_timeout: wall clock of a whole session in seconds, from the start of its opening; None: no limit. When
            it runs out the session is truncated with status ``timed_out``.
        close_timeout: seconds for all releases of a session together, and for scoring a session that timed out.

    Example:
        >>> async with SessionManager(limit=2) as manager:
        ...     async with manager.open("calculator-math", seed=3) as session:
        ...         while not session.done:
        ...             await session.step(await policy(session.conversation))
        >>> session.outcome.reward
    """

    def __init__(
        self,
        limit: int = 256,
        *,
        open_timeout: float = 60.0,
        step_timeout: float = 120.0,
        session_timeout: float | None = None,
        close_timeout: float = 10.0,
    ) -> None:
        if limit < 1:
            raise ConfigError(f"limit={limit}: expected at least 1 session")
        for name, value in {
            "open_timeout": open_timeout,
            "step_timeout": step_timeout,
            "session_timeout": session_timeout,
            "close_timeout": close_timeout,
        }.items():
            if value is not None and value <= 0:
                raise ConfigError(f"{name}={value}: expected a positive number of seconds")
        self.limit = limit
        self.open_timeout = open_timeout
        self.step_timeout = step_timeout
        self.session_timeout = session_timeout
        self.close_timeout = close_timeout
        self._permits = Permits(limit)
        self._live: dict[str, Session] = {}
        self._opened = 0
        self._peak = 0
        self._ended: Counter[RolloutStatus] = Counter()
        self._report = ReleaseReport()
        self._stuck_before = stuck_threads()
        self._closed = False

    @classmethod
    def of(cls, settings: RolloutConfig) -> Self:
        """One with the limits of a configuration's ``rollout`` section."""
        return cls(
            settings.session_limit,
            open_timeout=settings.open_timeout,
            step_timeout=settings.step_timeout,
            session_timeout=settings.session_timeout,
            close_timeout=settings.close_timeout,
        )

    def open(
        self,
        env: str | EnvSpec,
        *,
        seed: int | None = None,
        task_id: str | None = None,
        options: Mapping[str, Any] | None = None,
        max_turns: int | None = None,
        max_user_turns: int | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        wrappers: Sequence[Wrapper] = (),
        slots: int = 1,
    ) -> Session:
        """A session of ``env``, to be entered with ``async with``; nothing has started yet.

        Args:
            env: registered name or spec.
            seed: of the environment's ``reset``.
            task_id: pins the task; the same as ``options={"task_id": ...}``.
            options: of the environment's ``reset``, e.g. ``{"split": "validation"}``.
            max_turns: limit of assistant turns; None: the spec's.
            max_user_turns: limit of user turns after the first prompt; None: the spec's.
            env_kwargs: constructor arguments of the environment.
            wrappers: Gymnasium wrappers, innermost first; the environment is then stepped through ``step``.
            slots: permits that this session takes.

        Raises:
            ConfigError: unknown environment, more slots than the limit, or a limit below 1.
            SessionClosed: the manager is closed.
        """
        self._refuse_if_closed()
        if not 1 <= slots <= self.limit:
            raise ConfigError(
                f"a session that takes {slots} slots can never open under limit={self.limit}: "
                f"raise the limit, or ask for 1 to {self.limit} slots"
            )
        spec = registration.spec(env) if isinstance(env, str) else env
        return Session(
            self,
            spec,
            seed=seed,
            options={**(options or {}), **({} if task_id is None else {"task_id": task_id})},
            max_turns=turn_limit("max_turns", max_turns, spec.max_turns),
            max_user_turns=turn_limit("max_user_turns", max_user_turns, spec.max_user_turns),
            env_kwargs=env_kwargs or {},
            wrappers=wrappers,
            slots=slots,
        )

    def stats(self) -> SessionStats:
        """The counters now."""
        closed = sum(self._ended.values())
        return SessionStats(
            opened=self._opened,
            closed=closed,
            live=self._opened - closed,
            peak=self._peak,
            waiting=self._permits.waiting,
            completed=self._ended[RolloutStatus.COMPLETED],
            truncated=self._ended[RolloutStatus.TRUNCATED_TURNS] + self._ended[RolloutStatus.TRUNCATED_TOKENS],
            timed_out=self._ended[RolloutStatus.TIMED_OUT],
            failed=self._ended[RolloutStatus.FAILED_ENV] + self._ended[RolloutStatus.FAILED_INFRA],
            cancelled=self._ended[RolloutStatus.CANCELLED],
            release_errors=self._report.errors,
            quarantined=self._report.quarantined + stuck_threads() - self._stuck_before,
        )

    async def admit(self, session: Session) -> None:
        """Called by a session that opens: wait for its permits and count it as live."""
        self._refuse_if_closed()
        await self._permits.acquire(session.slots)
        if self._closed:  # closed after the permits were granted, before this task went on
            self._permits.release(session.slots)
            self._refuse_if_closed()
        self._live[session.id] = session
        self._opened += 1
        self._peak = max(self._peak, len(self._live))

    def dismiss(self, session: Session, status: RolloutStatus, report: ReleaseReport) -> None:
        """Called by a session that was released: count it and give its permits to those who wait."""
        if self._live.pop(session.id, None) is None:
            raise SessionError(f"session {session.id} is not live: it was released before")
        self._ended[status] += 1
        self._report.errors += report.errors
        self._report.quarantined += report.quarantined
        self._permits.release(session.slots)

    async def aclose(self) -> None:
        """Refuse new sessions and release those still open; a step that is under way is cancelled first. Idempotent.

        A cancellation meanwhile is raised when everything has been released.
        """
        self._closed = True
        self._permits.refuse("the session manager was closed while the session waited for a permit")
        interrupted: asyncio.CancelledError | None = None
        for release in [session.start_release() for session in list(self._live.values())]:
            interrupted = await outlast(release) or interrupted
        if interrupted is not None:
            raise interrupted

    async def __aenter__(self) -> SessionManager:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.aclose()
        except asyncio.CancelledError as interrupted:
            raise interrupted from error

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise SessionClosed("the session manager is closed; make a new one")


def stuck_threads() -> int:
    """How many threads of this process were left behind inside a call, since its start."""
    return sync.quarantined() + tool_threads.quarantined()


def turn_limit(name: str, override: int | None, default: int | None) -> int | None:
    """The limit that holds: the override, else the spec's. Raises `ConfigError` below 1."""
    value = default if override is None else override
    if value is not None and value < 1:
        raise ConfigError(f"{name}={value}: expected at least 1, or None for no limit")
    return value

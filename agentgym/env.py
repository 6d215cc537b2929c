"""`Env`: a Gymnasium environment whose observations are chat messages and whose actions are assistant turns."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import gymnasium
import numpy as np

from agentgym.errors import ConfigError, EnvError, ResetNeeded, SessionClosed, SessionError
from agentgym.sides import Way, install
from agentgym.spaces import Assistant, Messages
from agentgym.sync import LoopThread, SyncThread, block_on
from agentgym.types import AssistantTurn, Message, RolloutStatus, Task, ToolCall

if TYPE_CHECKING:
    from agentgym.tool import BaseTool

T = TypeVar("T")

Observation = tuple[Message, ...]
"""The new messages since the last action."""
Action = str | AssistantTurn
"""Raw assistant text, or a turn that was parsed already."""
Info = dict[str, Any]


class Phase(Enum):
    """Where an environment is in its life."""

    NEW = "has not been reset"
    RUNNING = "is in an episode"
    ENDED = "has ended its episode"
    CLOSED = "is closed"


class Env(gymnasium.Env[Observation, Action]):
    """Base of all environments.

    An author overrides `reset` and `step` (and `close`, `truncate` where needed), or their awaited forms `areset`,
    `astep`, `aclose`, `atruncate`; the base class supplies the other form. The most derived class that defines either
    form of an operation wins. Sync code runs on one dedicated thread when it is awaited; async code of an instance
    always runs on one event loop, which is a private one when the first caller is sync. A class whose subclasses define
    `reset` and `step` is declared with ``class Base(Env, abstract=True)``.

    Example:
        >>> class Echo(Env):
        ...     def reset(self, *, seed=None, options=None):
        ...         super().reset(seed=seed)
        ...         self.word = str(self.np_random.integers(10))
        ...         return ({"role": "user", "content": f"Say {self.word}"},), {}
        ...
        ...     def step(self, action):
        ...         right = self.to_turn(action).content == self.word
        ...         return (), float(right), True, False, {}

    Raises:
        SessionClosed: anything but `close` after `close`.
        ResetNeeded: `step` or `truncate` before `reset` or after the end of the episode.
        EnvError: the author's code returned something that is not an observation, a finite reward, and so on.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - declared so by Gymnasium

    tools: Sequence[BaseTool] = ()
    """The tools of the current task; valid after `reset`."""
    parser: str = "hermes"
    """Name of the parser for actions that are raw text."""
    task: Task | None = None
    """The task that is being played."""
    max_turns: int | None = None
    """Limit of assistant turns that the registered spec gives; the session enforces it."""
    max_user_turns: int | None = None
    """Limit of user turns after the first prompt; the session enforces it."""
    close_timeout: float = 10.0
    """Seconds that `close` waits for a thread that is still inside a call."""

    _phase: Phase = Phase.NEW
    _thread: SyncThread | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _loop_thread: LoopThread | None = None
    _num_calls: int = 0

    def __init_subclass__(cls, *, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        install(cls, root=Env, abstract=abstract)

    # -- what authors override ---------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start an episode.

        Args:
            seed: seeds `np_random`; None goes on with the generator as it is.
            options: ``{"task_id": ...}`` pins a task, ``{"split": ...}`` chooses where tasks are drawn from.

        Returns:
            The first messages, and an info dict that depends on seed and actions only.
        """
        gymnasium.Env.reset(self, seed=seed)
        return (), {}

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """`reset`, awaited."""
        gymnasium.Env.reset(self, seed=seed)
        return (), {}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, Info]:
        """Play one assistant turn. Any text is a legal action.

        Returns:
            The new messages, the reward, whether the episode terminated, whether it was truncated, and an info dict.
            The session reads these keys of it, all optional: ``tool_calls``, ``tool_errors``, ``parse_errors``
            (counts), ``tool_rewards`` (list), ``turn_score``, ``reward_components``, ``metrics`` (dicts of numbers).
        """
        raise NotImplementedError(f"{type(self).__qualname__} defines neither step() nor astep()")

    async def astep(self, action: Action) -> tuple[Observation, float, bool, bool, Info]:
        """`step`, awaited."""
        raise NotImplementedError(f"{type(self).__qualname__} defines neither step() nor astep()")

    def truncate(self, status: RolloutStatus) -> float | None:
        """A limit (turns, tokens, wall clock) ends the episode here: the reward to add, None if it cannot be scored."""
        return 0.0

    async def atruncate(self, status: RolloutStatus) -> float | None:
        """`truncate`, awaited."""
        return 0.0

    def close(self) -> None:
        """Release what the environment holds. Idempotent: the author's code runs once."""

    async def aclose(self) -> None:
        """`close`, awaited."""

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split (``"train"`` or ``"validation"``). Raises `ConfigError` if there is no such list."""
        raise ConfigError(f"environment {self.name!r} does not list its tasks: define tasks(split) to use this")

    def oracle(self, task: Task) -> list[AssistantTurn]:
        """How a perfect player answers ``task``, turn by turn. Raises `ConfigError` if nobody has said how."""
        raise ConfigError(f"environment {self.name!r} has no oracle: define oracle(task) to use this")

    def answer_key(self, answer: str) -> str:
        """What two final answers must share to be the same one; a majority vote counts equal keys."""
        return " ".join(answer.split())

    # -- what callers use --------------------------------------------------------------------------------------------

    @cached_property
    def observation_space(self) -> Messages:  # type: ignore[override]
        """Tuples of messages. Each instance has its own, since a space holds a random generator."""
        return Messages()

    @cached_property
    def action_space(self) -> Assistant:  # type: ignore[override]
        """Text, or an `AssistantTurn`."""
        return Assistant()

    @property
    def name(self) -> str:
        """The registered id, or the class name of an environment that was constructed directly; for messages."""
        return self.spec.id if self.spec is not None else type(self).__qualname__

    @property
    def phase(self) -> Phase:
        """Where the environment is in its life."""
        return self._phase

    @property
    def sync_thread(self) -> SyncThread:
        """The thread for this instance's blocking code; wrapped environments are stepped on it too."""
        if self._thread is None:
            self._thread = SyncThread(f"agentgym-{self.name}")
        return self._thread

    def to_turn(self, action: Action) -> AssistantTurn:
        """The action as a turn: text is parsed with `parser`, and calls without an id get one."""
        if isinstance(action, str):
            from agentgym.tokens import get_parser  # late: actions are mostly parsed by the loop already

            parsed = get_parser(self.parser).parse(action, [tool.tool_schema for tool in self.tools] or None)
            turn = AssistantTurn(
                content=parsed.content, tool_calls=tuple(parsed.tool_calls), errors=tuple(parsed.errors), raw=action
            )
        elif isinstance(action, AssistantTurn):
            turn = action
        else:
            raise SessionError(
                f"action {action!r} of type {type(action).__name__}: expected the assistant's text or an AssistantTurn"
            )
        if all(call.id for call in turn.tool_calls):
            return turn
        return replace(turn, tool_calls=tuple(self._with_id(call) for call in turn.tool_calls))

    def _with_id(self, call: ToolCall) -> ToolCall:
        if call.id:
            return call
        self._num_calls += 1
        return replace(call, id=f"call{self._num_calls:05d}")

    # -- lifecycle; called by the wrappers of agentgym.sides -----------------------------------------------------------

    def _enter(self, operation: str, kwargs: dict[str, Any]) -> None:
        """Refuse what the phase does not allow; prepare a reset."""
        if self._phase is Phase.CLOSED:
            raise SessionClosed(f"{operation}() of environment {self.name!r}, which is closed: make a new one")
        if operation == "reset":
            self._phase = Phase.NEW
            self._num_calls = 0
            if kwargs.get("seed") is not None:
                gymnasium.Env.reset(self, seed=kwargs["seed"])
        elif self._phase is not Phase.RUNNING:
            raise ResetNeeded(
                f"{operation}() of environment {self.name!r}, which {self._phase.value}: call reset() first"
            )

    def _leave(self, operation: str, result: Any) -> Any:
        """Validate what the author's code returned; note where the episode stands."""
        if operation == "reset":
            result = self._checked_reset(result)
            self._phase = Phase.RUNNING
        elif operation == "step":
            result = self._checked_step(result)
            if result[2] or result[3]:
                self._phase = Phase.ENDED
        else:
            result = None if result is None else self._checked_reward("truncate", result)
            self._phase = Phase.ENDED
        return result

    def _checked_reset(self, result: Any) -> tuple[Observation, Info]:
        if not (isinstance(result, tuple) and len(result) == 2):
            raise self._fault("reset", f"returned {_short(result)}; expected (observation, info)")
        self._check_data("reset", result[0], result[1])
        return result[0], result[1]

    def _checked_step(self, result: Any) -> tuple[Observation, float, bool, bool, Info]:
        if not (isinstance(result, tuple) and len(result) == 5):
            expected = "(observation, reward, terminated, truncated, info)"
            raise self._fault("step", f"returned {_short(result)}; expected {expected}")
        observation, reward, terminated, truncated, info = result
        self._check_data("step", observation, info)
        for flag, value in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(value, bool | np.bool_):
                raise self._fault("step", f"returned {flag}={_short(value)}; expected True or False")
        return observation, self._checked_reward("step", reward), bool(terminated), bool(truncated), info

    def _check_data(self, operation: str, observation: Any, info: Any) -> None:
        if observation not in self.observation_space:
            raise self._fault(
                operation,
                f"returned the observation {_short(observation)}; expected a tuple of messages "
                f"like ({{'role': 'user', 'content': '...'}},)",
            )
        if not isinstance(info, dict):
            raise self._fault(operation, f"returned the info {_short(info)}; expected a dict")

    def _checked_reward(self, operation: str, reward: Any) -> float:
        if not isinstance(reward, int | float | np.integer | np.floating | np.bool_) or not math.isfinite(reward):
            raise self._fault(operation, f"returned the reward {_short(reward)}; expected a finite number")
        return float(reward)

    def _fault(self, operation: str, what: str) -> EnvError:
        task_id = self.task.id if self.task is not None else None
        return EnvError(f"{operation}() of environment {self.name!r} {what}", task_id=task_id)

    # -- crossing sides; called by the wrappers of agentgym.sides ------------------------------------------------------

    def _call(self, part: Callable[[], Any], way: Way) -> Any:
        """Run the author's code for a sync caller."""
        if way == "direct" or (way == "native" and self._thread is None):
            return part()
        if way == "native":
            return self.sync_thread.call(part)
        if self._loop is not None and self._loop is _running_loop():
            raise SessionError(
                f"environment {self.name!r} runs on this event loop, which a sync call would block for ever: "
                f"await areset(), astep() and aclose() instead"
            )
        loop = self._other_loop()
        return block_on(loop, _await(part), self._thread)

    async def _acall(self, part: Callable[[], Any], way: Way) -> Any:
        """Run the author's code for an async caller."""
        if way == "direct":
            return await part()
        if way == "bridge":
            return await self.sync_thread.run(part)
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        if self._loop is running:
            return await part()
        loop = self._other_loop()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_await(part), loop))

    def _other_loop(self) -> asyncio.AbstractEventLoop:
        """The instance's event loop, seen from outside of it: a private one if it has none yet."""
        closing = self._phase is Phase.CLOSED
        if self._loop_thread is None and self._loop is not None and not self._loop.is_running() and not closing:
            raise SessionError(
                f"environment {self.name!r} was used on an event loop that has ended, and an instance never changes "
                f"its loop: keep reset, steps and close within one asyncio.run, use the sync methods throughout, "
                f"or make a new environment"
            )
        if self._loop is None or (self._loop_thread is None and not self._loop.is_running()):
            # For closing alone a new loop is better than none: what the author's code holds is released.
            self._loop_thread = LoopThread(f"agentgym-{self.name}")
            self._loop = self._loop_thread.loop
        return self._loop

    def _close_blocking(self, part: Callable[[], Any], way: Way) -> None:
        if self._phase is Phase.CLOSED:
            return
        if way == "bridge" and self._loop is not None and self._loop is _running_loop():
            self._call(part, way)  # says why not, before anything is marked as closed
        self._phase = Phase.CLOSED
        thread = self._thread
        idle = True
        try:
            if way == "native" and thread is not None and not thread.current:
                future = thread.submit(part)
                idle = bool(concurrent.futures.wait([future], self.close_timeout).done)
                if idle:
                    future.result()
            else:
                self._call(part, way)
        finally:
            if thread is not None:
                thread.close(self.close_timeout if idle else 0.0)
            if self._loop_thread is not None:
                self._loop_thread.close(self.close_timeout)

    async def _close_awaiting(self, part: Callable[[], Any], way: Way) -> None:
        if self._phase is Phase.CLOSED:
            return
        self._phase = Phase.CLOSED
        idle = False
        try:
            if way == "bridge":
                # Not cancelled along with the caller: it waits behind a call that does not return, and runs after it.
                future = asyncio.wrap_future(self.sync_thread.submit(part))
                future.add_done_callback(_retrieve)
                done, _ = await asyncio.wait([future], timeout=self.close_timeout)
                idle = bool(done)
                if idle:
                    future.result()
            else:
                await self._acall(part, way)
                idle = True
        finally:
            if self._thread is not None:
                await self._thread.aclose(self.close_timeout if idle else 0.0)
            if self._loop_thread is not None:
                await asyncio.to_thread(self._loop_thread.close, self.close_timeout)


install(Env)


async def _await(part: Callable[[], Any]) -> Any:
    return await part()


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Mark a result as seen, so that asyncio does not log it when its waiter has gone."""
    if not future.cancelled():
        future.exception()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({type(value).__name__})"

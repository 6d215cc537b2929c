"""Reward functions of users: how they are found, checked and called, and how their values are read."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from agentgym.errors import ConfigError, EnvError
from agentgym.objects import load_object
from agentgym.tool_threads import run_in_thread

if TYPE_CHECKING:
    from agentgym.rewards.base import RewardData, RewardResult

SINGLE = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Keyword arguments of ``compute_score``."""
PLURAL = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""Those of its batch form: lists, one element per rollout of a group."""


class ScoreFunction:
    """``compute_score`` as named in a configuration, or the environment's own score where none is.

    Args:
        path: ``file.py``, ``file.py:name``, ``module:name``; None: the environment's own score.
        name: of the function where ``path`` has none.
        kwargs: further keyword arguments of every call.
    """

    def __init__(self, path: str | None, name: str = "compute_score", kwargs: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.name = name
        self.kwargs = dict(kwargs or {})

    @property
    def own(self) -> bool:
        """True: the environment's own score."""
        return self.path is None

    @cached_property
    def target(self) -> Callable[..., Any]:
        """The function, imported at the first use."""
        assert self.path is not None
        target = load_object(self.path, what="reward.path", name=self.name)
        if not callable(target):
            raise ConfigError(f"reward.path={self.path}: {self.name!r} is {target!r}, expected a function")
        return target  # type: ignore[no-any-return]

    def check(self, arguments: Sequence[str] = SINGLE) -> None:
        """Raise `ConfigError` unless the function exists and takes the arguments."""
        if self.own:
            return
        try:
            inspect.signature(self.target).bind(**dict.fromkeys(arguments), **self.kwargs)
        except TypeError as error:
            given = ", ".join([*arguments, *self.kwargs])
            raise ConfigError(
                f"reward.path={self.path}: {getattr(self.target, '__name__', self.name)}"
                f"{inspect.signature(self.target)} cannot be called with {given}: {error}"
            ) from None

    async def __call__(self, data: RewardData) -> RewardResult:
        """The score of one rollout."""
        if self.own:
            return own_score(data)
        return read_score(await self.call(arguments_of(data)))

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function: a sync one on a thread."""
        target = self.target
        if inspect.iscoroutinefunction(target):
            return await target(**arguments, **self.kwargs)
        value = await run_in_thread(target, **arguments, **self.kwargs)
        return await value if inspect.isawaitable(value) else value


def arguments_of(data: RewardData) -> dict[str, Any]:
    """The keyword arguments of ``compute_score``; ``extra_info`` is a copy, which the function may change."""
    return {
        "data_source": data.data_source,
        "solution_str": data.solution_str,
        "ground_truth": data.ground_truth,
        "extra_info": dict(data.extra_info),
    }


def own_score(data: RewardData) -> RewardResult:
    """The environment's own score. Raises `EnvError` where it has none."""
    if data.env_score is None:
        raise EnvError(
            f"task {data.task_id!r} was not scored by its environment: set reward.path", task_id=data.task_id
        )
    return {"reward_score": data.env_score, "reward_extra_info": {}}


def read_score(value: Any) -> RewardResult:
    """Read what a reward function returned: a number, or a mapping with ``score``.

    Raises:
        TypeError: anything else; also None, NaN and infinities.
    """
    parts = dict(value) if isinstance(value, Mapping) else {"score": value}
    if "score" not in parts:
        raise TypeError(f"the reward function returned a dict with {sorted(map(str, parts))}; expected the key 'score'")
    score = parts.pop("score")
    if not isinstance(score, numbers.Real) or not math.isfinite(score):
        raise TypeError(f"the reward function returned {value!r:.200}; expected a finite number or a dict with 'score'")
    return {"reward_score": float(score), "reward_extra_info": {str(name): part for name, part in parts.items()}}

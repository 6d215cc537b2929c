"""``reward.manager=composite``: a weighted sum of several rewards, each logged."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentgym.errors import ConfigError
from agentgym.rewards.base import RewardData, RewardManager, RewardResult
from agentgym.rewards.functions import ScoreFunction

ENV = "env"
"""As the path of a part: the environment's own score."""


class Part(BaseModel):
    """One part of a composite reward."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(description="`file.py:name` or `module:name` of a compute_score function; `env`: the environment")
    label: str | None = Field(default=None, description="name of the logged component; default: the function's name")
    weight: float = Field(default=1.0, description="factor in the sum")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="further arguments of the function")

    @property
    def name(self) -> str:
        return self.label or self.path.rpartition(":")[2]


class CompositeManager(RewardManager):
    """``reward.options.parts=[{path: f.py:correct}, {path: f.py:style, weight: 0.2}]``.

    The score is the sum of weight times score; every part's own score is a reward component under its label.
    """

    def __init__(self, function: ScoreFunction, *, parts: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(function)
        try:
            self.parts = [Part.model_validate(part) for part in parts]
        except ValidationError as error:
            raise ConfigError(f"reward.options.parts={list(parts)}: {error}") from None
        if not function.own:
            raise ConfigError(f"reward.manager=composite takes its functions from options.parts, not {function.path}")
        names = [part.name for part in self.parts]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"reward.options.parts={list(parts)}: expected parts, each with a label of its own")
        self.functions = [
            ScoreFunction(None if part.path == ENV else part.path, kwargs=part.kwargs) for part in self.parts
        ]
        for one in self.functions:
            one.check()

    def uses_env_score(self, style: str) -> bool:
        return any(function.own for function in self.functions)

    async def run_single(self, data: RewardData) -> RewardResult:
        results = await asyncio.gather(*(function(data) for function in self.functions))
        score, info = 0.0, {}
        for part, result in zip(self.parts, results, strict=True):
            score += part.weight * result["reward_score"]
            info[part.name] = result["reward_score"]
            info |= {f"{part.name}/{name}": value for name, value in result["reward_extra_info"].items()}
        return {"reward_score": score, "reward_extra_info": info}

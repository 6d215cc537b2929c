"""`counter`: bring a counter to a number, and say where it started. A teaching environment around one stateful tool.

The counter is a `BaseTool`: created at the first call of an episode with the task's own start value, the same instance
for all later calls, asked for its reward at the end, released with the session. `examples/stateful_tool.py` is a copy
to begin with.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from agentgym.envs.calculator_math.answers import is_right
from agentgym.errors import ConfigError
from agentgym.tool import BaseTool
from agentgym.tool_env import ToolEnv
from agentgym.toolbox import ToolLimits
from agentgym.types import AssistantTurn, Task, ToolCall, ToolResponse

MAX_STEP = 9
"""One call moves the counter by at most so much."""


class CounterTool(BaseTool):
    """A counter for every session; its reward is 1.0 if it ends at the target."""

    tool_schema = {  # noqa: RUF012 - declared so by BaseTool
        "type": "function",
        "function": {
            "name": "counter",
            "description": "Add a number to the counter.",
            "parameters": {
                "type": "object",
                "properties": {
                    "add": {
                        "type": "integer",
                        "minimum": -MAX_STEP,
                        "maximum": MAX_STEP,
                        "description": f"from -{MAX_STEP} to {MAX_STEP}",
                    }
                },
                "required": ["add"],
            },
        },
    }

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, tool_schema)
        self._values: dict[str, int] = {}
        self._targets: dict[str, int] = {}

    async def create(  # type: ignore[override]  # instances always come with an id
        self, instance_id: str, *, start: int, target: int
    ) -> tuple[str, ToolResponse]:
        """Set the counter to ``start``."""
        self._values[instance_id], self._targets[instance_id] = start, target
        return instance_id, ToolResponse(text=f"start: {start}")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Add and show."""
        self._values[instance_id] += parameters["add"]
        return ToolResponse(text=f"now: {self._values[instance_id]}"), None, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """1.0 at the target, else 0.0."""
        return float(self._values[instance_id] == self._targets[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the counter."""
        del self._values[instance_id], self._targets[instance_id]


class Counter(ToolEnv):
    """Bring a counter to a number and say where it started: half of the reward for each.

    Args:
        calls: the most calls that a task takes.
        train_size: number of training tasks.
        validation_size: number of validation tasks.
        split: where tasks are drawn from: ``"train"`` or ``"validation"``.
        seed: of the tasks.
        limits: of tool calls.
        tool_reward_weight: what the counter at its target counts; the answer counts the rest of 1.
    """

    tools: Sequence[BaseTool] = (CounterTool(),)
    system_prompt = f'Use the counter tool; a call adds -{MAX_STEP} to {MAX_STEP}. End with "#### " and the number.'
    tool_reward_weight = 0.5

    def __init__(
        self,
        *,
        calls: int = 3,
        train_size: int = 1000,
        validation_size: int = 100,
        split: str = "train",
        seed: int = 0,
        limits: ToolLimits | Mapping[str, Any] | None = None,
        tool_reward_weight: float | None = None,
    ) -> None:
        super().__init__(split=split, seed=seed, limits=limits, tool_reward_weight=tool_reward_weight)
        self.calls = calls
        self.sizes = {"train": train_size, "validation": validation_size}
        for name, value, most in (
            ("calls", calls, 7),
            ("train_size", train_size, 10_000),
            ("validation_size", validation_size, 10_000),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{name}={value}: expected 1 to {most}")

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of a split; every tenth counter is for validation, whatever the seed."""
        if split not in self.sizes:
            raise ConfigError(f"split {split!r}: expected 'train' or 'validation'")
        return _tasks(split, self.seed, self.calls, self.sizes[split])

    def score(self, task: Task, answer: str) -> float:
        """What the right start value is worth."""
        return (1.0 - self.tool_reward_weight) * is_right(answer, str(task.data["start"]))

    def oracle(self, task: Task) -> list[AssistantTurn]:
        """Steps as long as they may be, then the answer."""
        left, turns = task.data["target"] - task.data["start"], []
        while left:
            step = max(-MAX_STEP, min(MAX_STEP, left))
            turns.append(AssistantTurn(tool_calls=(ToolCall(name="counter", arguments={"add": step}),)))
            left -= step
        return [*turns, AssistantTurn(content=f"#### {task.data['start']}")]


@lru_cache(maxsize=16)
def _tasks(split: str, seed: int, calls: int, size: int) -> tuple[Task, ...]:
    rng = random.Random(f"{seed}/{split}/{calls}")
    tens = rng.sample(range(1000, 11_000), size)
    return tuple(_task(rng, f"{split}-{i:06d}", split, ten, calls) for i, ten in enumerate(tens))


def _task(rng: random.Random, task_id: str, split: str, ten: int, calls: int) -> Task:
    number = 10 * ten + (rng.randint(1, 9) if split == "train" else 0)
    furthest = MAX_STEP * calls
    start = furthest + rng.randint(10, 99)
    target = start + rng.choice((-1, 1)) * rng.randint(1, furthest)
    return Task(
        id=task_id,
        prompt=f"Bring counter {number} to {target}. Where did it start?",
        data={"start": start, "target": target},
        tools_kwargs={"counter": {"create_kwargs": {"start": start, "target": target}}},
        data_source="counter",
    )

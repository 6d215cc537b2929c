"""The environment: problems as tasks, the calculator, and the score."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, overload

from agentgym.envs.calculator_math.answers import final_answer, is_right, read_number
from agentgym.envs.calculator_math.problems import LEVEL_WEIGHTS, STORY_SHARES, draw
from agentgym.envs.generated import check_level, check_sizes, size_of
from agentgym.errors import ConfigError
from agentgym.tool import BaseTool
from agentgym.tool_env import ToolEnv
from agentgym.toolbox import ToolLimits
from agentgym.tools.calculator import calculator
from agentgym.types import AssistantTurn, Task, ToolCall

KINDS: Mapping[str, Mapping[int, float]] = {
    "mix": STORY_SHARES,
    "story": dict.fromkeys(STORY_SHARES, 1.0),
    "expression": dict.fromkeys(STORY_SHARES, 0.0),
}
"""Shares of word problems by level, for each kind of problem."""


class CalculatorMath(ToolEnv):
    """Word and expression problems with multi-digit numbers, for a model that has a calculator.

    Args:
        level: 1, 2 or 3 calculator calls; ``"mix"`` has 80 % of level 1, 15 % of level 2 and 5 % of level 3.
        kind: ``"story"`` for word problems, ``"expression"`` for problems that name the operations; in ``"mix"``
            90 % of level 1 and 25 % of level 2 are word problems.
        train_size: number of training tasks.
        validation_size: number of validation tasks.
        use_tools: False takes the calculator away; the problems stay the same.
        split: where tasks are drawn from: ``"train"`` or ``"validation"``.
        seed: of the problems.
        limits: of tool calls.

    Example:
        >>> CalculatorMath(level=1).tasks("train")[0].id
        'train-000000'
    """

    tools: Sequence[BaseTool] = (calculator,)
    system_prompt = 'Solve the problem. End with "#### " and the number.'

    def __init__(
        self,
        *,
        level: int | str = "mix",
        kind: str = "mix",
        train_size: int = 10_000,
        validation_size: int = 256,
        use_tools: bool = True,
        split: str = "train",
        seed: int = 0,
        limits: ToolLimits | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(split=split, seed=seed, limits=limits)
        if kind not in KINDS:
            raise ConfigError(f"kind={kind!r}: expected one of {', '.join(map(repr, KINDS))}")
        self.level = check_level(level, LEVEL_WEIGHTS)
        self.kind = kind
        self.sizes = check_sizes(train=train_size, validation=validation_size)
        if not use_tools:
            self.tools = ()

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, made when first asked for."""
        return _tasks(split, self.seed, self.level, self.kind, size_of(self.sizes, split))

    def score(self, task: Task, answer: str) -> float:
        """1.0 if the final answer is exactly right, else 0.0."""
        return float(is_right(answer, task.data["answer"]))

    def answer_key(self, answer: str) -> str:
        """The number, however it is written; of a text without one the text."""
        found = final_answer(answer)
        number = None if found is None else read_number(found)
        return super().answer_key(answer) if number is None else str(number)

    def oracle(self, task: Task) -> list[AssistantTurn]:
        """One calculator call a turn, then the answer."""
        calls = [ToolCall(name="calculator", arguments={"expression": text}) for text in task.data["expressions"]]
        return [
            *(AssistantTurn(tool_calls=(call,)) for call in calls),
            AssistantTurn(content=f"#### {task.data['answer']}"),
        ]


class ProblemTasks(Sequence[Task]):
    """Tasks ``SPLIT-000000`` to ``SPLIT-00NNNN``; each depends on seed, split, level, kind and its number only."""

    def __init__(self, split: str, seed: int, level: int | str, kind: str, size: int) -> None:
        self._split = split
        self._name = f"{seed}/{split}/{level}/{kind}"
        self._story_shares = KINDS[kind]
        self._levels = LEVEL_WEIGHTS if level == "mix" else {int(level): 1.0}
        self._made: list[Task | None] = [None] * size

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        task = self._made[index]
        if task is None:
            number = range(len(self))[index]
            self._made[number] = task = self._make(number)
        return task

    def _make(self, number: int) -> Task:
        rng = random.Random(f"{self._name}/{number}")
        problem = draw(rng, self._split, self._levels, self._story_shares)
        return Task(
            id=f"{self._split}-{number:06d}",
            prompt=problem.text,
            data={
                "answer": str(problem.answer),
                "expressions": list(problem.expressions),
                "level": len(problem.expressions),
                "plan": problem.plan,
            },
            data_source="calculator-math",
        )


@lru_cache(maxsize=16)
def _tasks(split: str, seed: int, level: int | str, kind: str, size: int) -> ProblemTasks:
    """Shared by the environments of a process: a session makes an environment, and asks it for one task by its id."""
    return ProblemTasks(split, seed, level, kind, size)

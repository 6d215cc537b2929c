"""The environment: problems as tasks, the user who asks part after part, and the score."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from agentgym.envs.calculator_math.answers import is_right
from agentgym.envs.generated import check_level, check_sizes, draw_level, size_of
from agentgym.envs.python_math.problems import draw
from agentgym.interaction import Interaction, Reply
from agentgym.messages import text_of
from agentgym.sandbox import SandboxConfig
from agentgym.tool import BaseTool
from agentgym.tool_env import ToolEnv
from agentgym.toolbox import ToolLimits
from agentgym.tools.python import PythonTool
from agentgym.types import AssistantTurn, Message, Task, ToolCall

LEVEL_WEIGHTS = {1: 0.4, 2: 0.3, 3: 0.3}
"""Shares of the numbers of parts in the default mix."""


class Questioner(Interaction):
    """The user who asks the next part whatever the answer to the last one was, and does not say if it was right."""

    async def start(self, task: Task, **kwargs: Any) -> None:
        self.parts: Sequence[Mapping[str, Any]] = task.data["parts"]
        self.answered = 0
        self.right = 0

    async def respond(self, messages: Sequence[Message]) -> Reply:
        right = is_right(text_of(messages[-1]), self.parts[self.answered]["answer"])
        self.answered += 1
        self.right += right
        done = self.answered == len(self.parts)
        return Reply(done, "Done." if done else self.parts[self.answered]["text"], float(right))


class PythonMath(ToolEnv):
    """Problems about lists of numbers, in one to three parts, for a model that has a Python session.

    The reward is the share of the parts that were answered exactly right.

    Args:
        level: number of parts: 1, 2, 3 or ``"mix"`` (40 %, 30 % and 30 %).
        train_size: number of training tasks.
        validation_size: number of validation tasks.
        sandbox: where the Python runs: a backend's name or the settings of `agentgym.sandbox.SandboxConfig`.
        split: where tasks are drawn from: ``"train"`` or ``"validation"``.
        seed: of the problems.
        limits: of tool calls.
    """

    tools: Sequence[BaseTool] = (PythonTool(),)
    system_prompt = (
        "Solve the problem with the python tool: it keeps your variables, and shows what you print. "
        'End every answer with "#### " and the number.'
    )
    sandbox = "auto"
    interaction = Questioner

    def __init__(
        self,
        *,
        level: int | str = "mix",
        train_size: int = 4000,
        validation_size: int = 256,
        sandbox: SandboxConfig | Mapping[str, Any] | str | None = None,
        split: str = "train",
        seed: int = 0,
        limits: ToolLimits | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(split=split, seed=seed, limits=limits, sandbox=sandbox)
        self.level = check_level(level, LEVEL_WEIGHTS)
        self.sizes = check_sizes(train=train_size, validation=validation_size)

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, made when first asked for."""
        return _tasks(split, self.seed, self.level, size_of(self.sizes, split))

    def score(self, task: Task, answer: str) -> float:
        """The share of the parts that were answered right; a turn cut by a limit answers the part it was about."""
        assert isinstance(self.user, Questioner)
        right = self.user.right
        if self.user.answered < len(self.user.parts):
            right += is_right(answer, self.user.parts[self.user.answered]["answer"])
        return right / len(self.user.parts)

    def oracle(self, task: Task) -> list[AssistantTurn]:
        """One Python call for each part, then its answer."""
        turns = []
        for part in task.data["parts"]:
            turns.append(AssistantTurn(tool_calls=(ToolCall(name="python", arguments={"code": part["code"]}),)))
            turns.append(AssistantTurn(content=f"#### {part['answer']}"))
        return turns


@lru_cache(maxsize=16)
def _tasks(split: str, seed: int, level: int | str, size: int) -> tuple[Task, ...]:
    """Shared by the environments of a process; each task depends on seed, split, level and its number only."""
    return tuple(_task(split, seed, level, number) for number in range(size))


def _task(split: str, seed: int, level: int | str, number: int) -> Task:
    rng = random.Random(f"{seed}/{split}/{level}/{number}")
    num_parts = draw_level(rng, level, LEVEL_WEIGHTS)
    parts = draw(rng, split, num_parts)
    return Task(
        id=f"{split}-{number:06d}",
        prompt=parts[0].text,
        data={
            "parts": [{"text": part.text, "code": part.code, "answer": str(part.answer)} for part in parts],
            "level": num_parts,
        },
        data_source="python-math",
    )

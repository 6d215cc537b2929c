"""A small environment for tests of the command line; loaded as a plugin file."""

from collections.abc import Sequence

import agentgym
from agentgym import Task, ToolEnv, function_tool
from agentgym.types import AssistantTurn, ToolCall


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a + b


class ToySums(ToolEnv):
    """``size`` training tasks and as many for validation: sums with 17."""

    tools = (add,)

    def __init__(self, *, size: int = 20, selection: str | None = None, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        if size < 1:
            raise ValueError(f"size={size}: expected at least 1")
        self.size = size
        self.selection = selection

    def tasks(self, split: str) -> Sequence[Task]:
        start = {"train": 0, "validation": self.size}[split]
        return [
            Task(
                id=f"{split}-{i}",
                prompt=f"What is {i} plus 17?",
                data={"answer": str(i + 17)},
                tool_selection=None if self.selection is None else [self.selection],
            )
            for i in range(start, start + self.size)
        ]

    def score(self, task: Task, answer: str) -> float:
        return float(task.data["answer"] in answer.split())

    def oracle(self, task: Task) -> list[AssistantTurn]:
        answer = task.data["answer"]
        call = ToolCall(name="add", arguments={"a": int(answer) - 17, "b": 17})
        return [AssistantTurn(tool_calls=(call,)), AssistantTurn(content=answer)]


agentgym.register(id="toy-sums", entry_point=ToySums, max_turns=4, description="sums with 17")

"""A tool that keeps its state for a whole episode, and an environment around it, in one file.

agentgym check my-counter plugins=examples/stateful_tool.py
agentgym train env=my-counter plugins=examples/stateful_tool.py
"""

from collections.abc import Sequence
from typing import Any

import agentgym
from agentgym import AssistantTurn, BaseTool, Task, ToolCall, ToolEnv, ToolResponse


class Counter(BaseTool):
    """One object serves all episodes; what belongs to an episode is kept under its instance id."""

    tool_schema = {  # noqa: RUF012
        "type": "function",
        "function": {
            "name": "counter",
            "description": "Add a number to the counter.",
            "parameters": {"type": "object", "properties": {"add": {"type": "integer"}}, "required": ["add"]},
        },
    }

    def __init__(self, config: Any = None, tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self.values: dict[str | None, int] = {}

    async def create(self, instance_id: str | None = None, start: int = 0, **kwargs: Any) -> tuple[Any, ToolResponse]:
        """Called at the first call of an episode, with the task's own arguments. The text precedes the first answer."""
        self.values[instance_id] = start
        return instance_id, ToolResponse(text=f"start: {start}")

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, Any, Any]:
        """Called for every call: the answer, a reward (None: none) and metrics. Raise `ToolError` to complain."""
        self.values[instance_id] += parameters["add"]
        return ToolResponse(text=f"now: {self.values[instance_id]}"), None, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Called exactly once for every instance, however the episode ends."""
        del self.values[instance_id]


class MyCounter(ToolEnv):
    system_prompt = "Use the counter. Answer with the number alone."
    tools = (Counter(),)

    def tasks(self, split: str) -> Sequence[Task]:
        numbers = [number for number in range(100, 400) if (number % 5 == 0) == (split == "validation")]
        return [
            Task(
                id=str(number),
                prompt=f"Add 17 to counter {number}. What does it show then?",
                data={"answer": str(number * 37 % 1000 + 17)},
                tools_kwargs={"counter": {"create_kwargs": {"start": number * 37 % 1000}}},
            )
            for number in numbers
        ]

    def score(self, task: Task, answer: str) -> float:
        return float(answer.strip() == task.data["answer"])

    def oracle(self, task: Task) -> list[AssistantTurn]:
        call = ToolCall(name="counter", arguments={"add": 17})
        return [AssistantTurn(tool_calls=(call,)), AssistantTurn(content=task.data["answer"])]


agentgym.register("my-counter", MyCounter, max_turns=4, description="a tool that keeps its state")

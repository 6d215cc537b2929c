"""An environment of your own in one file.

agentgym check my-env plugins=examples/write_an_env.py
agentgym train env=my-env plugins=examples/write_an_env.py
"""

from collections.abc import Sequence

import agentgym
from agentgym import AssistantTurn, Task, ToolCall, ToolEnv, function_tool


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a * b


class MyEnv(ToolEnv):
    system_prompt = "Use the tool, then answer with the number alone."
    tools = (multiply,)

    def tasks(self, split: str) -> Sequence[Task]:
        pairs = [(a, b) for a in range(12, 32) for b in range(12, 32) if ((a + b) % 5 == 0) == (split == "validation")]
        return [Task(id=f"{a}x{b}", prompt=f"How much is {a} times {b}?", data={"a": a, "b": b}) for a, b in pairs]

    def score(self, task: Task, answer: str) -> float:
        return float(answer.strip() == str(task.data["a"] * task.data["b"]))

    def oracle(self, task: Task) -> list[AssistantTurn]:
        call = ToolCall(name="multiply", arguments=task.data)
        return [AssistantTurn(tool_calls=(call,)), AssistantTurn(content=str(task.data["a"] * task.data["b"]))]


agentgym.register("my-env", MyEnv, max_turns=4, description="multiply with a tool")

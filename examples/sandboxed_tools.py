"""An environment whose tools run code in a sandbox.

agentgym smoke env=prime-sums plugins=examples/sandboxed_tools.py
"""

from agentgym import AssistantTurn, Task, ToolCall, ToolEnv, register
from agentgym.tools.bash import BashTool
from agentgym.tools.files import FilesTool
from agentgym.tools.python import PythonTool


class Sums(ToolEnv):
    tools = (PythonTool({"timeout": 5}), BashTool(), FilesTool())
    sandbox = "auto"  # or settings: {"backend": "namespace", "memory_mb": 256}

    def tasks(self, split):
        return [Task(id=f"{split}-0", prompt="What is the sum of the first 1000 primes?")]

    def score(self, task, answer):
        return float("3682913" in answer)

    def oracle(self, task):
        code = "[n for n in range(2, 8000) if all(n % d for d in range(2, int(n**0.5) + 1))]"
        return [
            AssistantTurn(tool_calls=(ToolCall(name="python", arguments={"code": f"primes = {code}"}),)),
            AssistantTurn(tool_calls=(ToolCall(name="python", arguments={"code": "sum(primes[:1000])"}),)),
            AssistantTurn(content="It is 3682913."),
        ]


register("prime-sums", Sums)

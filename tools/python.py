"""``python``: runs Python in the session's sandbox; variables, functions and imports live until the session ends."""

from __future__ import annotations

from agentgym.tools.sandbox.tool import RunTool

SCHEMA = {
    "type": "function",
    "function": {
        "name": "python",
        "description": (
            "Runs Python code and returns what it prints and the value of its last expression. "
            "Variables, functions and imports are kept for later calls."
        ),
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "Python source, one or more lines."}},
            "required": ["code"],
            "additionalProperties": False,
        },
    },
}


class PythonTool(RunTool):
    """The python tool; needs an environment with a sandbox, which starts at the first call.

    Example:
        >>> class Maths(ToolEnv):
        ...     tools = (PythonTool({"timeout": 5}),)
        ...     sandbox = "auto"
    """

    tool_schema = SCHEMA
    language = "python"
    parameter = "code"

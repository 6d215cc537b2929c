"""``bash``: runs commands in the session's shell; its variables, functions and working directory live on."""

from __future__ import annotations

from agentgym.tools.sandbox.tool import RunTool

SCHEMA = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": (
            "Runs commands in a bash shell and returns their output. "
            "The working directory, variables and functions are kept for later calls."
        ),
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "One or more lines of bash."}},
            "required": ["command"],
            "additionalProperties": False,
        },
    },
}


class BashTool(RunTool):
    """The bash tool; needs an environment with a sandbox, which starts at the first call.

    Background jobs of a call that ended live on until a call times out or the session ends.

    Example:
        >>> class Terminal(ToolEnv):
        ...     tools = (BashTool({"timeout": 20}),)
        ...     sandbox = "auto"
    """

    tool_schema = SCHEMA
    language = "bash"
    parameter = "command"

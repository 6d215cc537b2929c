"""Tools that ship with agentgym, and the names a tool author needs."""

if __name__ != "agentgym.tools":
    raise ImportError(f"import this package as 'agentgym.tools', not as {__name__!r}")

from agentgym.errors import ToolError
from agentgym.tool import BaseTool, ToolContext, function_tool
from agentgym.tool_files import load_tools
from agentgym.tool_threads import run_in_thread
from agentgym.toolbox import Toolbox, ToolLimits
from agentgym.types import ToolResponse

__all__ = [
    "BaseTool",
    "ToolContext",
    "ToolError",
    "ToolLimits",
    "ToolResponse",
    "Toolbox",
    "function_tool",
    "load_tools",
    "run_in_thread",
]

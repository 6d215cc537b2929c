"""agentgym: Gymnasium for LLM agents, with the trainer in the box.

The names below are the public interface; they are imported when they are first used. Importing the package registers
the environments that ship with it, also for ``gymnasium.make("agentgym/NAME-v0")``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agentgym.registration import list_envs, make, register, spec

if TYPE_CHECKING:
    from agentgym import errors
    from agentgym.checks import check_env
    from agentgym.env import Env
    from agentgym.evaluation import evaluate
    from agentgym.loops import AgentLoop, register_agent_loop
    from agentgym.rollout import Rollout
    from agentgym.session import Session, SessionManager
    from agentgym.tokens.output import AgentLoopOutput
    from agentgym.tool import BaseTool, function_tool
    from agentgym.tool_env import ToolEnv
    from agentgym.types import AssistantTurn, RolloutStatus, Task, ToolCall, ToolResponse

__all__ = [
    "AgentLoop",
    "AgentLoopOutput",
    "AssistantTurn",
    "BaseTool",
    "Env",
    "Rollout",
    "RolloutStatus",
    "Session",
    "SessionManager",
    "Task",
    "ToolCall",
    "ToolEnv",
    "ToolResponse",
    "check_env",
    "errors",
    "evaluate",
    "function_tool",
    "list_envs",
    "make",
    "register",
    "register_agent_loop",
    "spec",
]

__version__ = "0.1.0"

_LAZY = {
    "AgentLoop": "agentgym.loops",
    "AgentLoopOutput": "agentgym.tokens.output",
    "AssistantTurn": "agentgym.types",
    "BaseTool": "agentgym.tool",
    "Env": "agentgym.env",
    "Rollout": "agentgym.rollout",
    "RolloutStatus": "agentgym.types",
    "Session": "agentgym.session",
    "SessionManager": "agentgym.session",
    "Task": "agentgym.types",
    "ToolCall": "agentgym.types",
    "ToolEnv": "agentgym.tool_env",
    "ToolResponse": "agentgym.types",
    "check_env": "agentgym.checks",
    "evaluate": "agentgym.evaluation",
    "function_tool": "agentgym.tool",
    "register_agent_loop": "agentgym.loops",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

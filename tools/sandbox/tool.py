"""What the tools of a sandbox have in common: how they reach it, and what they tell the model of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from agentgym.config import ConfigModel, setting, validate
from agentgym.errors import ConfigError
from agentgym.sandbox import Language, LazySandbox, RunResult
from agentgym.tool import BaseTool, ToolContext
from agentgym.types import ToolResponse

SLACK = 3600.0
"""Seconds that the toolbox waits beyond a call's own limit, which the sandbox keeps: longer than any session waits for
a step. To wait for a sandbox to start is a matter of the infrastructure, and nothing to tell the model."""


class RunConfig(ConfigModel):
    """Settings of a tool that runs code, as they stand under ``config`` in a tool file."""

    timeout: float = setting(10.0, "Seconds one call may take", gt=0)


class RunTool(BaseTool):
    """A tool that runs its one argument as code of one language; base of ``python`` and ``bash``.

    Args:
        config: see `RunConfig`.
        tool_schema: for another name or description; the parameter keeps its name.
    """

    language: ClassVar[Language]
    parameter: ClassVar[str]

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, tool_schema)
        self.settings = validate(RunConfig, self.config)
        self.timeout = self.settings.timeout + SLACK

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], context: ToolContext | None = None, **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Run the code in the session's interpreter. Errors of the code are answers, not faults."""
        sandbox = sandbox_of(context, self.name)
        result = await sandbox.run(self.language, parameters[self.parameter], timeout=self.settings.timeout)
        metrics = {"failed": float(result.status != "ok"), "timeouts": float(result.status == "timeout")}
        metrics["lost"] = float(result.state_lost)
        return ToolResponse(text=describe(result, self.language, self.settings.timeout)), None, metrics


def sandbox_of(context: ToolContext | None, tool: str) -> LazySandbox:
    """The session's sandbox. Raises `ConfigError` where the environment has none."""
    if context is None or context.sandbox is None:
        raise ConfigError(
            f"tool {tool!r} needs a sandbox, and the environment has none. Set sandbox = 'auto' in its class, or pass "
            "sandbox=... to its constructor (env.sandbox=auto on the command line)"
        )
    return context.sandbox


def describe(result: RunResult, language: Language, timeout: float) -> str:
    """The output of a call, and in brackets what else the model should know."""
    lines = [result.output.rstrip("\n")] if result.output.strip("\n") else []
    if result.exit_code and result.status == "error":
        lines.append(f"[exit code {result.exit_code}]")
    reason = f": {result.reason}" if result.reason else ""
    if result.status == "timeout":
        lines.append(f"[stopped after {timeout:g} s{reason}; {_kept(result, language)}]")
    elif result.status == "lost":
        lines.append(f"[the call ended early{reason}; {_kept(result, language)}]")
    elif result.state_lost:
        lines.append(f"[{_kept(result, language)}{reason}]")
    elif result.reason:
        lines.append(f"[a process was killed{reason}]")
    return "\n".join(lines) or "(no output)"


def _kept(result: RunResult, language: Language) -> str:
    what = "variables" if language == "python" else "variables and the working directory"
    return f"{what} {'were lost' if result.state_lost else 'are kept'}"

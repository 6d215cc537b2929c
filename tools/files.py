"""``files``: reads, writes and lists files in the session's sandbox, under its work folder only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentgym.config import ConfigModel, setting, validate
from agentgym.errors import ToolError
from agentgym.sandbox import FileEntry
from agentgym.tool import BaseTool, ToolContext
from agentgym.tools.sandbox.tool import SLACK, sandbox_of
from agentgym.types import ToolResponse

SCHEMA = {
    "type": "function",
    "function": {
        "name": "files",
        "description": "Reads, writes or lists files of the working folder.",
        "parameters": {
            "type": "object",
            "properties": {
                "action": {"type": "string", "enum": ["read", "write", "list"]},
                "path": {"type": "string", "description": "Relative to the working folder.", "default": "."},
                "content": {"type": "string", "description": "For write: the whole new content."},
            },
            "required": ["action"],
            "additionalProperties": False,
        },
    },
}


class FilesConfig(ConfigModel):
    """Settings of the files tool, as they stand under ``config`` in a tool file."""

    max_bytes: int = setting(65536, "Bytes of a file that are shown; the rest is cut", ge=1)


class FilesTool(BaseTool):
    """The files tool; needs an environment with a sandbox, which starts at the first call.

    Links are never followed and ``..`` is refused, so that no path leads out of the work folder.
    """

    tool_schema = SCHEMA

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, tool_schema)
        self.settings = validate(FilesConfig, self.config)
        self.timeout = SLACK

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], context: ToolContext | None = None, **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Do one thing with one path. What is wrong with it is told to the model."""
        lazy = sandbox_of(context, self.name)
        action, path = parameters["action"], parameters.get("path", ".")
        if action == "write" and "content" not in parameters:
            raise ToolError("write needs the parameter 'content'")
        sandbox = await lazy.get()
        if action == "write":
            data = parameters["content"].encode("utf-8", "surrogatepass")
            await sandbox.write_file(path, data)
            text = f"wrote {len(data)} bytes to {path}"
        elif action == "read":
            text = _as_text(await sandbox.read_file(path, limit=self.settings.max_bytes + 1), self.settings.max_bytes)
        else:
            entries = await sandbox.list_files(path)
            text = "\n".join(map(_line, entries)) or "(empty folder)"
        return ToolResponse(text=text), None, {}


def _as_text(data: bytes, limit: int) -> str:
    if b"\0" in data:
        raise ToolError("this is not a text file: it contains NUL bytes")
    if len(data) <= limit:
        return data.decode("utf-8", "replace")
    return data[:limit].decode("utf-8", "ignore") + f"\n[only the first {limit} bytes are shown]"


def _line(entry: FileEntry) -> str:
    return f"{entry.name}  {entry.size} bytes" if entry.kind == "file" else f"{entry.name}  ({entry.kind})"

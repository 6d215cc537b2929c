"""An MCP server for the tests: ``python mcp_server.py`` over stdio, ``python mcp_server.py http`` on a free port."""

import os
import sys
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ImageContent, TextContent

server = MCPServer("test")
notes: list[str] = []


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Keeps a note."""
    notes.append(text)
    return "; ".join(notes)


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ToolError("das geht nicht: ü")


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def pid() -> str:
    """The process id of the server."""
    return str(os.getpid())


@server.tool(structured_output=False)
def mixed() -> Any:
    """Text and an image."""
    return [TextContent(type="text", text="看"), ImageContent(type="image", data="AAAA", mime_type="image/png")]


if __name__ == "__main__":
    if sys.argv[1:] == ["http"]:
        import socket

        import uvicorn

        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            print(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", flush=True)  # noqa: T201 - read by the test
            config = uvicorn.Config(server.streamable_http_app(), log_level="warning")
            uvicorn.Server(config).run(sockets=[listener])
    else:
        server.run()

"""``agentgym serve-tools``: a tool server until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentgym.console import Console
from agentgym.errors import ConfigError

if TYPE_CHECKING:
    from agentgym.tools.server import ToolServer
    from agentgym.tools.serving import Address


def serve_command(
    files: Sequence[Path],
    *,
    host: str,
    port: int,
    unix: Path | None,
    token_file: Path | None,
    sandbox: str | None,
    max_sessions: int,
    lease: float,
) -> int:
    """Serve the tools of the files. Returns the exit code."""
    from agentgym.sandbox import read_sandbox_config
    from agentgym.tool_files import load_tools
    from agentgym.tools.server import ServerLimits, ToolServer
    from agentgym.tools.serving import TOKEN_VARIABLE, Address, read_token

    for name, value in (("--max-sessions", max_sessions), ("--lease", lease)):
        if value <= 0:
            raise ConfigError(f"{name} {value}: expected a number above 0")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    address = Address(host=host, port=port, unix=unix)
    token, is_new = read_token(token_file, address)
    limits = ServerLimits(max_sessions=max_sessions, lease=lease, max_lease=max(lease, ServerLimits().max_lease))
    tools = load_tools(*files)
    server = ToolServer(tools, token=token, limits=limits, sandbox=read_sandbox_config(sandbox))
    if token_file is not None:
        secret = f"in {token_file}"
    else:
        secret = f"export {TOKEN_VARIABLE}={token}" if is_new else f"the value of {TOKEN_VARIABLE}"
    asyncio.run(_serve(server, address, [f"tools   {', '.join(tool.name for tool in tools)}", f"token   {secret}"]))
    return 0


async def _serve(server: ToolServer, address: Address, lines: Sequence[str]) -> None:
    from agentgym.tools.serving import Service, until_signal

    console = Console()
    async with Service(server.app, address) as service:
        for line in (f"server  {service.url}", *lines):
            console.line(line)
        reason = await until_signal()
        console.line(f"{reason}: releasing {server.sessions.live} sessions")

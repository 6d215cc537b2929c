"""The child of a `ServerProcess`: ``python -m agentgym.tools.server.child``, never started by hand."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from agentgym.errors import AgentGymError, ConfigError
from agentgym.sandbox import read_sandbox_config
from agentgym.tool_files import load_tools
from agentgym.tools.server.app import ToolServer
from agentgym.tools.server.process import ChildSettings
from agentgym.tools.serving import Address, Service, until_signal


def main() -> int:
    """Serve until the owner closes standard input, or SIGTERM."""
    # Tools get an empty standard input and write to standard error: both channels belong to the owner.
    channel, answers = os.dup(0), os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    commands = os.fdopen(channel, "rb", buffering=0)
    line = commands.readline()
    if not line:
        return 1
    settings = ChildSettings.model_validate_json(line)
    folder = Path(settings.socket).parent
    try:
        for file in settings.files:
            if not os.access(file, os.R_OK):
                raise ConfigError(f"tool file {file!r} is not there or may not be read by user {os.getuid()}")
        tools = load_tools(*settings.files)
        server = ToolServer(tools, token=settings.token, sandbox=read_sandbox_config(settings.sandbox))
        asyncio.run(_serve(server, Path(settings.socket), commands, answers))
    except AgentGymError as error:
        _answer(answers, {"error": str(error)})
        return 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


async def _serve(server: ToolServer, socket: Path, commands: Any, answers: Any) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), commands)
    owner = asyncio.ensure_future(reader.read())
    try:
        async with Service(server.app, Address(unix=socket)):
            _answer(answers, {"ready": True})
            await until_signal(owner)
    finally:
        owner.cancel()
        transport.close()


def _answer(answers: Any, value: dict[str, Any]) -> None:
    try:
        answers.write(json.dumps(value) + "\n")
        answers.close()
    except OSError:
        return  # the owner is gone, which the other channel says too


if __name__ == "__main__":
    sys.exit(main())

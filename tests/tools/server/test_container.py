"""A tool server in a container without a network."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from agentgym.errors import ConfigError
from agentgym.toolbox import Toolbox, ToolLimits
from agentgym.tools.sandbox.docker import DockerBackend
from agentgym.tools.sandbox.image import DEFAULT_IMAGE
from agentgym.tools.server import remote_tools
from agentgym.tools.server.remote import _process
from agentgym.types import ToolCall

FILE = Path(__file__).with_name("served_tools.py")
TOOLS = '''
import os, socket
from agentgym.tools import ToolContext, function_tool

@function_tool
def look(context: ToolContext) -> list:
    """Where it runs."""
    context.state["calls"] = context.state.get("calls", 0) + 1
    try:
        socket.create_connection(("1.1.1.1", 53), timeout=2)
        network = "network"
    except OSError:
        network = "no network"
    return [os.getuid() != 0, network, context.state["calls"]]
'''


def has_image() -> bool:
    if DockerBackend().unavailable() is not None:
        return False
    command = ["docker", "image", "inspect", DEFAULT_IMAGE]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def containers_with(folder: Path) -> str:
    command = ["docker", "ps", "--all", "--filter", f"volume={folder}", "--quiet"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.docker
@pytest.mark.skipif(not has_image(), reason="needs Docker and the image of `agentgym sandbox build`")
async def test_tools_in_a_container_have_no_network_and_end_with_their_owner(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    file = tmp_path / "boxed.py"
    file.write_text(TOOLS)
    tools = await asyncio.to_thread(remote_tools, "container", files=[file])
    toolbox = Toolbox(tools, limits=ToolLimits(call_timeout=60))
    for i in (1, 2):
        [result] = await toolbox.execute([ToolCall(name="look", arguments={})])
        assert result.response.text == f'[true, "no network", {i}]'
    await toolbox.release()
    assert len(containers_with(tmp_path).split()) == 1
    server = _process((file.resolve(),), "", True, None).locator
    await asyncio.to_thread(server.close)  # type: ignore[attr-defined]
    assert containers_with(tmp_path) == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "no files"),
        ({"files": [FILE], "sandbox": "docker"}, "is a sandbox itself"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        remote_tools("container", **options)  # type: ignore[arg-type]


def test_an_image_is_for_containers() -> None:
    with pytest.raises(ConfigError, match="an image is for 'container'"):
        remote_tools("process", files=[FILE], image="mine")

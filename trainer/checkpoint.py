"""Checkpoints that are either complete or not there.

    checkpoints/step-000010/
        model/            a Hugging Face folder: weights, config, tokenizer, chat template
        optimizer.pt      full (unsharded) optimizer state
        trainer.json      step, data position, learning state, best validation reward
        COMPLETE          written last: names and sizes of all files

A checkpoint is written aside as ``.tmp-...``, synced, and renamed. A folder without its marker, or whose files do not
have the sizes it names, does not count.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentgym.errors import AgentGymError

logger = logging.getLogger(__name__)

MARKER = "COMPLETE"
TEMPORARY = ".tmp-"


def step_folder(root: Path, step: int) -> Path:
    """``root/step-000010`` for step 10."""
    return root / f"step-{step:06d}"


def is_complete(folder: Path) -> bool:
    """True if the marker is there and every file it names has its size."""
    try:
        sizes = json.loads((folder / MARKER).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def complete_checkpoints(root: Path) -> list[Path]:
    """All complete checkpoints, oldest first."""
    return [folder for folder in sorted(root.glob("step-*")) if is_complete(folder)]


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint, with a warning for newer ones that are not complete."""
    for folder in sorted(root.glob("step-*"), reverse=True):
        if is_complete(folder):
            return folder
        logger.warning("ignoring the incomplete checkpoint %s", folder)
    return None


def save(root: Path, step: int, state: dict[str, Any], write: Callable[[Path], None]) -> Path:
    """Write one checkpoint; the previous ones stay untouched whatever happens.

    Args:
        root: the ``checkpoints`` folder.
        step: global step.
        state: contents of ``trainer.json``.
        write: writes model and optimizer into the folder it is given.

    Raises:
        AgentGymError: a file could not be written (disk full, no permission); names the path. Nothing is left behind.
    """
    final = step_folder(root, step)
    if is_complete(final):
        return final
    temporary = root / f"{TEMPORARY}{final.name}-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        write(temporary)
        (temporary / "trainer.json").write_text(json.dumps(state, indent=2) + "\n")
        files = sorted(p for p in temporary.rglob("*") if p.is_file())
        sizes = {str(p.relative_to(temporary)): p.stat().st_size for p in files}
        for path in files:
            _sync(path)
        (temporary / MARKER).write_text(json.dumps({"step": step, "files": sizes}, indent=2) + "\n")
        _sync(temporary / MARKER)
        if final.exists():  # an incomplete one of an earlier run
            shutil.rmtree(final)
        temporary.rename(final)
        _sync(root)
    except OSError as error:
        where = error.filename if error.filename is not None else temporary
        raise AgentGymError(
            f"could not write the checkpoint of step {step}: {where}: {error.strerror or error}. "
            f"The previous checkpoint is intact; free space or choose another trainer.run_dir, then resume."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def clean(root: Path, *, keep: int, protect: set[int]) -> None:
    """Remove leftovers of interrupted saves, and complete checkpoints beyond the newest ``keep`` ones.

    Checkpoints of the steps in ``protect`` (the best one) are kept besides.
    """
    remove_leftovers(root)
    for folder in complete_checkpoints(root)[:-keep]:
        if step_of(folder) not in protect:
            shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(root: Path) -> None:
    """Remove what interrupted saves left behind."""
    for leftover in root.glob(f"{TEMPORARY}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(folder.name.removeprefix("step-"))


def read_state(folder: Path) -> dict[str, Any]:
    """``trainer.json`` of a checkpoint."""
    state: dict[str, Any] = json.loads((folder / "trainer.json").read_text())
    return state


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

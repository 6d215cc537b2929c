"""A checkpoint is complete or not there."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from agentgym.errors import AgentGymError
from agentgym.trainer import checkpoint


def write(text: str = "weights") -> Callable[[Path], None]:
    def files(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "w").write_text(text)
        (folder / "optimizer.pt").write_text("moments")

    return files


def save(root: Path, step: int, val: float | None = None) -> Path:
    return checkpoint.save(root, step, {"step": step, "val_reward": val}, write())


def test_the_newest_complete_one_is_found(tmp_path: Path) -> None:
    for step in (5, 10, 100):
        save(tmp_path, step)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert checkpoint.step_of(found) == 100
    assert checkpoint.read_state(found) == {"step": 100, "val_reward": None}


@pytest.mark.parametrize("damage", ["no marker", "missing file", "short file", "broken marker"])
def test_a_damaged_one_is_passed_over_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    # G4
    save(tmp_path, 5)
    newest = save(tmp_path, 10)
    if damage == "no marker":
        (newest / checkpoint.MARKER).unlink()
    elif damage == "missing file":
        (newest / "optimizer.pt").unlink()
    elif damage == "short file":
        (newest / "optimizer.pt").write_text("mom")
    else:
        (newest / checkpoint.MARKER).write_text('{"step": 10, "fi')
    with caplog.at_level(logging.WARNING):
        found = checkpoint.latest(tmp_path)
    assert found == checkpoint.step_folder(tmp_path, 5)
    assert "step-000010" in caplog.text


def test_a_full_disk_names_the_file_and_leaves_the_last_one_intact(tmp_path: Path) -> None:
    # G4
    save(tmp_path, 5)

    def full(folder: Path) -> None:
        write()(folder)
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "third"))

    with pytest.raises(AgentGymError, match=r"third: No space left on device.*previous checkpoint is intact"):
        checkpoint.save(tmp_path, 10, {"step": 10}, full)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000005"]
    assert checkpoint.is_complete(checkpoint.step_folder(tmp_path, 5))


def test_an_incomplete_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    (save(tmp_path, 5) / checkpoint.MARKER).unlink()
    assert checkpoint.is_complete(save(tmp_path, 5))


def test_saving_a_step_twice_writes_once(tmp_path: Path) -> None:
    # G2
    save(tmp_path, 5)
    checkpoint.save(tmp_path, 5, {"step": 5}, write("other"))
    assert (checkpoint.step_folder(tmp_path, 5) / "model" / "w").read_text() == "weights"


def test_cleaning_keeps_the_newest_and_the_protected_and_removes_leftovers(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / f"{checkpoint.TEMPORARY}step-000009-1").mkdir()
    checkpoint.clean(tmp_path, keep=2, protect={1})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000003", "step-000004"]

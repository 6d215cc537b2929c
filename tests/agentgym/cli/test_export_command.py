"""A model leaves for other programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentgym.cli import run
from agentgym.trainer.models import shipped_model


def test_a_model_is_copied_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = shipped_model("tiny")
    assert source is not None
    assert run(["export", "tiny", str(tmp_path / "deep" / "out")]) == 0
    names = {file.name for file in (tmp_path / "deep" / "out").iterdir()}
    assert names == {file.name for file in source.iterdir()}
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["out"]
    assert "from_pretrained" in capsys.readouterr().out


def test_nothing_is_overwritten_and_nothing_made_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "tiny", str(tmp_path)]) == 2
    assert "exists" in capsys.readouterr().err
    assert run(["export", str(tmp_path / "nope"), str(tmp_path / "out")]) == 2
    assert "no model there" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

"""Training in environments whose tools run in real sandboxes: rewards, and nothing left behind after any step."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli.smoke_command import children
from agentgym.config import load_config
from agentgym.console import Console
from agentgym.trainer import main
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.tracking import read_jsonl

SETTINGS = {
    "model": "tiny",
    "env.sandbox": "process",
    "env.train_size": 40,
    "env.validation_size": 4,
    "data.batch_size": 2,
    "rollout.n": 2,
    "trainer.cluster": "inline",
    "trainer.threads": 1,
    "trainer.total_steps": 2,
    "trainer.val_every": 0,
    "trainer.save_every": 0,
    "trainer.loggers": "[]",
}


def train(folder: Path, **settings: Any) -> list[dict[str, float]]:
    """The metrics of each step."""
    merged = {**SETTINGS, "trainer.run_dir": folder, **settings}
    configured = load_config(TrainConfig, overrides=[f"{key}={value}" for key, value in merged.items()])
    text = io.StringIO()
    assert main.run(configured, Console(file=text, live=False)) == 0, text.getvalue()
    return read_jsonl(folder / f"{configured.env.name}-tiny-grpo" / "metrics.jsonl")


def sandbox_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("agentgym-sandbox-*"))


@pytest.mark.parametrize("env", ["python-math", "terminal"])
@pytest.mark.parametrize("engine", ["scripted", "torch"])
def test_training_leaves_no_session_no_process_and_no_folder(tmp_path: Path, env: str, engine: str) -> None:
    processes, folders = children(), sandbox_folders()
    rows = train(tmp_path / "run", env=env, **{"rollout.engine": engine, "env.level": 1})
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["sessions/live"] == 0
        assert row["sessions/opened"] == row["sessions/closed"] == 4
        assert row["rollout/failed"] == 0
        if engine == "scripted":
            assert row["reward/mean"] == 1.0
            assert row["tool/calls"] > 0
    assert children() == processes
    assert sandbox_folders() <= folders

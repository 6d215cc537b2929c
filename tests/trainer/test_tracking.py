"""The record of a run on disk."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from factories import rollout, segment

from agentgym.errors import ConfigError
from agentgym.rollout import Rollout
from agentgym.trainer.tracking import RunLog, create_run_folder, read_jsonl, write_environment


def test_a_name_that_exists_gets_a_suffix(tmp_path: Path) -> None:
    names = [create_run_folder(tmp_path / "runs", "a").name for _ in range(3)]
    assert names == ["a", "a-2", "a-3"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run_dir"):
        create_run_folder(tmp_path / "file", "a")


def test_resuming_drops_what_comes_after_the_checkpoint(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in range(5):
        log.metrics(step, {"reward/mean": step / 10})
        log.rollouts(f"step-{step:06d}", [rollout(1.0)])
        log.rollouts(f"validation-{step:06d}", [rollout(1.0)])
    with log.metrics_path.open("a") as file:
        file.write('{"step": 5, "rew')  # killed while writing
    resumed = RunLog(tmp_path, resume_step=2)
    assert [row["step"] for row in resumed.read_metrics()] == [0, 1, 2]
    assert sorted(p.stem for p in resumed.rollouts_dir.glob("*.jsonl"))[-1] == "validation-000002"
    assert len(list(resumed.rollouts_dir.iterdir())) == 6


def test_numbers_that_json_cannot_hold_become_null(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.metrics(1, {"a": math.nan, "b": math.inf, "c": 1.5})
    assert log.read_metrics() == [{"step": 1, "a": None, "b": None, "c": 1.5}]


def test_a_rollout_comes_back_from_its_line(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    played = rollout(0.5, segment([1, 2], [3, 4, 5], [1, 0, 1]), tool_calls=2)
    log.rollouts("step-000001", [played], [{"training": [{"advantages": [0.1]}]}])
    (row,) = read_jsonl(log.rollouts_dir / "step-000001.jsonl")
    assert row.pop("training") == [{"advantages": [0.1]}]
    assert Rollout.from_dict(row) == Rollout.from_dict(json.loads(json.dumps(played.to_dict())))
    assert Rollout.from_dict(row).segments[0].num_model_tokens == 2


def test_the_environment_of_each_part_of_a_run_is_recorded(tmp_path: Path) -> None:
    write_environment(tmp_path)
    write_environment(tmp_path)
    assert "torch" in json.loads((tmp_path / "environment.json").read_text())["versions"]
    assert (tmp_path / "environment-2.json").exists()

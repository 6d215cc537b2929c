"""Recorded rollouts instead of an engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import config, resumed, train

from agentgym.config import load_config
from agentgym.errors import AgentGymError, ConfigError
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.preflight import check_run
from agentgym.trainer.tracking import read_jsonl

SHORT = {
    "trainer.total_steps": 2,
    "trainer.warmup_steps": 0,
    "trainer.val_before": "false",
    "trainer.val_every": 0,
    "data.val_size": 1,
}
LEARNED = ("actor/", "critic/", "advantage/", "return/", "reward/", "correction/", "version/", "response_length/")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, plugin: Path) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    code, text = train(config(folder, plugin, **SHORT, **{"trainer.name": "recorded"}))
    assert code == 0, text
    return folder / "recorded"


def replayed(run: Path, folder: Path, **settings: Any) -> TrainConfig:
    overrides = {"trainer.replay": run, "trainer.run_dir": folder, "trainer.name": "replay", **settings}
    return load_config(
        TrainConfig, files=[run / "config.yaml"], overrides=[f"{key}={value}" for key, value in overrides.items()]
    )


def assert_same_learning(one: Path, other: Path) -> None:
    for a, b in zip(read_jsonl(one / "metrics.jsonl"), read_jsonl(other / "metrics.jsonl"), strict=True):
        names = [name for name in a if name.startswith(LEARNED)]
        assert names
        assert {name: a[name] for name in names} == {name: b[name] for name in names}
    for path in sorted((one / "rollouts").glob("step-*.jsonl")):
        expected, got = read_jsonl(path), read_jsonl(other / "rollouts" / path.name)
        for name in ("training", "segments", "outcome", "group"):
            assert [row[name] for row in expected] == [row[name] for row in got]


def test_a_replay_learns_what_the_run_learned(recorded: Path, tmp_path: Path, plugin: Path) -> None:
    assert train(replayed(recorded, tmp_path))[0] == 0
    assert_same_learning(recorded, tmp_path / "replay")
    # a resumed replay goes on with the next recorded step
    assert train(replayed(recorded, tmp_path, **{"trainer.total_steps": 1, "trainer.name": "one"}))[0] == 0
    assert train(resumed(tmp_path / "one", plugin, **{"trainer.total_steps": 2}))[0] == 0
    assert_same_learning(recorded, tmp_path / "one")


def test_baselines_and_filtered_groups_are_replayed(plugin: Path, tmp_path: Path) -> None:
    settings = {**SHORT, "algo": "remax", "algo.filter_groups.enabled": "true", "rollout.n": 2}
    settings |= {"algo.filter_groups.max_gen_batches": 6, "algo.filter_groups.when_exhausted": "skip"}
    assert train(config(tmp_path, plugin, **settings, **{"trainer.name": "remax"}))[0] == 0
    assert train(replayed(tmp_path / "remax", tmp_path))[0] == 0
    assert_same_learning(tmp_path / "remax", tmp_path / "replay")


def without_step_2(run: Path) -> None:
    (run / "rollouts" / "step-000002.jsonl").unlink()


def without_rollouts(run: Path) -> None:
    shutil.rmtree(run / "rollouts")


def other_vocabulary(run: Path) -> None:
    path = run / "rollouts" / "vocabulary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "digest": "0" * 64}))


def foreign_ids(run: Path) -> None:
    (run / "rollouts" / "vocabulary.json").unlink()  # a run of another program
    path = run / "rollouts" / "step-000001.jsonl"
    rows = read_jsonl(path)
    rows[0]["segments"][0]["response_ids"][0] = 10**6
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("spoil", "checked_first", "message"),
    [
        (without_rollouts, True, "no run with rollouts there"),
        (without_step_2, True, r"2 steps .* step 2 are missing .*total_steps to at most 1"),
        (without_step_2, False, r"step 2 was not recorded \(step-000002.jsonl is missing\)"),
        (other_vocabulary, False, "recorded with another tokenizer"),
        (foreign_ids, False, r"token id 1000000, but the model has \d+ ids"),
    ],
)
def test_what_cannot_be_replayed_is_said(
    recorded: Path, tmp_path: Path, spoil: Callable[[Path], None], checked_first: bool, message: str
) -> None:
    run = shutil.copytree(recorded, tmp_path / "run")
    spoil(run)
    configured = replayed(run, tmp_path)
    with pytest.raises(AgentGymError, match=message):
        (check_run if checked_first else train)(configured)


def test_remax_needs_recorded_greedy_rollouts(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="played no greedy rollouts"):
        check_run(replayed(recorded, tmp_path, **{"algo.advantage": "remax"}))

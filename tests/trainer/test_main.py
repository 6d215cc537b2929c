"""Whole runs in small: files, validation, interruption, and resumes that are exact."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import SETTINGS, comparable, config, played, resumed, train

from agentgym.config import load_config
from agentgym.console import Console
from agentgym.errors import ConfigError, EnvError
from agentgym.trainer import checkpoint, main
from agentgym.trainer.cluster import Interrupted
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.loop import Trainer
from agentgym.trainer.tracking import read_jsonl


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, plugin: Path) -> Path:
    """A run of six steps that nobody interrupted; two epochs."""
    folder = tmp_path_factory.mktemp("whole")
    code, text = train(config(folder, plugin))
    assert code == 0, text
    return folder / "parity-test-tiny-grpo"


def test_the_record_of_a_run_is_complete(whole: Path) -> None:
    rows = read_jsonl(whole / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "val/reward_mean" in row] == [0, 3, 6]
    names = {
        "reward/mean reward/std reward/group_std response_length/mean turns/mean tool/calls tool/errors parse/errors",
        "rollout/truncated rollout/failed sessions/live sessions/opened sessions/closed actor/loss actor/grad_norm",
        "actor/entropy actor/clip_fraction actor/approx_kl actor/lr actor/ratio_mean rollout/logprob_gap_mean",
        "rollout/logprob_gap_max rollout/preempted version/lag advantage/mean advantage/std return/mean return/std",
        "time/step_s time/rollout_s time/update_s time/sync_s throughput/tokens_per_s memory/driver_gb",
        "prompt_length/mean reward/component/length",
    }
    wanted = {name for line in names for name in line.split()}
    for row in rows[1:]:
        assert wanted <= row.keys(), wanted - row.keys()
        assert row["sessions/live"] == 0
        assert row["sessions/opened"] == row["sessions/closed"] == 16
        assert row["version/lag"] == 0
        assert row["rollout/logprob_gap_max"] < 1e-3
    assert rows[2]["actor/lr"] == pytest.approx(0.5e-3)
    assert [p.name for p in checkpoint.complete_checkpoints(whole / "checkpoints")] == [
        f"step-{step:06d}" for step in (2, 4, 6)
    ]
    rollouts = read_jsonl(whole / "rollouts" / "step-000001.jsonl")
    assert len(rollouts) == 16
    assert [(r["group"], r["sample"]) for r in rollouts[:5]][-1][1] == 0
    first = rollouts[0]
    assert len(first["training"][0]["advantages"]) == len(first["segments"][0]["response_ids"])
    assert json.loads((whole / "environment.json").read_text())["versions"]["torch"]


def test_weights_change_and_groups_compare_samples_of_one_draw(whole: Path) -> None:
    from safetensors.torch import load_file

    files = [load_file(whole / "checkpoints" / f"step-00000{s}" / "model" / "model.safetensors") for s in (2, 4)]
    assert any((files[0][name] != files[1][name]).any() for name in files[0])
    for r in read_jsonl(whole / "rollouts" / "step-000001.jsonl"):
        assert r["group"].startswith(r["task_id"] + "@")


def test_the_same_seed_gives_the_same_run_and_another_seed_another(whole: Path, plugin: Path, tmp_path: Path) -> None:
    train(config(tmp_path, plugin, **{"trainer.total_steps": 2, "trainer.name": "same"}))
    train(config(tmp_path, plugin, **{"trainer.total_steps": 2, "trainer.name": "other", "trainer.seed": 1}))
    expected = played(whole)
    assert played(tmp_path / "same")["step-000002"] == expected["step-000002"]
    assert played(tmp_path / "other")["step-000001"] != expected["step-000001"]


@pytest.mark.parametrize("killed_in", [1, 3, 4, 6])
def test_a_run_that_dies_goes_on_exactly_where_its_checkpoint_stood(
    whole: Path, plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_in: int
) -> None:
    # G1 (step 3 ends the first epoch), G6
    def die(self: Trainer, batch: Any) -> dict[str, float]:
        if self.step + 1 == killed_in:
            raise KeyboardInterrupt
        return original(self, batch)

    original = Trainer.update_actor
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update_actor", die)
        with pytest.raises(KeyboardInterrupt):
            train(config(tmp_path, plugin))
    run = tmp_path / "parity-test-tiny-grpo"
    code, text = train(resumed(run, plugin))
    assert code == 0, text
    assert comparable(run) == comparable(whole)
    assert played(run) == played(whole)


def test_death_during_a_save_falls_back_to_the_checkpoint_before(
    whole: Path, plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # G4
    def half(root: Path, step: int, state: Any, write: Callable[[Path], None]) -> Path:
        if step == 4:
            temporary = root / f"{checkpoint.TEMPORARY}step-000004-1"
            temporary.mkdir()
            write(temporary)
            (temporary / "optimizer.pt").unlink()
            raise KeyboardInterrupt
        return original(root, step, state, write)

    original = checkpoint.save
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", half)
        with pytest.raises(KeyboardInterrupt):
            train(config(tmp_path, plugin))
    run = tmp_path / "parity-test-tiny-grpo"
    assert train(resumed(run, plugin))[0] == 0
    assert comparable(run) == comparable(whole)
    assert not list((run / "checkpoints").glob(f"{checkpoint.TEMPORARY}*"))


def test_resuming_a_finished_run_does_nothing(whole: Path, plugin: Path) -> None:
    # G1, G2
    before = {p: p.stat().st_mtime_ns for p in sorted((whole / "checkpoints").rglob("*"))}
    for _ in range(2):
        code, text = train(resumed(whole, plugin))
        assert code == 0
        assert "nothing to do" in text
    assert {p: p.stat().st_mtime_ns for p in sorted((whole / "checkpoints").rglob("*"))} == before
    assert read_jsonl(whole / "metrics.jsonl")[-1]["step"] == 6


@pytest.mark.parametrize("where", ["update_actor", "validate"])
def test_a_request_to_stop_saves_and_a_resume_completes_the_run(
    whole: Path, plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupt(self: Trainer, *arguments: Any) -> dict[str, float]:
        if self.step + (where == "update_actor") == 3:
            os.kill(os.getpid(), signal.SIGINT)
        if self.stop() and where == "validate":
            raise Interrupted("while the validation is played")
        return original(self, *arguments)

    original = getattr(Trainer, where)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, where, interrupt)
        code, text = train(config(tmp_path, plugin))
    run = tmp_path / "parity-test-tiny-grpo"
    assert code == 130
    assert f"agentgym train --resume {run}" in text
    latest = checkpoint.latest(run / "checkpoints")
    assert latest is not None
    assert checkpoint.step_of(latest) == 3
    assert train(resumed(run, plugin))[0] == 0
    assert comparable(run) == comparable(whole)


def test_a_broken_scorer_stops_the_run_with_its_task(plugin: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="KeyError") as caught:
        train(config(tmp_path, plugin, **{"env.broken": "validation-1"}))
    assert caught.value.task_id == "validation-1"


def test_a_kl_to_the_model_before_training_is_zero_at_first_and_grows(plugin: Path, tmp_path: Path) -> None:
    train(config(tmp_path, plugin, **{"algo.kl_loss.coef": 0.1, "trainer.total_steps": 3, "trainer.warmup_steps": 0}))
    values = [row["actor/ref_kl"] for row in read_jsonl(tmp_path / "parity-test-tiny-grpo" / "metrics.jsonl")[1:]]
    assert values[0] == pytest.approx(0.0, abs=1e-6)
    assert values[2] > 1e-6


def test_several_epochs_and_mini_batches_clip(plugin: Path, tmp_path: Path) -> None:
    settings = {"algo.epochs": 2, "trainer.mini_batch_size": 4, "trainer.total_steps": 1, "trainer.warmup_steps": 0}
    train(config(tmp_path, plugin, **settings))
    row = read_jsonl(tmp_path / "parity-test-tiny-grpo" / "metrics.jsonl")[-1]
    assert row["actor/approx_kl"] != 0.0
    assert row["actor/clip_fraction"] > 0.0
    assert row["time/old_log_probs_s"] > 0.0


def test_prompts_that_do_not_fit_are_an_error_not_a_reward_of_zero(plugin: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_prompt_length=1: task validation-0 has \d\d tokens"):
        train(config(tmp_path, plugin, **{"rollout.max_prompt_length": 1}))


def test_a_resume_cannot_become_another_run_and_records_what_it_changes(
    whole: Path, plugin: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    with pytest.raises(ConfigError, match="env=twenty-questions: the run to resume has env=parity-test"):
        train(resumed(run, plugin, env="twenty-questions"))
    _, text = train(resumed(run, plugin, **{"trainer.total_steps": 7, "rollout.n": 2}))
    assert "changed rollout.n: 4 -> 2" in text
    assert load_config(TrainConfig, files=[run / "config.yaml"]).trainer.total_steps == 7
    assert [row["sessions/opened"] for row in read_jsonl(run / "metrics.jsonl")[-2:]] == [16, 8]


def test_no_run_to_resume_is_an_error(plugin: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run folder"):
        main.run(config(tmp_path, plugin, **{"trainer.resume": tmp_path / "nothing"}), Console(file=io.StringIO()))


@pytest.fixture
def started(plugin: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command line in a process of its own, as a user starts it."""
    overrides = {**SETTINGS, "plugins": plugin, "trainer.run_dir": tmp_path, "trainer.total_steps": 60}
    command = [sys.executable, "-m", "agentgym", "train", *[f"{k}={v}" for k, v in overrides.items()]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    yield process
    process.kill()
    process.communicate()


def wait_for_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while len(read_jsonl(run / "metrics.jsonl")) <= step:
        assert time.monotonic() < deadline, "the run does not get anywhere"
        time.sleep(0.05)


def test_a_killed_process_resumes_exactly(
    whole: Path, plugin: Path, tmp_path: Path, started: subprocess.Popen[str]
) -> None:
    run = tmp_path / "parity-test-tiny-grpo"
    wait_for_step(run, 3)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert train(resumed(run, plugin, **{"trainer.total_steps": 6}))[0] == 0
    last = comparable(run)
    assert last[1:6] == comparable(whole)[1:6]


def test_ctrl_c_on_the_command_line_saves_and_exits_130(tmp_path: Path, started: subprocess.Popen[str]) -> None:
    run = tmp_path / "parity-test-tiny-grpo"
    wait_for_step(run, 1)
    started.send_signal(signal.SIGINT)
    text, _ = started.communicate(timeout=60)
    assert started.returncode == 130, text
    latest = checkpoint.latest(run / "checkpoints")
    assert latest is not None
    assert checkpoint.step_of(latest) == read_jsonl(run / "metrics.jsonl")[-1]["step"]

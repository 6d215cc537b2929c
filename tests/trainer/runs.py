"""Whole training runs in small, for the tests of the trainer: an environment of a few tasks, in this process."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from agentgym.config import load_config
from agentgym.console import Console
from agentgym.trainer import main
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.tracking import read_jsonl

PLUGIN = '''
import agentgym
from agentgym import Env, Task


class Parity(Env):
    """Rewards turns of an even length: an untrained model has both kinds."""

    def __init__(self, broken="", constant=False, turns=1):
        self.broken, self.constant, self.turns = broken, constant, turns

    def tasks(self, split):
        return [Task(id=f"{split}-{i}", prompt=f"What is {i} + {i}?") for i in range(12 if split == "train" else 4)]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.task = next(t for t in self.tasks(options["split"]) if t.id == options["task_id"])
        self.left = self.turns
        return ({"role": "user", "content": self.task.prompt},), {}

    def step(self, action):
        if self.task.id == self.broken:
            raise KeyError("truth")
        length = len(self.to_turn(action).raw)
        self.left -= 1
        again = ({"role": "user", "content": "Again."},) if self.left else ()
        reward = float(self.constant or length % 2 == 0)
        return again, reward, not self.left, False, {"reward_components": {"length": length}}


agentgym.register("parity-test", Parity, max_turns=3)
'''

TIMES = ("time/", "throughput/", "memory/")
SETTINGS = {
    "env": "parity-test",
    "model": "tiny",
    "data.batch_size": 4,
    "rollout.n": 4,
    "rollout.max_response_length": 24,
    "rollout.temperature": 1.6,  # hot, so that the samples of a group differ
    "trainer.cluster": "inline",
    "trainer.threads": 1,
    "trainer.total_steps": 6,
    "trainer.lr": 1e-3,
    "trainer.warmup_steps": 4,
    "trainer.val_every": 3,
    "trainer.save_every": 2,
    "trainer.keep_checkpoints": 9,
    "trainer.loggers": "[]",
}


def config(folder: Path, plugin: Path, **settings: Any) -> TrainConfig:
    merged = {**SETTINGS, "plugins": plugin, "trainer.run_dir": folder, **settings}
    return load_config(TrainConfig, overrides=[f"{key}={value}" for key, value in merged.items()])


def train(configured: TrainConfig) -> tuple[int, str]:
    text = io.StringIO()
    code = main.run(configured, Console(file=text, live=False))
    return code, text.getvalue()


def resumed(run: Path, plugin: Path, **settings: Any) -> TrainConfig:
    overrides = [f"trainer.resume={run}", *[f"{key}={value}" for key, value in settings.items()]]
    return load_config(TrainConfig, files=[run / "config.yaml"], overrides=overrides)


def comparable(run: Path) -> list[dict[str, float]]:
    rows = read_jsonl(run / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


def played(run: Path) -> dict[str, Any]:
    """Ids, masks, rewards and advantages of every rollout of the run."""
    return {
        path.stem: [
            (r["task_id"], r["sample"], r["outcome"]["reward"], r["segments"], r.get("training"))
            for r in read_jsonl(path)
        ]
        for path in sorted((run / "rollouts").glob("*.jsonl"))
    }

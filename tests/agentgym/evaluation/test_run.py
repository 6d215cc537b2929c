"""Evaluation: statistics, failures that are not zeros, and the oracle through real sessions."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

import agentgym
from agentgym import AssistantTurn, Task, ToolEnv
from agentgym.config import load_config
from agentgym.console import Console
from agentgym.errors import ConfigError
from agentgym.evaluation import evaluate
from agentgym.evaluation_config import EvalConfig


class Mixed(ToolEnv):
    """Four tasks: two are solved by the oracle, one is answered wrongly, the scorer of one is broken."""

    def __init__(self, *, broken: str = "2", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.broken = broken

    def tasks(self, split: str) -> list[Task]:
        return [Task(id=f"{split}-{n}", prompt=f"task {n}") for n in range(4)] if split != "none" else []

    def oracle(self, task: Task) -> list[AssistantTurn]:
        return [AssistantTurn(content="wrong" if task.id.endswith("1") else "right")]

    def score(self, task: Task, answer: str) -> float:
        if self.broken in ("all", task.id.rsplit("-", 1)[1]):
            raise KeyError("truth")
        return float(answer == "right")


agentgym.register("mixed-test", Mixed, override=True)


def run(*overrides: str) -> Any:
    config = load_config(EvalConfig, overrides=["env=mixed-test", "agent=oracle", *overrides])
    return evaluate(config, Console(file=io.StringIO()))


def test_failures_are_counted_and_left_out_of_the_mean() -> None:
    # I4
    report = run()
    assert report.mean == pytest.approx(2 / 3)
    assert (report.samples, report.errors, report.coverage) == (4, 1, 0.75)
    assert "KeyError" in report.first_error
    text = "\n".join(report.lines())
    assert "coverage 0.750" in text
    assert "0.667" in text


def test_where_nothing_can_be_scored_there_is_no_number() -> None:
    # I4
    report = run("env.broken=all")
    assert (report.mean, report.solved, report.scored) == (None, None, 0)
    assert "no rollout could be scored" in "\n".join(report.lines())


def test_rollouts_and_report_are_written(tmp_path: Path) -> None:
    run(f"output={tmp_path}/out", "n=2", "tasks=2")
    rows = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    assert [(r["task_id"], r["sample"]) for r in rows] == [(f"validation-{t}", s) for t in (0, 1) for s in (0, 1)]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["mean"] == 0.5


def test_an_empty_split_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no tasks in split 'none'"):
        run("split=none")

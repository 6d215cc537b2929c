"""Rows on disk: what survives a kill, what is played again, and what stays as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentgym.errors import ConfigError
from agentgym.evaluation.results import Results, read_rows
from agentgym.rollout import Rollout
from agentgym.types import Outcome, RolloutStatus

WANTED = [(f"t{i}", sample) for i in range(10) for sample in range(2)]


def rollout(key: tuple[str, int], *, reward: float | None = 1.0, text: str = "42") -> Rollout:
    status = RolloutStatus.COMPLETED if reward is not None else RolloutStatus.FAILED_INFRA
    return Rollout(
        env_id="e",
        task_id=key[0],
        group=key[0],
        sample=key[1],
        outcome=Outcome(status=status, reward=reward, num_turns=1, error=None if reward is not None else "lost"),
        conversation=[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}],
    )


@pytest.fixture
def broken_off(tmp_path: Path) -> Path:
    """Three good rows, one error, half a line; one of the tasks has one of its two samples."""
    with Results(tmp_path / "out") as results:
        for key in (("t4", 1), ("t0", 0), ("t0", 1)):
            results.add(rollout(key, text="\u2028 \udc80 ü"))
        results.add(rollout(("t2", 0), reward=None))
    path = tmp_path / "out" / "rollouts.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:37])
    return tmp_path / "out"


def test_only_what_is_missing_or_failed_is_played(broken_off: Path) -> None:
    # I3
    before = (broken_off / "rollouts.jsonl").read_bytes().splitlines()
    results = Results(broken_off, resume=True)
    todo = results.missing(WANTED)
    assert set(WANTED) - set(todo) == {("t4", 1), ("t0", 0), ("t0", 1)}
    assert len(todo) == 17
    for key in reversed(todo):
        results.add(rollout(key))
    results.close(WANTED)
    lines = (broken_off / "rollouts.jsonl").read_bytes().splitlines()
    assert [(r["task_id"], r["sample"]) for r in map(json.loads, lines)] == WANTED
    assert (lines[0], lines[1], lines[9]) == (before[1], before[2], before[0])  # to the byte
    assert all(row.reward == 1.0 for row in read_rows(broken_off))


def test_an_interruption_of_a_resumed_evaluation_loses_nothing(broken_off: Path) -> None:
    # I3
    with Results(broken_off, resume=True) as results:  # never brought into order: killed
        results.add(rollout(("t9", 0)))
    with Results(broken_off, resume=True) as again:
        pass
    assert set(again.rows) == {("t4", 1), ("t0", 0), ("t0", 1), ("t2", 0), ("t9", 0)}
    assert again.rows["t2", 0].status is RolloutStatus.FAILED_INFRA


def test_a_failure_does_not_replace_a_result(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.add(rollout(("t0", 0)))
    results.add(rollout(("t0", 0), reward=None))
    results.add(rollout(("t1", 0), reward=None))
    results.add(rollout(("t1", 0), reward=0.5))
    results.close(WANTED)
    assert [(row.task_id, row.reward) for row in read_rows(tmp_path)] == [("t0", 1.0), ("t1", 0.5)]


def test_a_folder_with_rollouts_is_not_overwritten(broken_off: Path) -> None:
    with pytest.raises(ConfigError, match="--resume"):
        Results(broken_off)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(ConfigError, match=r"KeyError: 'outcome'"):
        Results(tmp_path, resume=True)
    with pytest.raises(ConfigError, match="line 1"):
        read_rows(tmp_path)
    with pytest.raises(ConfigError, match="no evaluation there"):
        read_rows(tmp_path / "nothing")


ENV = '''
import asyncio
import agentgym
from agentgym import Task, ToolEnv


class Slow(ToolEnv):
    def tasks(self, split):
        return [Task(id=f"{split}-{i}", prompt=f"say {i}", data={"i": i}) for i in range(30)]

    def score(self, task, answer):
        return float(answer == str(task.data["i"]))


agentgym.register("slow-test", Slow)


async def agent(session):
    """Right in every other sample."""
    i = session.task.data["i"]
    await asyncio.sleep(0.004 * (i % 7))
    return str(i) if i % 3 else "no"
'''

KILLER = """
import io, os, random, signal, sys, time
from agentgym.config import load_config
from agentgym.console import Console
from agentgym.evaluation import evaluate
from agentgym.evaluation_config import EvalConfig

plugin, folder = sys.argv[1:]


def run(output):
    settings = [f"plugins={plugin}", "env=slow-test", f"agent={plugin}:agent", "n=2", f"output={output}"]
    config = load_config(EvalConfig, overrides=[*settings, "rollout.session_limit=3"])
    evaluate(config, Console(file=io.StringIO()), resume=True)


noise = random.Random(3)
killed = 0
for attempt in range(20):
    child = os.fork()
    if child == 0:
        run(f"{folder}/killed")
        os._exit(0)
    time.sleep(noise.uniform(0.005, 0.15))
    os.kill(child, signal.SIGKILL)
    killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
run(f"{folder}/killed")
run(f"{folder}/whole")
print(killed)
"""


def test_twenty_kills_and_one_run_give_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "slow_env.py").write_text(ENV)
    root = str(Path(__file__).parents[3])
    code = f"import sys; sys.path.insert(0, {root!r}); exec(open({str(tmp_path / 'killer.py')!r}).read())"
    (tmp_path / "killer.py").write_text(KILLER)
    command = [sys.executable, "-c", code, str(tmp_path / "slow_env.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 3

    def rows(name: str) -> list[dict[str, Any]]:
        lines = (tmp_path / name / "rollouts.jsonl").read_text().splitlines()
        return [{**json.loads(line), "seconds": 0} for line in lines]

    assert len(rows("whole")) == 60
    assert rows("killed") == rows("whole")
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("killed", "whole")]
    assert reports[0]["per_task"] == reports[1]["per_task"]
    assert reports[0]["mean"] == pytest.approx(20 / 30)

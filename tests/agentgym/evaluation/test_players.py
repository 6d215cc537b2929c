"""Agents of the user's own, and an evaluation that is stopped."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from agentgym.agents import load_agent
from agentgym.config import load_config
from agentgym.console import Console
from agentgym.errors import ConfigError
from agentgym.evaluation import EvalReport, evaluate
from agentgym.evaluation.results import read_rows
from agentgym.evaluation_config import EvalConfig

SOURCE = """
import asyncio
import os
import signal

import agentgym
from agentgym import AssistantTurn, Task, ToolEnv


class Echo(ToolEnv):
    def tasks(self, split):
        return [Task(id=f"{split}-{i}", prompt=f"say {i}", data={"i": i}) for i in range(6)]

    def score(self, task, answer):
        return float(answer == f"say {task.data['i']}")


agentgym.register("echo-test", Echo, max_turns=2)


async def text(session):
    return session.conversation[-1]["content"]


async def steps(session):
    await session.step(AssistantTurn(content=session.conversation[-1]["content"]))


async def forgets(session):
    pass


async def fails(session):
    if session.task.data["i"] == 3:
        raise ValueError("my own bug")
    return "say 0"


async def lost(session):
    global calls
    calls += 1
    if calls < 2:
        raise ConnectionResetError("gone")
    return session.conversation[-1]["content"]


calls = 0


async def interrupts(session):
    if session.task.data["i"] < 3:
        return session.conversation[-1]["content"]
    await asyncio.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(60)


async def three(session, endpoint, more):
    pass


def plain(session):
    return "x"
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agents") / "echo_agents.py"
    path.write_text(SOURCE)
    return path


def config(source: Path, name: str, *overrides: str) -> EvalConfig:
    settings = [f"plugins={source}", "env=echo-test", f"agent={source}:{name}", *overrides]
    return load_config(EvalConfig, overrides=settings)


def run(source: Path, name: str, *overrides: str, **options: Any) -> EvalReport:
    return evaluate(config(source, name, *overrides), Console(file=io.StringIO()), **options)


@pytest.mark.parametrize("name", ["text", "steps"])
def test_an_agent_steps_or_returns_its_answer(source: Path, name: str) -> None:
    report = run(source, name, "n=2")
    assert (report.mean, report.samples, report.errors) == (1.0, 12, 0)
    assert [(entry.k, entry.pass_at, entry.pass_hat) for entry in report.at_k] == [(1, 1.0, 1.0), (2, 1.0, 1.0)]


def test_what_the_agent_does_wrong_is_an_error_with_its_name(source: Path) -> None:
    report = run(source, "fails")
    assert (report.mean, report.errors, report.error_types) == (pytest.approx(1 / 5), 1, {"ValueError": 1})
    assert "my own bug" in str(report.first_error)
    report = run(source, "forgets", "tasks=1")
    assert "returned before its session was done" in str(report.first_error)


def test_a_lost_connection_is_tried_once_more(source: Path) -> None:
    assert run(source, "lost", "tasks=1").mean == 1.0


@pytest.mark.parametrize(
    ("place", "part"),
    [
        ("FILE:plain", "async"),
        ("FILE:three", "session, endpoint"),
        ("FILE:nothing", "has no 'nothing'"),
        ("nope.py:x", "nope.py"),
        ("json:nope", "nope"),
        ("agent", "oracle"),
    ],
)
def test_a_wrong_agent_is_one_message(source: Path, place: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        load_agent(place.replace("FILE", str(source)))


def test_an_interruption_keeps_what_was_played(source: Path, tmp_path: Path) -> None:
    text = io.StringIO()
    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(KeyboardInterrupt):
        evaluate(config(source, "interrupts", f"output={tmp_path}/out"), Console(file=text))
    assert {row.task_id for row in read_rows(tmp_path / "out")} == {f"validation-{i}" for i in range(3)}
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["missing"], report["coverage"], report["mean"]) == (3, 0.5, 1.0)
    assert "stopped after 3 of 6 rollouts" in text.getvalue()
    resumed = run(source, "interrupts", "tasks=3", f"output={tmp_path}/out", resume=True)  # nothing is left to play
    assert (resumed.samples, resumed.missing) == (3, 0)


def test_other_settings_are_not_mixed_in(source: Path, tmp_path: Path) -> None:
    run(source, "text", "tasks=2", f"output={tmp_path}/out", "rollout.temperature=1")
    with pytest.raises(ConfigError, match="agent="):
        run(source, "steps", f"output={tmp_path}/out", resume=True)
    assert run(source, "text", "tasks=3", "n=2", f"output={tmp_path}/out", resume=True).samples == 6


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_exits_with_130(source: Path, tmp_path: Path, number: int) -> None:
    root = str(Path(__file__).parents[3])
    code = (
        f"import sys; sys.path.insert(0, {root!r}); from agentgym.cli import main; "
        f"sys.argv = ['agentgym', 'eval', 'plugins={source}', 'env=echo-test', 'agent={source}:interrupts']; main()"
    )
    script = code.replace("interrupts", "interrupts")
    if number == signal.SIGTERM:
        other = tmp_path / "echo_agents.py"
        other.write_text(SOURCE.replace("signal.SIGINT", "signal.SIGTERM"))
        script = script.replace(str(source), str(other))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert "agentgym eval --resume output=evals/echo-test-" in done.stdout

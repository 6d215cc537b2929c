"""`agentgym smoke`: exit codes, the report, and that every kind of fault shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentgym.cli import run
from agentgym.cli.smoke_command import children

TOY = Path(__file__).with_name("toy_env.py")


def smoke(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(["smoke", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def broken(tmp_path: Path, name: str, old: str, new: str) -> str:
    """The toy environment with a fault, as a plugin."""
    text = TOY.read_text()
    assert old in text
    file = tmp_path / f"{name.replace('-', '_')}.py"
    file.write_text(text.replace('id="toy-sums"', f'id="{name}"').replace(old, new))
    return f"plugins={file}"


def test_a_good_environment_passes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = smoke(capsys, "env=counter", "tasks=3")
    assert (code, err) == (0, "")
    lines = {line[:13].strip(): line[13:] for line in out.splitlines()}
    assert lines["oracle"] == "solves 6 of 6 tasks, mean reward 1.000"
    assert lines["sessions"] == "6 opened, 6 closed, at most 6 at once"
    assert lines["left behind"] == "nothing"
    assert re.fullmatch(r"\d+ \(errors 0, malformed 0\)", lines["tool calls"])
    phases = [part.split()[0] for part in lines["time"].split(", ")]
    assert phases == ["waiting", "opening", "oracle", "tokens", "steps", "closing"]
    rows = [line.split() for line in out.splitlines() if "/" in line]
    assert [row[0].partition("/")[0] for row in rows] == ["train"] * 3 + ["validation"] * 3
    assert {tuple(row[1:4]) for row in rows} == {("completed", "1", "yes")}
    assert all(int(row[6]) > 20 and int(row[7]) > 20 for row in rows)


def test_an_environment_with_a_simulated_user_passes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = smoke(capsys, "env=twenty-questions", "tasks=1")
    assert (code, "solves 2 of 2 tasks" in out) == (0, True), out


@pytest.mark.parametrize("env", ["python-math", "terminal"])
def test_sandboxes_are_gone_in_the_end(capsys: pytest.CaptureFixture[str], env: str) -> None:
    before = children()
    code, out, _ = smoke(capsys, f"env={env}", "env.sandbox=process", "tasks=1")
    assert code == 0, out
    assert "left behind  nothing" in out
    assert children() == before


def test_an_oracle_that_is_wrong_is_shown_with_its_conversation(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plugin = broken(tmp_path, "wrong-oracle", "content=answer", "content='no idea'")
    code, out, _ = smoke(capsys, "env=wrong-oracle", plugin, "tasks=1")
    assert code == 1
    assert "solves 0 of 2 tasks" in out
    assert "was not solved (completed, reward 0)" in out
    assert "[assistant] no idea" in out


def test_a_fault_is_shown_with_task_and_traceback(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plugin = broken(tmp_path, "faulty-score", "return float(task", "return 1 / 0 + float(task")
    code, out, _ = smoke(capsys, "env=faulty-score", plugin, "tasks=1")
    assert code == 1
    assert re.search(r"task 'train/\S+' failed_env:", out)
    assert "ZeroDivisionError" in out
    assert "faulty_score.py" in out


def test_an_episode_that_goes_on_after_the_oracle_is_a_failure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plugin = broken(tmp_path, "endless", ", AssistantTurn(content=answer)]", "]")
    code, out, _ = smoke(capsys, "env=endless", plugin, "tasks=1")
    assert code == 1
    assert "the episode goes on after the oracle's 1 turns" in out


def test_episodes_that_do_not_fit_say_which_limit(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = smoke(capsys, "env=counter", "tasks=1", "rollout.max_response_length=20")
    assert code == 1
    assert "truncated_tokens" in out
    assert "rollout.max_response_length=20" in out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["env=contour"], "'counter'"),
        (["env=counter", "env.cals=2"], "'calls'"),
        (["env=counter", "tsks=2"], "'tasks'"),
        (["env=counter", "tasks=0"], "tasks=0"),
        (["env=counter", "model=./nope"], "./nope"),
    ],
)
def test_wrong_input_is_exit_code_2(capsys: pytest.CaptureFixture[str], arguments: list[str], part: str) -> None:
    code, out, err = smoke(capsys, *arguments)
    assert (code, out) == (2, "")
    assert part in err


def test_children_are_found_with_their_own() -> None:
    code = (
        "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); "
        "sys.stdin.read(); p.kill()"
    )
    before = children()
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert children() - before == {child.pid, grandchild}
        child.communicate()
    assert children() == before
    assert os.getpid() not in children()

"""Recorded rollouts scored again and replayed, without a model."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli import run as run_cli
from agentgym.config import load_config
from agentgym.console import Console
from agentgym.errors import ConfigError
from agentgym.evaluation import evaluate
from agentgym.evaluation.records import read_records
from agentgym.evaluation.results import read_rows
from agentgym.evaluation_config import EvalConfig

ENV = '''
import agentgym
from agentgym import AssistantTurn, Task, ToolCall, ToolEnv, function_tool


class Adder(ToolEnv):
    """Sums with 17. ``flaw`` changes the environment on purpose."""

    def __init__(self, *, flaw="", **kwargs):
        super().__init__(**kwargs)
        self.flaw = flaw

    @function_tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one.
            b: the other.
        """
        return a + b + (self.flaw == "tool" and a == 2)

    tools = (add,)

    def tasks(self, split):
        text = "How much is" if self.flaw == "prompt" else "What is"
        return [Task(id=f"{split}-{i}", prompt=f"{text} {i} plus 17?", data={"answer": i + 17}) for i in range(4)]

    def score(self, task, answer):
        if self.flaw == "scorer" and task.id.endswith("1"):
            raise KeyError("truth")
        right = float(str(task.data["answer"]) in answer.split())
        return {"score": right * (0.5 if self.flaw == "reward" else 1), "length": len(answer)}

    def oracle(self, task):
        answer = task.data["answer"]
        return [
            AssistantTurn(tool_calls=(ToolCall(name="add", arguments={"a": answer - 17, "b": 17}),)),
            AssistantTurn(content=str(answer if answer % 2 else answer + 1)),
        ]


agentgym.register("adder-test", Adder, max_turns=3)


async def clumsy(session):
    """A malformed call, a cut call, then words until the turn limit or the answer."""
    from agentgym.types import ParseError

    raw = '<tool_call>{"name": "add", "arguments": {"a": 1,</tool_call>'
    await session.step(raw)
    call = ToolCall(name="add", arguments={"a": 1, "b": 17})
    if session.task.id.endswith("0"):
        await session.step(AssistantTurn(tool_calls=(call,), finish_reason="length"))
    elif session.task.id.endswith("1"):
        await session.step(AssistantTurn(content="the answer is", finish_reason="length"))
    while not session.done:
        await session.step(AssistantTurn(tool_calls=(call,)))
'''

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if "boom" in solution_str:
        raise RuntimeError("no such text")
    return {"score": float(str(ground_truth) in solution_str), "turns": extra_info["num_turns"]}
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plugin") / "adder_env.py"
    path.write_text(ENV)
    path.with_name("own_reward.py").write_text(REWARD)
    return path


@pytest.fixture(scope="module")
def recorded(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation of the oracle, which is wrong in every other task."""
    return evaluated(plugin, tmp_path_factory.mktemp("recorded") / "out", "agent=oracle")


def evaluated(plugin: Path, output: Path, *overrides: str) -> Path:
    settings = [f"plugins={plugin}", "env=adder-test", f"output={output}", *overrides]
    evaluate(load_config(EvalConfig, overrides=settings), Console(file=io.StringIO()))
    return output


@pytest.fixture
def score(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str | Path) -> tuple[int, str]:
        code = run_cli(["score", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return call


def test_the_environment_scores_as_it_did(recorded: Path, score: Any) -> None:
    code, out = score(recorded)
    assert (code, "4: 0 with another reward" in out) == (0, True), out
    assert "recorded  0.500" in out
    assert "now       0.500" in out


def test_a_changed_score_is_shown_and_written(recorded: Path, score: Any, tmp_path: Path) -> None:
    code, out = score(recorded, "env.flaw=reward", f"output={tmp_path / 'new'}")
    assert code == 0
    assert "2 with another reward" in out
    assert "1 -> 0.5" in out
    rows = {row.task_id: (row.reward, row.components["length"]) for row in read_rows(tmp_path / "new")}
    assert rows["validation-0"] == (0.5, 2.0)
    assert rows["validation-1"] == (0.0, 2.0)
    assert len((recorded / "rollouts.jsonl").read_bytes().splitlines()) == 4  # the record itself is untouched


def test_what_cannot_be_scored_is_no_zero(recorded: Path, score: Any) -> None:
    # I4
    code, out = score(recorded, "env.flaw=scorer")
    assert code == 0
    assert "now       0.667" in out
    assert "ERRORS: 1 of 4" in out
    assert "KeyError" in out


def test_a_rollout_whose_scorer_had_failed_is_scored_now(plugin: Path, score: Any, tmp_path: Path) -> None:
    broken = evaluated(plugin, tmp_path / "broken", "agent=oracle", "env.flaw=scorer")
    code, out = score(broken, "env.flaw=''")
    assert code == 0
    assert "none -> 0" in out
    assert "ERRORS" not in out


def test_a_reward_of_the_user_scores(recorded: Path, plugin: Path, score: Any, tmp_path: Path) -> None:
    code, out = score(recorded, f"reward={plugin.with_name('own_reward.py')}", f"output={tmp_path / 'new'}")
    assert code == 0, out
    assert "now       0.500" in out
    assert all(row.components["turns"] == 2.0 for row in read_rows(tmp_path / "new"))


def test_plain_message_logs_are_scored(plugin: Path, score: Any, tmp_path: Path) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 17}'}}
    lines = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "18"}], "ground_truth": 18},
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "boom"}], "ground_truth": 1},
        {
            "messages": [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "x", "content": "18"},
                {"role": "assistant", "content": "I do not know"},
            ],
            "ground_truth": 18,
        },
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out = score(log, f"reward={plugin.with_name('own_reward.py')}")
    assert code == 0, out
    assert "now       0.500" in out  # 1, an error, 0: the tool's own 18 is not the model's
    assert "ERRORS: 1 of 3" in out
    assert "no reward" in out
    lines[0]["task_id"] = "validation-1"
    log.write_text(json.dumps(lines[0]) + "\n")
    code, out = score(log, f"plugins={plugin}", "env=adder-test")
    assert "now       1.000" in out
    code, out = score(log)
    assert code == 2
    assert "name the environment" in out


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "no recorded rollouts"),
        ('{"text": "x"}\n', "expected an object with 'messages', found text"),
        ("not json\n", "line 1"),
        ('{"messages": [{"role": "critic"}]}\n', "critic"),
    ],
)
def test_what_is_no_record_is_said(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=part):
        read_records(tmp_path / "log.jsonl")


def test_a_replay_agrees_with_its_run(recorded: Path, score: Any) -> None:
    code, out = score(recorded, "--replay")
    assert (code, out.splitlines()[0]) == (0, "replayed  4 rollouts: 4 as recorded, 0 differ")


def test_a_replay_takes_malformed_and_cut_turns_as_they_were(plugin: Path, score: Any, tmp_path: Path) -> None:
    clumsy = evaluated(plugin, tmp_path / "clumsy", f"agent={plugin}:clumsy")
    statuses = {row.task_id: str(row.status) for row in read_rows(clumsy)}
    assert statuses["validation-1"] == "truncated_tokens"
    assert statuses["validation-2"] == "truncated_turns"
    code, out = score(clumsy, "--replay")
    assert (code, out.splitlines()[0]) == (0, "replayed  4 rollouts: 4 as recorded, 0 differ"), out


@pytest.mark.parametrize(
    ("flaw", "count", "first"),
    [
        ("tool", 1, "validation-2/0: turn 0: the tool add message says '20', recorded is '19'"),
        ("prompt", 4, "validation-0/0: the first prompt: the user message says 'How much is 0 plus 17?'"),
        ("reward", 2, "validation-0/0: reward 0.5, recorded is 1.0"),
        ("scorer", 1, "validation-1/0: the environment failed:"),
    ],
)
def test_a_replay_names_the_first_difference(recorded: Path, score: Any, flaw: str, count: int, first: str) -> None:
    code, out = score(recorded, f"env.flaw={flaw}", "--replay")
    assert code == 1
    assert f"{4 - count} as recorded, {count} differ" in out
    assert first in out.splitlines()[1]


def test_records_are_viewed(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["view", str(recorded), "--only", "unsolved", "--limit", "1"]) == 0
    out = capsys.readouterr().out
    assert "== validation-1 / 0  completed  reward 0  2 turns" in out
    assert '-> add({"a": 1, "b": 17})' in out
    assert "[tool add]\n18\n" in out
    assert "1 of 2 rollouts; 1 more" in out
    assert run_cli(["view", str(recorded), "--task", "validation-7"]) == 2
    assert "Did you mean 'validation-" in capsys.readouterr().err

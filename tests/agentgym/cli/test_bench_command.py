"""The table that benchmarks print."""

import json

import pytest

from agentgym.cli import run
from agentgym.cli.bench_command import BENCHES, table
from agentgym.registry import import_target


def test_table_aligns_text_left_and_numbers_right() -> None:
    rows = [{"engine": "torch", "tokens/s": 5120.4}, {"engine": "hf", "tokens/s": 48.25, "ratio": 1.0}]
    assert table(rows) == [
        "engine  tokens/s  ratio",
        "torch      5,120",
        "hf         48.25      1",
    ]


def test_no_rows_are_no_lines() -> None:
    assert table([]) == []


def test_rows_are_a_table_or_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"estimator": "gae", "median_ms": 7.5}]
    monkeypatch.setattr("agentgym.trainer.bench_advantages.bench_advantages", lambda: rows)
    assert run(["bench", "advantages"]) == 0
    assert capsys.readouterr().out == "estimator  median_ms\ngae              7.5\n"
    assert run(["bench", "advantages", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rows


@pytest.mark.parametrize("name", BENCHES)
def test_every_benchmark_is_there(name: str) -> None:
    assert callable(import_target(BENCHES[name], what=name))

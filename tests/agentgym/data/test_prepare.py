"""Data sets as data files, from local files."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

import agentgym
from agentgym.cli import run
from agentgym.data import prepare as module
from agentgym.data import read_file
from agentgym.data.prepare import prepare
from agentgym.errors import ConfigError

ROWS = [
    {"question": "Tom has 2 apples and buys 3.", "answer": "2+3=<<2+3=5>>5\n#### 5"},
    {"question": "A car costs 1,200 dollars more.", "answer": "It is 1,200.\n#### 1,200"},
    {"question": "What is left?", "answer": "#### -3"},
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for split, rows in {"train": ROWS, "test": ROWS[:1]}.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_gsm8k_becomes_files_that_the_environment_plays(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert run(["data", "prepare", "gsm8k", "--source", str(source), "--output", str(output)]) == 0
    assert "train.parquet: 3 rows" in capsys.readouterr().out
    rows = read_file(output / "train.parquet").rows
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["5", "1200", "-3"]
    assert rows[0]["prompt"][0]["content"].startswith("Tom has 2 apples")
    assert rows[2]["extra_info"]["index"] == 2
    files = {"train_files": [str(output / "train.parquet")], "val_files": [str(output / "val.parquet")]}
    env = agentgym.make("dataset", **files)
    env.reset(options={"task_id": "train-1", "split": "train"})
    assert env.step("So it is #### 1,200")[1] == 1.0
    assert len(env.tasks("validation")) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda folder: (folder / "test.jsonl").unlink(), ["no file test*", "train.jsonl"]),
        (
            lambda folder: (folder / "train.jsonl").write_text('{"question": "x", "answer": "5"}\n'),
            ["train.jsonl", "row 0", "column answer", "####"],
        ),
        (
            lambda folder: (folder / "train.jsonl").write_text('{"question": "x", "anwser": "#### 5"}\n'),
            ["train.jsonl", "row 0", "column answer", "anwser"],
        ),
    ],
)
def test_a_source_that_does_not_fit_says_why(source: Path, tmp_path: Path, change, parts: list[str]) -> None:  # type: ignore[no-untyped-def]
    change(source)
    with pytest.raises(ConfigError) as caught:
        prepare("gsm8k", source=source, output=tmp_path / "out")
    assert [part for part in parts if part not in str(caught.value)] == []
    assert not (tmp_path / "out" / "train.parquet").exists()


def test_no_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/{{split}}.jsonl"
        recipe = module.Recipe(url=url, splits={"train": "train"}, convert=module.gsm8k_rows)
        monkeypatch.setattr(module, "RECIPES", {"gsm8k": recipe})
        with pytest.raises(ConfigError, match=r"train.jsonl cannot be downloaded .* --source FOLDER"):
            prepare("gsm8k", source=None, output=tmp_path, timeout=5)


def test_an_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'gsm8k'"):
        prepare("gsm8", source=None, output=Path("x"))

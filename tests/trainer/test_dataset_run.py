"""Training on data files: rewards and tools of a user, mixtures, filters, and exact resumes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentgym.config import load_config
from agentgym.console import Console
from agentgym.errors import ConfigError, EnvError
from agentgym.trainer import main
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.preflight import check_run
from agentgym.trainer.tracking import read_jsonl

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0, **kwargs):
    assert ground_truth == str(2 * extra_info["index"]), (ground_truth, extra_info)
    assert extra_info["status"] in ("completed", "truncated_tokens", "truncated_turns")
    even = float(len(solution_str) % 2 == 0)
    return {"score": scale * even, "even": even, "shown": solution_str[:5]}


def fails(data_source, solution_str, ground_truth, extra_info=None):
    raise ZeroDivisionError("of the scorer")


def compute_scores(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert len(set(ground_truths)) == 1 and len(solution_strs) in (1, 4)
    longest = max(map(len, solution_strs))
    return [float(len(text) == longest) for text in solution_strs]
"""

SETTINGS: dict[str, Any] = {
    "env": "dataset",
    "model": "tiny",
    "data.batch_size": 4,
    "rollout.n": 4,
    "rollout.max_response_length": 16,
    "rollout.temperature": 1.6,
    "trainer.cluster": "inline",
    "trainer.threads": 1,
    "trainer.total_steps": 2,
    "trainer.lr": 1e-3,
    "trainer.val_every": 0,
    "trainer.save_every": 0,
    "trainer.loggers": "[]",
    "trainer.name": "run",
}


def row(i: int, source: str = "numbers", **extra: Any) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"What is {i} + {i}?" + " please" * extra.pop("polite", 0)}],
        "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
        "extra_info": {"index": i, **extra},
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [row(i, source="odd" if i % 2 else "even") for i in range(8)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    pq.write_table(pa.Table.from_pylist([row(i) for i in range(8, 11)]), tmp_path / "val.parquet")
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def config(folder: Path, **settings: Any) -> TrainConfig:
    files = {"data.train_files": folder / "train.parquet", "data.val_files": folder / "val.parquet"}
    reward = {"reward.path": folder / "reward.py"}
    merged = {**SETTINGS, **files, **reward, "trainer.run_dir": folder / "runs", **settings}
    given = [f"{key}={value}" for key, value in merged.items() if value is not None]
    return load_config(TrainConfig, overrides=given)


def train(configured: TrainConfig) -> str:
    text = io.StringIO()
    assert main.run(configured, Console(file=text, live=False)) == 0, text.getvalue()
    return text.getvalue()


def test_a_file_and_a_reward_function_train(folder: Path) -> None:
    configured = config(folder, **{"reward.kwargs.scale": 0.5})
    assert check_run(configured).train_tasks == 8
    train(configured)
    rows = read_jsonl(folder / "runs" / "run" / "metrics.jsonl")
    assert [r["step"] for r in rows] == [0, 1, 2]
    for r in rows[1:]:
        assert r["rollout/failed"] == 0
        assert r["reward/component/even"] == pytest.approx(2 * r["reward/mean"])
        assert {"reward/source/even", "reward/source/odd", "reward/length_correlation"} <= r.keys()
    rollouts = read_jsonl(folder / "runs" / "run" / "rollouts" / "step-000001.jsonl")
    assert {r["outcome"]["reward"] for r in rollouts} == {0.0, 0.5}
    assert all(isinstance(r["reward_info"]["shown"], str) for r in rollouts)
    assert {r["data_source"] for r in rollouts} <= {"even", "odd"}


def test_a_batch_function_scores_whole_groups(folder: Path) -> None:
    train(config(folder, **{"reward.path": f"{folder}/reward.py:compute_scores", "reward.manager": "batch"}))
    rollouts = read_jsonl(folder / "runs" / "run" / "rollouts" / "step-000001.jsonl")
    assert len(rollouts) == 16
    for start in range(0, 16, 4):
        assert max(r["outcome"]["reward"] for r in rollouts[start : start + 4]) == 1.0


def test_a_scorer_that_raises_stops_the_first_step_with_its_type(folder: Path) -> None:
    with pytest.raises(EnvError, match=r"ZeroDivisionError: of the scorer") as caught:
        train(config(folder, **{"reward.name": "fails"}))
    assert caught.value.error_type == "ZeroDivisionError"
    assert "errors/ZeroDivisionError" in str(caught.value) or "x ZeroDivisionError" in str(caught.value)


def test_prompts_that_are_too_long_are_left_out_and_counted(folder: Path) -> None:
    # E1
    tools = folder / "tools.py"
    tools.write_text(
        "from agentgym import function_tool\n\n@function_tool\n"
        "def add(a: int, b: int) -> int:\n    'Add two numbers.'\n    return a + b\n"
    )
    rows = [row(i, polite=60 if i == 3 else 0) for i in range(8)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    settings = {"rollout.max_prompt_length": 180, "data.filter_overlong_prompts": "true"}
    text = train(config(folder, **settings, **{"trainer.total_steps": 1}))
    assert "dropped env=dataset: 1 of 8 train prompts are longer than rollout.max_prompt_length=180 tokens" in text
    assert "task train-3" in text
    # the schemas of the tools count: with them nothing fits
    with pytest.raises(ConfigError, match=r"8 of 8 train prompts .*no task is left; raise it to at least \d+"):
        train(config(folder, **{**settings, "rollout.max_prompt_length": 60, "tools.path": tools}))
    with pytest.raises(ConfigError, match=r"1 of 8 train prompts .*data.filter_overlong_prompts=true"):
        train(config(folder, **{"rollout.max_prompt_length": 180, "data.truncation": "error"}))


def test_a_mixture_trains_with_metrics_for_each_environment_and_resumes_exactly(folder: Path) -> None:
    settings = {
        "env": "dataset,counter",
        "env.weights.dataset": 3,
        "reward.path": None,
        "data.train_size": 6,
        "data.val_size": 2,
        "rollout.max_prompt_length": 512,
        "trainer.total_steps": 4,
        "trainer.val_every": 4,
        "trainer.save_every": 2,
    }
    rows = [row(i, source="exact") for i in range(8)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:3]), folder / "val.parquet")
    configured = config(folder, **settings)
    assert check_run(configured).train_tasks == 12
    train(configured)
    whole = folder / "runs" / "run"
    metrics = read_jsonl(whole / "metrics.jsonl")
    assert {"val/dataset/reward_mean", "val/counter/reward_mean", "val/counter/pass@1"} <= metrics[-1].keys()
    assert metrics[1]["env/dataset/rollouts"] == 12
    assert metrics[1]["env/counter/rollouts"] == 4
    drawn = {step: groups(whole, step) for step in (1, 2, 3, 4)}
    for path in (whole / "checkpoints").glob("step-000004*"):
        for file in sorted(path.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        path.rmdir()
    resumed = load_config(TrainConfig, files=[whole / "config.yaml"], overrides=[f"trainer.resume={whole}"])
    train(resumed)
    assert {step: groups(whole, step) for step in (1, 2, 3, 4)} == drawn


def groups(run: Path, step: int) -> list[tuple[str, str]]:
    return [(r["env_id"], r["group"]) for r in read_jsonl(run / "rollouts" / f"step-{step:06d}.jsonl")]


def test_files_are_for_the_environment_dataset_alone(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train_files=.* is read by env=dataset, but this is env=counter"):
        config(folder, env="counter")


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"reward.name": "compute_scor"}, ["reward.path", "'compute_scor'", "Did you mean 'compute_score'"]),
        ({"reward.path": "nowhere.py"}, ["reward.path", "nowhere.py", "does not exist"]),
        ({"reward.manager": "naiv"}, ["'naiv'", "Did you mean 'naive'", "composite"]),
        ({"reward.manager": "dapo", "reward.options.bufer": 3}, ["reward.options.bufer", "'buffer'", "max_length"]),
        ({"reward.manager": "batch"}, ["compute_score(", "data_sources"]),
        ({"reward.manager": "composite"}, ["reward.options.parts"]),
        ({"reward.path": None}, ["'even'", "no built-in scorer", "reward.path"]),
        ({"data.curriculum": "easy_frist"}, ["data.curriculum=easy_frist", "Did you mean 'easy_first'"]),
        ({"data.train_files": "gone.parquet"}, ["gone.parquet", "does not exist"]),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    folder: Path, settings: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_run(config(folder, **settings))
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_run_of_files_is_evaluated_with_its_files_and_reward(folder: Path) -> None:
    from agentgym.cli.eval_command import load_eval_config
    from agentgym.evaluation import evaluate

    train(config(folder, **{"trainer.total_steps": 1}))
    configured = load_eval_config([f"model={folder / 'runs' / 'run'}", f"output={folder / 'out'}"], [])
    report = evaluate(configured, Console(file=io.StringIO(), live=False))
    assert (report.tasks, report.errors) == (3, 0)
    rewards = [
        json.loads(line)["outcome"]["reward_components"]
        for line in (folder / "out" / "rollouts.jsonl").read_text().splitlines()
    ]
    assert all(set(one) == {"even"} for one in rewards)

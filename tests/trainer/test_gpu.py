"""vLLM and trainer on GPUs: weights over CUDA IPC and NCCL, sleep and wake. `examples/gpu_check.sh` runs these."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from agentgym.generation import SamplingParams
from agentgym.settings import VllmConfig
from agentgym.trainer.model import load_causal_lm
from agentgym.trainer.model_path import resolve_model_path
from agentgym.trainer.rollout.vllm_engine import VllmEngine
from agentgym.trainer.rollout.vllm_setup import EngineOptions
from agentgym.trainer.rollout.vllm_support import made_for_gpus
from agentgym.trainer.tracking import read_jsonl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available() or not made_for_gpus(), reason="needs a GPU and vLLM for GPUs"),
]

PROMPT = list(range(5, 45))


@pytest.fixture
async def engine() -> AsyncIterator[VllmEngine]:
    """The shipped model, on a GPU that it shares."""
    made = VllmEngine(
        EngineOptions(
            model=resolve_model_path("tiny"),
            max_length=256,
            gpu=True,
            colocated=True,
            settings=VllmConfig(gpu_memory=0.2, eager=True),
        )
    )
    yield made
    await made.aclose()


def full_logprobs(model: Any, prompt: Sequence[int], new: Sequence[int]) -> list[float]:
    ids = torch.tensor([[*prompt, *new]])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()  # type: ignore[no-any-return]


async def test_an_engine_that_slept_answers_as_before_and_frees_memory_meanwhile(engine: VllmEngine) -> None:
    sampling = SamplingParams(max_tokens=12, seed=1)
    before = await engine.generate(PROMPT, sampling, "a")
    awake = torch.cuda.mem_get_info()[0]
    await engine.rest()
    assert torch.cuda.mem_get_info()[0] - awake > 0.1 * torch.cuda.mem_get_info()[1]
    after = await engine.generate(PROMPT, sampling, "a")
    assert list(after.token_ids) == list(before.token_ids)
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-3)


async def test_weights_reach_a_sleeping_engine(engine: VllmEngine) -> None:
    await engine.generate(PROMPT, SamplingParams(max_tokens=2), "a")
    model = load_causal_lm("tiny", dtype="float32")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    await engine.rest()
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    await engine.update_weights(weights, 3)
    generation = await engine.generate(PROMPT, SamplingParams(max_tokens=12, seed=1), "a")
    assert generation.weight_version == 3
    assert generation.cached_tokens == 0
    # GPUs multiply float32 in a shorter format.
    assert generation.logprobs == pytest.approx(full_logprobs(model, PROMPT, generation.token_ids), abs=2e-2)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["rollout.vllm.gpu_memory=0.3"], id="ipc"),
        pytest.param(
            ["rollout.vllm.colocate=false"],
            id="nccl",
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
        ),
        pytest.param(
            ["trainer.workers=2", "rollout.vllm.tensor_parallel=2", "rollout.vllm.gpu_memory=0.3"],
            id="tensor-parallel",
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
        ),
    ],
)
def test_a_run_trains_and_its_engines_follow(tmp_path: Path, settings: list[str]) -> None:
    command = [sys.executable, "-m", "agentgym", "train", "env=calculator-math", "rollout=vllm", *settings]
    command += ["rollout.vllm.eager=true", "rollout.n=4", "data.batch_size=4", "data.val_size=8", "trainer.lr=1e-4"]
    command += ["trainer.total_steps=3", f"trainer.run_dir={tmp_path}", "trainer.name=run", "trainer.save_every=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert row["rollout/logprob_gap_mean"] < 2e-2
        assert row["version/lag"] == row["sessions/live"] == row["rollout/failed"] == 0

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentgym.trainer.bench_rollout import RolloutWorkload, bench_rollout
from agentgym.trainer.model import load_causal_lm
from agentgym.trainer.model_path import resolve_model_path
from agentgym.trainer.rollout.vllm_support import installed


def test_the_report_compares_both_engines_on_the_same_turns() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    workload = RolloutWorkload(sessions=4, samples=2, turns=3, turn_tokens=5)
    report = bench_rollout(model, workload=workload, passes=1, num_threads=1)
    assert [(row["engine"], row["turns"]) for row in report["rows"]] == [
        (engine, turns) for engine in ("torch", "generate") for turns in ("first", "later", "all")
    ]
    for row in report["rows"]:
        turns = {"first": 1, "later": 2, "all": 3}[row["turns"]]
        assert row["tokens_per_s"] * row["seconds"] == pytest.approx(4 * 5 * turns)
    by_kind = {(row["engine"], row["turns"]): row["tokens_per_s"] for row in report["rows"]}
    assert report["ratio"]["later"] == pytest.approx(by_kind["torch", "later"] / by_kind["generate", "later"])
    assert report["workload"]["turn_tokens"] == 5
    hits = {(row["engine"], row["turns"]): row["cache_hits"] for row in report["rows"]}
    assert 0 < hits["torch", "first"] < hits["torch", "later"] < 1
    assert {hits["generate", turns] for turns in ("first", "later", "all")} == {0.0}
    assert all(("first_token_s" in row) == (row["turns"] == "all") for row in report["rows"])
    assert "ratio_vllm" not in report
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_single_turn_has_no_later_ones() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    report = bench_rollout(model, workload=RolloutWorkload(sessions=2, turns=1, turn_tokens=3), passes=1)
    assert report["ratio"].keys() == {"first", "all"}


def test_samples_of_a_question_share_its_prompt() -> None:
    prompts = RolloutWorkload(sessions=6, samples=3).prompts(50)
    assert prompts[0] == prompts[2] != prompts[3] == prompts[5]
    assert prompts[0][:90] == prompts[3][:90]


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_vllm_plays_the_same_turns() -> None:
    if installed() is None:
        pytest.skip("vLLM is not installed")
    workload = RolloutWorkload(sessions=4, samples=2, turns=2, turn_tokens=5)
    report = bench_rollout(
        load_causal_lm("tiny", dtype="float32"), workload=workload, passes=1, vllm_folder=resolve_model_path("tiny")
    )
    rows = {(row["engine"], row["turns"]): row for row in report["rows"]}
    assert rows["vllm", "later"]["cache_hits"] > 0.5
    assert rows["vllm", "all"]["tokens_per_s"] * rows["vllm", "all"]["seconds"] == pytest.approx(4 * 5 * 2)
    assert report["ratio_vllm"].keys() == {"first", "later", "all"}

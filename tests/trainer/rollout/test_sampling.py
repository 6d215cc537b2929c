from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.errors import ConfigError
from agentgym.generation import SamplingParams
from agentgym.trainer.rollout.sampling import SamplingPlan, check_params, sample, truncate, uniforms

CPU = torch.device("cpu")


def draw(logits: list[float], noise: float, **params: float) -> tuple[int, float]:
    plan = SamplingPlan.of([SamplingParams(max_tokens=1, **params)], CPU)  # type: ignore[arg-type]
    ids, logprobs = sample(torch.tensor([logits]), plan, [noise])
    return int(ids[0]), float(logprobs[0])


def test_logprob_is_of_the_distribution_after_temperature() -> None:  # C14
    token, logprob = draw([2.0, 0.0], 0.1, temperature=0.5)
    assert token == 0
    assert logprob == pytest.approx(-0.0181499, abs=1e-6)


def test_greedy_reports_the_untempered_logprob_and_never_divides_by_zero() -> None:  # C14
    token, logprob = draw([2.0, 0.0], 0.99, temperature=0.0)
    assert token == 0
    assert logprob == pytest.approx(-0.1269280, abs=1e-6)


def test_noise_picks_by_inverse_cdf() -> None:
    logits = [math.log(p) for p in (0.2, 0.5, 0.3)]
    assert [draw(logits, u)[0] for u in (0.0, 0.19, 0.21, 0.69, 0.71, 0.9999999)] == [0, 0, 1, 1, 2, 2]


@given(
    st.lists(st.one_of(st.just(-math.inf), st.floats(-30, 30)), min_size=1, max_size=12).filter(
        lambda logits: max(logits) > -math.inf
    ),
    st.floats(0.0, 1.0, exclude_max=True),
)
@settings(max_examples=200, deadline=None)
def test_a_token_of_probability_zero_is_never_sampled(logits: list[float], noise: float) -> None:
    token, logprob = draw(logits, noise)
    assert logits[token] > -math.inf
    assert math.isfinite(logprob)


def test_top_k_and_top_p_renormalise_over_what_they_leave() -> None:
    logprobs = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert truncate(logprobs, 1.0, 2).exp().tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert truncate(logprobs, 0.65, 0).exp().tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert truncate(logprobs, 0.75, 0).exp().tolist() == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    # top-p counts what top-k left: 0.4 / 0.7 reaches 0.5 alone
    assert truncate(logprobs, 0.5, 2).exp().tolist() == pytest.approx([1, 0, 0, 0])
    assert truncate(logprobs, 1e-9, 0).exp().tolist() == pytest.approx([1, 0, 0, 0])


def test_of_equally_likely_tokens_the_lower_ids_stay() -> None:
    assert truncate(torch.zeros(5).log_softmax(-1), 1.0, 2).exp().tolist() == pytest.approx([0.5, 0.5, 0, 0, 0])


def test_rows_with_other_parameters_do_not_change_a_row() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 40)
    noise = [0.3, 0.6, 0.9]
    kinds = [
        SamplingParams(max_tokens=1, temperature=0.0),
        SamplingParams(max_tokens=1, temperature=0.7, top_k=5),
        SamplingParams(max_tokens=1),
    ]
    together = sample(logits, SamplingPlan.of(kinds, CPU), noise)
    for row, params in enumerate(kinds):
        ids, logprobs = sample(logits[row : row + 1], SamplingPlan.of([params], CPU), noise[row : row + 1])
        assert int(ids[0]) == int(together[0][row])
        assert float(logprobs[0]) == pytest.approx(float(together[1][row]), abs=1e-6)


def test_frequencies_follow_the_distribution() -> None:
    probs = torch.tensor([0.1, 0.6, 0.3])
    noise = uniforms(11, 20_000)
    plan = SamplingPlan.of([SamplingParams(max_tokens=1)] * len(noise), CPU)
    ids, _ = sample(probs.log().expand(len(noise), 3), plan, noise)
    counts = torch.bincount(ids, minlength=3) / len(noise)
    assert counts.tolist() == pytest.approx(probs.tolist(), abs=0.01)


def test_noise_of_a_position_depends_on_seed_and_position_alone() -> None:
    assert uniforms(3, 100)[:10] == uniforms(3, 10)
    assert uniforms(3, 10) != uniforms(4, 10)
    assert uniforms(None, 10) != uniforms(None, 10)
    assert uniforms(-1, 3) == uniforms(2**128 - 1, 3)


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), -1.0])
def test_temperatures_without_a_distribution_are_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match="0 is greedy"):
        check_params(SamplingParams(max_tokens=1, temperature=temperature))

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.trainer.algorithms import AlgorithmConfig, get_policy_loss, list_policy_losses

T = torch.tensor
CONFIG = AlgorithmConfig(dro_beta=0.1, clip_cov_ratio=0.3, kl_cov_ratio=0.3, clip_cov_low=0.0)


def run(name: str, **inputs: Any) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient by log_prob, metrics; one row of tokens unless given otherwise."""
    log_prob = inputs.pop("log_prob").clone().requires_grad_()
    arguments: dict[str, Any] = {
        "old_log_prob": torch.full_like(log_prob, -1.0).detach(),
        "advantages": torch.ones_like(log_prob).detach(),
        "response_mask": torch.ones_like(log_prob).detach(),
        "loss_agg_mode": None,
        "config": CONFIG,
        **inputs,
    }
    loss, metrics = get_policy_loss(name)(log_prob=log_prob, **arguments)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert not any(isinstance(m, Tensor) and m.requires_grad for m in metrics.values())
    return loss.item(), gradient, {k: float(v) for k, v in metrics.items()}


@pytest.mark.parametrize("name", list_policy_losses())
@pytest.mark.parametrize("placeholder", [0.0, 1.0, math.nan, math.inf, -math.inf, 1e30])
def test_masked_positions_contribute_nothing_whatever_they_hold(name: str, placeholder: float) -> None:  # B9
    keep = T([0, 1, 4])
    mask = T([[1, 1, 0, 0, 1], [1, 1, 0, 0, 1]])
    old = T([[-1.0, -1.2, placeholder, placeholder, -0.7], [-2.0, -1.0, placeholder, placeholder, -0.5]])
    new = T([[-0.6, -1.5, placeholder, -1.0, -0.8], [-1.0, -1.0, -1.0, placeholder, -0.6]])
    advantages = T([[1.0, 1.0, placeholder, 7.0, 1.0], [-0.5, -0.5, 7.0, placeholder, -0.5]])
    loss, gradient, metrics = run(name, log_prob=new, old_log_prob=old, advantages=advantages, response_mask=mask)
    short = run(
        name,
        log_prob=new[:, keep],
        old_log_prob=old[:, keep],
        advantages=advantages[:, keep],
        response_mask=mask[:, keep],
    )
    assert loss == pytest.approx(short[0], rel=1e-6)
    assert metrics == pytest.approx(short[2], rel=1e-6)
    torch.testing.assert_close(gradient[:, keep], short[1])
    assert gradient[:, 2:4].abs().max() == 0.0
    assert metrics["nonfinite_fraction"] == 0.0


def test_ratio_of_untouched_policy_is_one_even_with_wrong_placeholders() -> None:  # B9
    # A placeholder of 1.0 in place of 0.0 on tool tokens would give a ratio of e^-1 there.
    _, _, metrics = run(
        "vanilla",
        log_prob=T([[-0.5, -0.5, 0.0, 0.0, -0.5]]),
        old_log_prob=T([[-0.5, -0.5, 1.0, 1.0, -0.5]]),
        response_mask=T([[1, 1, 0, 0, 1]]),
    )
    assert metrics["ratio_mean"] == 1.0
    assert metrics["approx_kl"] == 0.0


@pytest.mark.parametrize("name", list_policy_losses())
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["log_prob", "old_log_prob", "advantages", "rollout_is_weights"])
def test_a_model_token_that_is_not_finite_is_left_out_and_counted(name: str, bad: float, where: str) -> None:
    inputs = {
        "log_prob": T([[-0.6, -1.5, -0.8, -0.9]]),
        "old_log_prob": T([[-1.0, -1.2, -0.7, -0.9]]),
        "advantages": T([[1.0, -1.0, 1.0, 0.5]]),
        "rollout_is_weights": T([[1.0, 0.5, 1.0, 1.0]]),
    }
    inputs[where] = inputs[where].index_fill(1, T([1]), bad)
    loss, gradient, metrics = run(name, **inputs)
    assert math.isfinite(loss)
    assert gradient.isfinite().all()
    assert gradient[0, 1] == 0.0
    assert all(math.isfinite(m) for m in metrics.values())
    assert metrics["nonfinite_fraction"] == 0.25


@pytest.mark.parametrize("name", list_policy_losses())
@pytest.mark.parametrize("gap", [-1000.0, 1000.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_extreme_ratios_stay_finite(name: str, gap: float, advantage: float) -> None:
    loss, gradient, _ = run(name, log_prob=T([[-1.0 + gap, -1.0]]), advantages=torch.full((1, 2), advantage))
    assert math.isfinite(loss)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", list_policy_losses())
def test_a_micro_batch_without_model_tokens_gives_zero(name: str) -> None:
    loss, gradient, metrics = run(name, log_prob=torch.full((2, 3), -1.0), response_mask=torch.zeros(2, 3))
    assert loss == 0.0
    assert gradient.abs().max() == 0.0
    assert set(metrics.values()) == {0.0}


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient"),
    [
        (0.0, 1.0, -1.0, -1.0),
        (math.log(1.5), 1.0, -1.28, 0.0),  # clipped from above
        (math.log(0.5), 1.0, -0.5, -0.5),  # a lower ratio is not clipped where A > 0
        (math.log(0.5), -1.0, 0.8, 0.0),  # clipped from below
        (math.log(2.0), -1.0, 2.0, 2.0),
        (math.log(5.0), -1.0, 3.0, 0.0),  # dual clip
    ],
)
def test_vanilla_clips(log_ratio: float, advantage: float, loss: float, gradient: float) -> None:
    value, slope, _ = run("vanilla", log_prob=T([[-1.0 + log_ratio]]), advantages=T([[advantage]]))
    assert value == pytest.approx(loss, rel=1e-5)
    assert slope.item() == pytest.approx(gradient, rel=1e-5)


def test_vanilla_reports_what_it_clipped() -> None:
    ratios = T([[1.0, 1.5, 0.5, 5.0]])
    _, _, metrics = run("vanilla", log_prob=-1.0 + ratios.log(), advantages=T([[1.0, 1.0, -1.0, -1.0]]))
    assert metrics["clip_fraction"] == 0.5
    assert metrics["clip_fraction_lower"] == 0.25
    assert metrics["ratio_mean"] == pytest.approx(2.0)
    assert metrics["approx_kl"] == pytest.approx(-math.log(1.5 * 0.5 * 5.0) / 4)


def test_gspo_uses_one_ratio_for_the_row_and_the_published_aggregation() -> None:
    gap = T([[0.1, -0.1, 0.15, 0.0], [0.2, 0.0, 0.0, 0.0]])
    mask = T([[1, 1, 1, 0], [1, 0, 0, 0]])
    loss, gradient, _ = run("gspo", log_prob=-1.0 + gap, response_mask=mask)
    s = [math.exp(0.15 / 3), math.exp(0.2)]
    assert loss == pytest.approx(-(s[0] + s[1]) / 2, rel=1e-5)
    torch.testing.assert_close(gradient, -T([[s[0] / 3] * 3 + [0.0], [s[1], 0.0, 0.0, 0.0]]) / 2)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    _, gradient, metrics = run("cispo", log_prob=-1.0 + T([[2.0, 0.5]]).log())
    torch.testing.assert_close(gradient, T([[-1.28 / 2, -0.8 / 2]]))
    assert metrics["clip_fraction"] == 1.0


def test_sapo_gate_is_soft_and_softer_for_positive_advantages() -> None:
    loss, gradient, _ = run("sapo", log_prob=T([[-1.0, -1.0]]), advantages=T([[1.0, -1.0]]))
    assert loss == pytest.approx((-2.0 + 2.0 / 1.05) / 2, rel=1e-5)
    torch.testing.assert_close(gradient, T([[-0.5, 0.5]]))  # at ratio 1 the slope is A, whatever tau
    _, far, _ = run("sapo", log_prob=T([[-1.0 + math.log(5.0)]]))
    assert -1.0 < far.item() < 0.0


def test_dro_needs_a_positive_beta() -> None:
    for beta in (None, 0.0, -1.0):
        with pytest.raises(ConfigError, match="dro_beta"):
            run("dro", log_prob=T([[-1.0]]), config=AlgorithmConfig(dro_beta=beta))


def test_kl_cov_penalises_the_tokens_of_highest_covariance() -> None:
    inputs = {
        "log_prob": T([[-0.1, -3.0, -1.0, -1.0]]),
        "old_log_prob": T([[-0.6, -3.0, -1.0, -1.0]]),
        "advantages": T([[2.0, 1.0, 0.0, -1.0]]),
    }
    config = AlgorithmConfig(kl_cov_ratio=0.25, kl_cov_coef=2.0)
    loss, _, metrics = run("kl_cov", **inputs, config=config)
    without, _, none = run("kl_cov", **inputs, config=AlgorithmConfig(kl_cov_ratio=0.0))
    assert loss - without == pytest.approx(2.0 * 0.5 / 4, rel=1e-5)
    assert (metrics["penalty_fraction"], none["penalty_fraction"]) == (0.25, 0.0)


def test_clip_cov_takes_out_only_candidates_and_is_seeded() -> None:
    torch.manual_seed(3)
    log_prob, advantages = -torch.rand(4, 50) * 3, torch.randn(4, 50)
    config = AlgorithmConfig(clip_cov_ratio=0.05, clip_cov_low=0.2, clip_cov_high=2.0)
    inputs = {"log_prob": log_prob, "old_log_prob": log_prob, "advantages": advantages}
    _, gradient, metrics = run("clip_cov", **inputs, config=config)
    out = gradient == 0.0
    covariance = (advantages - advantages.mean()) * (log_prob - log_prob.mean())
    assert int(out.sum()) == 10
    assert metrics["clip_fraction"] == pytest.approx(0.05)
    assert bool(((covariance[out] > 0.2) & (covariance[out] < 2.0)).all())

    assert torch.equal(run("clip_cov", **inputs, config=config)[1], gradient)
    other = run("clip_cov", **inputs, config=config.model_copy(update={"seed": 1}))[1]
    assert not torch.equal(other, gradient)
    order = T([2, 0, 3, 1])
    permuted = run("clip_cov", **{k: v[order] for k, v in inputs.items()}, config=config)[1]
    assert torch.equal(permuted, gradient[order])


def test_clip_cov_without_a_candidate_is_the_clipped_loss() -> None:
    inputs = {"log_prob": T([[-1.0, -0.9]]), "advantages": T([[1.0, 0.5]])}
    loss, _, _ = run("clip_cov", **inputs, config=AlgorithmConfig(clip_cov_low=100.0, clip_cov_high=200.0))
    assert loss == pytest.approx(run("vanilla", **inputs)[0])


@pytest.mark.parametrize("name", list_policy_losses())
def test_zero_weights_switch_tokens_off(name: str) -> None:
    weights = T([[0.0, 0.0, 1.0]])
    _, gradient, _ = run(name, log_prob=T([[-0.9, -1.1, -1.0]]), rollout_is_weights=weights)
    if name == "geo_mean":  # there a weight belongs to the whole row
        assert gradient.abs().max() < 1e-6
    else:
        assert gradient[0, :2].abs().max() == 0.0
        assert gradient[0, 2].abs() > 0.0

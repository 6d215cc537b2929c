from __future__ import annotations

import math

import pytest
import torch

from agentgym.errors import ConfigError
from agentgym.trainer.algorithms import sampled_log_probs

T = torch.tensor


def test_temperature_divides_the_logits() -> None:  # C14
    log_prob, entropy = sampled_log_probs(T([2.0, 0.0]), T(0), 0.5)
    assert float(log_prob) == pytest.approx(-0.0181499, abs=1e-7)
    p = 1 / (1 + math.exp(-4.0))
    assert float(entropy) == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), rel=1e-5)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperature_of_zero_or_below_is_refused(temperature: float) -> None:  # C14
    with pytest.raises(ConfigError, match="temperature"):
        sampled_log_probs(T([2.0, 0.0]), T(0), temperature)


def test_equals_torch_and_has_its_gradient() -> None:
    torch.manual_seed(0)
    logits, ids = torch.randn(2, 3, 7, requires_grad=True), torch.randint(7, (2, 3))
    log_prob, entropy = sampled_log_probs(logits, ids, 0.7)
    log_softmax = torch.log_softmax(logits / 0.7, -1)
    expected = log_softmax.gather(-1, ids[..., None])[..., 0]
    expected_entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    torch.testing.assert_close(log_prob, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    actual = torch.autograd.grad((log_prob + entropy).sum(), logits, retain_graph=True)[0]
    wanted = torch.autograd.grad((expected + expected_entropy).sum(), logits)[0]
    torch.testing.assert_close(actual, wanted)


def test_forbidden_tokens_leave_entropy_and_gradient_finite() -> None:
    logits = T([[1.0, -math.inf, 1.0]], requires_grad=True)
    log_prob, entropy = sampled_log_probs(logits, T([0]), 1.0)
    (gradient,) = torch.autograd.grad((log_prob + entropy).sum(), logits)
    assert entropy.item() == pytest.approx(math.log(2))
    assert gradient.isfinite().all()


def test_half_precision_logits_are_widened() -> None:
    log_prob, _ = sampled_log_probs(T([2.0, 0.0], dtype=torch.bfloat16), T(0), 1.0)
    assert log_prob.dtype == torch.float32
    assert float(log_prob) == pytest.approx(-0.1269280, abs=1e-7)

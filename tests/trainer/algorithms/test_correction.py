from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from agentgym.trainer.algorithms import (
    AlgorithmConfig,
    Corrected,
    get_policy_loss,
    masked_mean,
    rollout_correction,
)
from agentgym.trainer.algorithms.config import CorrectionConfig

T = torch.tensor


def correct(ratios: Any, mask: Any = None, **settings: Any) -> Corrected:
    """Trainer / engine ratios per token, with an engine log-prob of -1 everywhere."""
    ratio = T(ratios)
    mask = torch.ones_like(ratio) if mask is None else T(mask)
    return rollout_correction(-1.0 + ratio.log(), torch.full_like(ratio, -1.0), mask, CorrectionConfig(**settings))


def weights(result: Corrected) -> Tensor:
    assert result.weights is not None
    return result.weights


def test_token_weights_are_truncated_from_above() -> None:
    result = correct([[0.25, 1.0, 5.0]], weights="truncate", weight_high=2.0)
    torch.testing.assert_close(weights(result), T([[0.25, 1.0, 2.0]]))


def test_token_weights_outside_the_band_are_zeroed() -> None:
    result = correct([[0.25, 1.0, 1.5, 5.0]], weights="mask", weight_low=0.5, weight_high=2.0)
    torch.testing.assert_close(weights(result), T([[0.0, 1.0, 1.5, 0.0]]))


def test_sequence_weights_are_the_product_over_model_tokens() -> None:
    result = correct(
        [[1.5, 9.0, 0.8], [1.5, 1.5, 1.5]],
        [[1, 0, 1], [1, 1, 1]],
        weights="truncate",
        level="sequence",
        weight_high=2.0,
    )
    torch.testing.assert_close(weights(result), T([[1.2, 0.0, 1.2], [2.0, 2.0, 2.0]]))


def test_normalised_weights_have_a_masked_mean_of_one() -> None:
    mask = [[1, 1, 0, 1]]
    result = correct([[0.5, 1.0, 7.0, 1.5]], mask, weights="truncate", normalize=True)
    assert float(masked_mean(weights(result), T(mask))) == pytest.approx(1.0)
    assert weights(result)[0, 2] == 0.0
    all_zero = correct([[9.0, 9.0]], weights="mask", normalize=True)
    assert weights(all_zero).tolist() == [[0.0, 0.0]]


def test_no_weights_unless_asked_for() -> None:
    result = correct([[0.5, 1.0]])
    assert result.weights is None
    assert result.response_mask.tolist() == [[True, True]]


@pytest.mark.parametrize(
    ("rejection", "bounds", "kept"),
    [
        ("token_k1", (0.5, 2.0), [[1, 1, 0, 0], [1, 1, 1, 0]]),
        ("token_k2", (0.5, 0.3), [[1, 1, 0, 0], [1, 1, 1, 0]]),  # ln(2.5)^2 / 2 = 0.42
        ("token_k3", (0.5, 0.3), [[1, 1, 0, 0], [1, 1, 1, 0]]),  # 1.5 - ln 2.5 = 0.58
        ("seq_sum_k1", (0.5, 2.0), [[0, 0, 0, 0], [1, 1, 1, 0]]),  # 2.5 and 1.21
        ("seq_mean_k1", (0.5, 1.2), [[0, 0, 0, 0], [1, 1, 1, 0]]),  # 2.5^(1/3) = 1.36
        ("seq_max_k1", (0.5, 2.0), [[0, 0, 0, 0], [1, 1, 1, 0]]),
        ("seq_sum_k2", (0.5, 0.1), [[0, 0, 0, 0], [1, 1, 1, 0]]),
        ("seq_mean_k3", (0.5, 0.1), [[0, 0, 0, 0], [1, 1, 1, 0]]),
        ("seq_max_k3", (0.5, 1.0), [[1, 1, 1, 0], [1, 1, 1, 0]]),
        ("token_k1, seq_max_k3", (0.5, 2.0), [[1, 1, 0, 0], [1, 1, 1, 0]]),
    ],
)
def test_rejection_clears_the_response_mask_and_keeps_the_loss_mask(
    rejection: str, bounds: tuple[float, float], kept: list[list[int]]
) -> None:
    mask = [[1, 1, 1, 0], [1, 1, 1, 0]]
    result = correct(
        [[1.0, 1.0, 2.5, 50.0], [1.0, 1.1, 1.1, 50.0]],
        mask,
        rejection=rejection,
        rejection_low=(bounds[0],),
        rejection_high=(bounds[1],),
    )
    assert result.response_mask.int().tolist() == kept
    assert result.loss_mask.int().tolist() == mask
    assert result.metrics["rejected_fraction"] == pytest.approx(1 - sum(map(sum, kept)) / 6)


def test_every_criterion_has_its_own_bound() -> None:
    result = correct([[1.0, 2.5], [1.0, 9.0]], rejection="token_k1,seq_max_k3", rejection_high=(2.0, 1.0))
    assert result.response_mask.int().tolist() == [[1, 0], [0, 0]]


def test_rejected_tokens_keep_the_denominator_of_the_loss() -> None:
    result = correct([[1.0, 1.0, 1.0, 9.0]], rejection="token_k1")
    log_prob = torch.full((1, 4), -1.0)
    loss, _ = get_policy_loss("vanilla")(
        log_prob,
        log_prob,
        torch.ones(1, 4),
        result.response_mask,
        "token-mean",
        AlgorithmConfig(),
        loss_mask=result.loss_mask,
    )
    assert float(loss) == pytest.approx(-3 / 4)


def test_metrics_of_a_mismatch() -> None:
    result = correct([[2.0, 7.0, 0.5], [1.0, 1.0, 1.0]], [[1, 0, 1], [1, 1, 0]], weights="truncate", weight_high=10.0)
    log2 = math.log(2)
    assert result.metrics == pytest.approx(
        {
            "kl": 0.0,
            "k3": (2.0 + 0.5 - 2) / 4,
            "chi2_token": (4.0 + 0.25 + 1 + 1) / 4 - 1,
            "chi2_seq": 0.0,
            "ppl_ratio": 1.0,
            "ess": 1.125**2 / 1.5625,
            "logprob_gap_mean": log2 / 2,
            "logprob_gap_max": log2,
            "weight_mean": 1.125,
            "weight_max": 2.0,
            "rejected_fraction": 0.0,
        },
        abs=1e-6,
    )


def test_perplexity_ratio_is_above_one_where_the_trainer_is_less_sure() -> None:
    assert correct([[0.5, 0.5]]).metrics["ppl_ratio"] == pytest.approx(2.0)
    assert correct([[0.5, 0.5]]).metrics["kl"] == pytest.approx(math.log(2))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("garbage", [math.nan, -math.inf, 1e30])
def test_garbage_on_and_off_the_mask_stays_inside(level: str, garbage: float) -> None:
    config = CorrectionConfig(weights="truncate", level=level, normalize=True, rejection="seq_mean_k3")  # type: ignore[arg-type]
    old = T([[-1.0, garbage, -2.0], [-1.0, -3.0, garbage]])
    result = rollout_correction(old, torch.full((2, 3), -1.5), T([[1, 0, 1], [1, 1, 1]]), config)
    assert weights(result).isfinite().all()
    assert all(math.isfinite(m) for m in result.metrics.values())
    assert weights(result)[0, 1] == 0.0


def test_an_empty_batch_has_finite_metrics() -> None:
    result = rollout_correction(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3), CorrectionConfig())
    assert all(math.isfinite(m) for m in result.metrics.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rejection": "token_k4"}, "Did you mean 'token_k"),
        ({"rejection": "token_k1,seq_mean_k2", "rejection_high": (1.0, 2.0, 3.0)}, "3 rejection bounds"),
        ({"rejection": "token_k1", "rejection_low": (0.0,)}, "above 0"),
        ({"weights": "mask", "weight_low": 3.0}, "weight_low"),
    ],
)
def test_wrong_settings_are_found_when_parsed(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CorrectionConfig(**settings)

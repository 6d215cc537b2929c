from __future__ import annotations

import pickle

import pytest
import torch

from agentgym.trainer.algorithms import AlgorithmConfig, MetricMeans, get_policy_loss, list_policy_losses

SPLIT_DEPENDENT = {"clip_cov", "kl_cov"}


@pytest.mark.parametrize("name", sorted(set(list_policy_losses()) - SPLIT_DEPENDENT))
@pytest.mark.parametrize("ranks", [[[[0, 1, 2, 3]]], [[[0], [1, 2], [3]]], [[[3, 0]], [[1], [2]]]])
def test_logged_metrics_do_not_depend_on_the_split(name: str, ranks: list[list[list[int]]]) -> None:
    torch.manual_seed(1)
    old, new = -torch.rand(2, 4, 6) * 2
    advantages = torch.randn(4, 1).expand(4, 6)
    mask = (torch.rand(4, 6) < 0.6).float()
    mask[3] = 0.0
    loss_fn, config = get_policy_loss(name), AlgorithmConfig(dro_beta=0.1)
    _, whole = loss_fn(old, new, advantages, mask, None, config)
    logged = MetricMeans()
    for micro_batches in ranks:
        of_rank = MetricMeans()
        for rows in micro_batches:
            _, metrics = loss_fn(old[rows], new[rows], advantages[rows], mask[rows], None, config)
            of_rank.add(metrics, tokens=mask[rows].sum())
        logged.merge(pickle.loads(pickle.dumps(of_rank)))
    assert logged.result() == pytest.approx({k: float(v) for k, v in whole.items()}, rel=1e-5, abs=1e-7)


def test_means_weight_each_call_with_its_tokens() -> None:
    means = MetricMeans()
    means.add({"clip_fraction": 0.5}, tokens=2)
    means.add({"clip_fraction": torch.tensor(0.1), "extra": 1.0}, tokens=6)
    assert means.result() == pytest.approx({"clip_fraction": 0.2, "extra": 1.0})


def test_no_tokens_give_zero() -> None:
    means = MetricMeans()
    means.add({"clip_fraction": 0.0}, tokens=0)
    assert means.result() == {"clip_fraction": 0.0}

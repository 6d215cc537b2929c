"""What all policy losses share: safe inputs, the importance ratio, the metrics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentgym.trainer.algorithms.aggregation import Totals, aggregate_loss
from agentgym.trainer.algorithms.config import AlgorithmConfig, LossAggMode
from agentgym.trainer.algorithms.kl import LOG_RATIO_BOUND
from agentgym.trainer.algorithms.masked import masked_mean, select, working


@dataclass(frozen=True)
class Terms:
    """Inputs of a policy loss [B, T]: finite everywhere, zero where they do not count."""

    log_prob: Tensor
    advantages: Tensor
    log_ratio: Tensor
    """log_prob - old_log_prob, clamped to +-20."""
    ratio: Tensor
    """Its exponential; 1 where the mask is 0."""
    weights: Tensor | None
    mask: Tensor
    """bool: the response mask without tokens that hold a number that is not finite."""
    response_mask: Tensor
    """bool, as given; what metrics are means over."""

    @classmethod
    def of(
        cls, old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, weights: Tensor | None
    ) -> Terms:
        """Clean the arguments of a `PolicyLossFn`. No gradient reaches anything but ``log_prob``."""
        given = response_mask.bool()
        others = [working(x.detach()) for x in (old_log_prob, advantages, weights) if x is not None]
        mask = given & log_prob.detach().isfinite()
        for x in others:
            mask = mask & x.isfinite()
        old, advantages, *rest = (select(x, mask) for x in others)
        log_prob = select(working(log_prob), mask)
        log_ratio = (log_prob - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return cls(
            log_prob=log_prob,
            advantages=advantages,
            log_ratio=log_ratio,
            ratio=log_ratio.exp(),
            weights=rest[0] if rest else None,
            mask=mask,
            response_mask=given,
        )

    def aggregate(
        self,
        token_loss: Tensor,
        mode: LossAggMode,
        config: AlgorithmConfig,
        *,
        loss_mask: Tensor | None,
        totals: Totals | None,
    ) -> Tensor:
        """Weighted token losses [B, T] to one number, see `aggregate_loss`."""
        if self.weights is not None:
            token_loss = token_loss * self.weights
        return aggregate_loss(
            token_loss,
            self.mask,
            mode,
            loss_mask=self.response_mask if loss_mask is None else loss_mask,
            totals=totals,
            norm_length=config.norm_length,
        )

    def metrics(self, **more: Tensor) -> dict[str, Tensor]:
        """Means over the response mask of ``more`` [B, T], and the common ones: approx_kl, ratio_mean,
        nonfinite_fraction (tokens left out because a number on them is not finite)."""
        return {
            "approx_kl": self.mean(-self.log_ratio),
            "ratio_mean": self.mean(self.ratio),
            "nonfinite_fraction": self.mean(~self.mask, within=self.response_mask),
            **{name: self.mean(value) for name, value in more.items()},
        }

    def mean(self, value: Tensor, within: Tensor | None = None) -> Tensor:
        """Mean over the response mask, scalar without gradient."""
        value = select(value.detach().to(self.ratio.dtype), self.mask if within is None else within)
        return value.sum() / self.response_mask.sum().clamp(min=1)


def clip_ratio(ratio: Tensor, config: AlgorithmConfig) -> Tensor:
    """``clip(ratio, 1 - low, 1 + high)``."""
    return torch.clamp(ratio, 1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """[B] mean of x [B, T] over the masked positions of each row; 0 for an empty row."""
    return select(x, mask).sum(-1) / mask.sum(-1).clamp(min=1)


def covariances(terms: Terms) -> Tensor:
    """[B, T] ``(A - mean A)(lp - mean lp)`` of each token, means over the masked tokens; no gradient.

    By way of float64, so that equal covariances come out equal.
    """
    log_prob, advantages = terms.log_prob.detach().double(), terms.advantages.double()
    product = (advantages - masked_mean(advantages, terms.mask)) * (log_prob - masked_mean(log_prob, terms.mask))
    return product.to(terms.log_prob.dtype)


def by_covariance(terms: Terms, covariance: Tensor, candidates: Tensor) -> Tensor:
    """Flat positions of the candidates [B, T], lowest covariance first, ties by log-prob: row order cannot matter."""
    position = candidates.flatten().nonzero().squeeze(1)
    position = position[terms.log_prob.detach().flatten()[position].argsort(stable=True)]
    return position[covariance.flatten()[position].argsort(stable=True)]


def share_of(mask: Tensor, ratio: float) -> int:
    """Number of tokens that a ratio of the masked ones makes: at least one, unless the ratio or the mask is 0."""
    tokens = int(mask.sum())
    return max(1, int(tokens * ratio)) if tokens and ratio > 0 else 0


def marked(position: Tensor, like: Tensor) -> Tensor:
    """[B, T] bool, True at the flat positions."""
    marks = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
    marks.view(-1)[position] = True
    return marks

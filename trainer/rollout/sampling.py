"""Sampling by inverse CDF from one uniform number per token, so that noise depends on (seed, position) alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from numpy.random import Generator as RandomGenerator
from numpy.random import Philox
from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.generation import SamplingParams


def check_params(params: SamplingParams) -> None:
    """Raise `ConfigError` for a value that no distribution has."""
    if params.max_tokens < 1:
        raise ConfigError(f"max_tokens={params.max_tokens}: ask for at least 1 token, or do not ask at all")
    if not 0.0 <= params.temperature < float("inf"):
        raise ConfigError(f"temperature={params.temperature}: expected a finite number >= 0 (0 is greedy)")
    if not 0.0 < params.top_p <= 1.0:
        raise ConfigError(f"top_p={params.top_p}: expected 0 < top_p <= 1 (1 is off)")
    if params.top_k < 0:
        raise ConfigError(f"top_k={params.top_k}: expected >= 0 (0 is off)")


def uniforms(seed: int | None, count: int) -> list[float]:
    """The noise of one request: ``count`` numbers in [0, 1); number t is the same for every ``count`` > t.

    ``None`` draws from the operating system's entropy.
    """
    bits = Philox() if seed is None else Philox(key=seed % 2**128)
    noise: list[float] = RandomGenerator(bits).random(count).tolist()
    return noise


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The sampling parameters of B rows as tensors; made when the rows change, used at every step."""

    temperature: Tensor | None
    """[B, 1] float32, 1 where greedy; None where all are 1."""
    greedy: Tensor | None
    """[B] bool; None where no row is greedy."""
    truncated: Sequence[tuple[int, float, int]]
    """(row, top_p, top_k) of the rows whose distribution is cut."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> SamplingPlan:
        """The plan for these rows, in this order."""
        greedy = [p.temperature == 0.0 for p in params]
        temperature = [1.0 if p.temperature == 0.0 else p.temperature for p in params]
        return cls(
            temperature=None
            if all(t == 1.0 for t in temperature)
            else torch.tensor(temperature, dtype=torch.float32, device=device)[:, None],
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            truncated=[
                (row, p.top_p, p.top_k)
                for row, p in enumerate(params)
                if p.temperature > 0.0 and (p.top_p < 1.0 or p.top_k > 0)
            ],
        )


def sample(logits: Tensor, plan: SamplingPlan, noise: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Sample one token a row.

    Every operation is per row: what else is in the batch does not matter, given the logits.

    Args:
        logits: [B, V] of any float type; taken to float32.
        plan: the parameters of the B rows.
        noise: B uniform numbers in [0, 1).

    Returns:
        ids [B] int64 and log-probs [B] float32: natural log under the distribution that was sampled, which is
        ``softmax(logits / temperature)``, renormalised over what top-k and then top-p leave; of a greedy row under
        ``softmax(logits)``.
    """
    logits = logits.float()
    logprobs = torch.log_softmax(logits if plan.temperature is None else logits / plan.temperature, dim=-1)
    for row, top_p, top_k in plan.truncated:
        logprobs[row] = truncate(logprobs[row], top_p, top_k)
    if plan.greedy is not None and bool(plan.greedy.all()):
        ids = logits.argmax(dim=-1)
    else:
        ids = _inverse_cdf(logprobs, torch.tensor(noise, dtype=torch.float64, device=logits.device))
        if plan.greedy is not None:
            ids = torch.where(plan.greedy, logits.argmax(dim=-1), ids)
    return ids, logprobs.gather(-1, ids[:, None])[:, 0]


def truncate(logprobs: Tensor, top_p: float, top_k: int) -> Tensor:
    """Log-probs [V] over the ``top_k`` likeliest tokens (0: all), then over the fewest whose sum reaches ``top_p``.

    Renormalised; what is cut has -inf. Of equally likely tokens the lower id goes first. At least one token stays.
    """
    ordered, order = torch.sort(logprobs, descending=True, stable=True)
    if 0 < top_k < len(ordered):
        ordered, order = torch.log_softmax(ordered[:top_k], dim=-1), order[:top_k]
    if top_p < 1.0:
        probs = ordered.double().exp()
        before = probs.cumsum(0) - probs
        keep = before < top_p
        keep[0] = True
        order = order[keep]
    cut = torch.full_like(logprobs, float("-inf"))
    cut[order] = torch.log_softmax(logprobs[order], dim=-1)
    return cut


def _inverse_cdf(logprobs: Tensor, noise: Tensor) -> Tensor:
    """The first token [B] whose cumulative probability exceeds the noise [B]; never one of probability 0."""
    cdf = torch.cumsum(logprobs.exp(), dim=-1, dtype=torch.float64)
    total = cdf[:, -1:]
    # The product may round up to the total, beyond which no token lies.
    target = torch.minimum(noise[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    # The clamp matters for NaN alone, which the caller finds in the log-probs.
    return torch.searchsorted(cdf, target, right=True)[:, 0].clamp_(max=cdf.shape[-1] - 1)

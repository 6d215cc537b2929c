"""Log-probs and entropies of the distribution that was sampled from."""

from __future__ import annotations

import torch
from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.trainer.algorithms.masked import select, working


def sampled_log_probs(logits: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob of each token and entropy of its distribution, ``softmax(logits / temperature)``.

    Args:
        logits: [..., V].
        token_ids: [...] int64.
        temperature: the rollout's, above 0.

    Returns:
        log_prob, entropy: [...] in float32 or better, in nats.

    Raises:
        ConfigError: temperature of 0 or below: greedy rollouts have no log-probs to train on.
    """
    if not temperature > 0:
        raise ConfigError(f"temperature is {temperature}; training needs one above 0, e.g. rollout.temperature=1")
    logits = working(logits) / temperature
    log_norm = logits.logsumexp(-1)
    log_prob = logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) - log_norm
    # A logit of -inf (a forbidden token) has probability 0 and must not turn the product into NaN.
    expected = (torch.softmax(logits, -1) * select(logits, logits.isfinite())).sum(-1)
    return log_prob, log_norm - expected

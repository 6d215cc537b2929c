"""Statistics over masked positions. What stands at the other positions never matters, NaN and inf included.

A masked-in value that is not finite counts as masked out.
"""

from __future__ import annotations

import torch
from torch import Tensor

WHITEN_EPS = 1e-8


def working(x: Tensor) -> Tensor:
    """``x`` in float32, or in float64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()


def select(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` where the mask holds, 0 elsewhere; unlike a product it also removes NaN and inf, from the gradient too."""
    return torch.where(mask.bool(), x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """``sum(v*m) / sum(m)``, scalar; 0 if nothing is masked in."""
    values = working(values)
    mask = mask.bool() & values.isfinite()
    return select(values, mask).sum() / mask.sum().clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance (n - 1) of the masked positions, scalar; 0 for fewer than two.

    Two passes: a one-pass formula can come out negative.
    """
    values = working(values)
    mask = mask.bool() & values.isfinite()
    centred = select(values - masked_mean(values, mask), mask)
    return centred.square().sum() / (mask.sum() - 1).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """``(v - mean) * rsqrt(var + 1e-8)`` at masked positions, 0 elsewhere; zeros for fewer than two."""
    values = working(values)
    mask = mask.bool() & values.isfinite()
    return torch.zeros_like(values).masked_scatter(mask, whiten(values[mask]))


def whiten(x: Tensor) -> Tensor:
    """``(x - mean) * rsqrt(var + 1e-8)`` of finite x [N]; zeros for N < 2.

    In float64: values that are equal up to rounding would otherwise be blown up by the small epsilon.
    """
    if x.numel() < 2:
        return torch.zeros_like(x)
    wide = x.double()
    centred = wide - wide.mean()
    var = torch.dot(centred, centred) / (x.numel() - 1)
    return (centred * torch.rsqrt(var + WHITEN_EPS)).to(x.dtype)

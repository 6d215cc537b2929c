"""From token losses to one number, the same for every split over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from agentgym.errors import ConfigError, did_you_mean
from agentgym.trainer.algorithms.config import LossAggMode
from agentgym.trainer.algorithms.masked import select, working


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of a whole mini-batch, over all ranks and micro-batches: the denominators of its losses.

    Example:
        ``Totals.of(loss_mask)`` on each rank, then added up over the ranks (``a + b``, or an all-reduce of the fields).
    """

    tokens: int
    """Tokens in the loss mask."""
    rows: int
    """Rows with at least one such token; padding rows have none."""

    @classmethod
    def of(cls, mask: Tensor) -> Totals:
        """Counts of one mask [B, T]."""
        mask = mask.bool()
        return cls(tokens=int(mask.sum()), rows=int(mask.any(-1).sum()))

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.tokens + other.tokens, self.rows + other.rows)


def aggregate_loss(
    loss: Tensor,
    mask: Tensor,
    mode: LossAggMode,
    *,
    loss_mask: Tensor | None = None,
    totals: Totals | None = None,
    norm_length: int | None = None,
) -> Tensor:
    """One number from token losses.

    ========================  =====================================================================
    ``token-mean``            sum / tokens
    ``token-sum``             sum
    ``seq-mean-token-sum``    sum of each row, mean over rows
    ``seq-mean-token-mean``   mean of each row over its tokens, mean over rows
    ``seq-mean-token-sum-norm``  sum of each row / ``norm_length``, mean over rows
    ========================  =====================================================================

    Tokens and rows are those of ``totals``. Then the result is this call's **share**: the sum of the shares, and of
    their gradients, over any split of the mini-batch's rows into micro-batches and ranks is the loss of the whole.
    Nothing here knows the number of ranks. A caller whose all-reduce *sums* gradients does nothing more; one whose
    all-reduce *averages* them (FSDP's default) multiplies the loss by the number of ranks. Neither divides by the
    number of micro-batches.

    Args:
        loss: [B, T], ignored outside the mask (NaN and inf there do no harm).
        mask: [B, T], tokens that contribute.
        mode: one of the above.
        loss_mask: [B, T], tokens that the denominators count (per row too); None: ``mask``. Differs from ``mask``
            where tokens were rejected: they stop contributing but still count.
        totals: denominators of the mini-batch; None: this call is the whole mini-batch.
        norm_length: fixed divisor, usually the maximum response length; the width of the tensor would make padding
            matter.

    Returns:
        Scalar in float32 or better; 0 with a graph if nothing contributes. A token loss that is not finite is left out.

    Raises:
        ConfigError: unknown mode, or ``norm_length`` missing where it is needed.
    """
    if mode not in get_args(LossAggMode):
        known = get_args(LossAggMode)
        raise ConfigError(f"unknown loss_agg_mode {mode!r}.{did_you_mean(str(mode), known)} Known: {', '.join(known)}")
    loss = working(loss)
    row_loss = select(loss, mask.bool() & loss.isfinite()).sum(-1)
    if mode == "token-sum":
        return row_loss.sum()
    counted = (mask if loss_mask is None else loss_mask).bool()
    totals = totals or Totals.of(counted)
    if mode == "token-mean":
        return row_loss.sum() / max(totals.tokens, 1)
    rows = max(totals.rows, 1)
    if mode == "seq-mean-token-sum":
        return row_loss.sum() / rows
    if mode == "seq-mean-token-mean":
        return (row_loss / counted.sum(-1).clamp(min=1)).sum() / rows
    if norm_length is None:
        raise ConfigError(
            "loss_agg_mode 'seq-mean-token-sum-norm' divides by a fixed length, but norm_length is None; "
            "set algo.norm_length, e.g. to the maximum response length"
        )
    return row_loss.sum() / norm_length / rows


def whole_row_mean(row_loss: Tensor, mask: Tensor, loss_mask: Tensor | None, totals: Totals | None) -> Tensor:
    """Mean over rows of a loss per row [B], with the denominators of `aggregate_loss`."""
    totals = totals or Totals.of(mask if loss_mask is None else loss_mask)
    return select(row_loss, mask.bool().any(-1) & row_loss.isfinite()).sum() / max(totals.rows, 1)

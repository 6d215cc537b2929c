"""Settings of the algorithms: the only place where their defaults stand. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentgym.errors import did_you_mean

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLKind = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]
Correction = Literal["none", "truncate", "mask"]
CorrectionLevel = Literal["token", "sequence"]


class Section(BaseModel):
    """A frozen settings model that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class Criterion:
    """One rejection criterion, e.g. ``seq_mean_k1`` with its bounds."""

    reduce: str
    """``token``: per token; ``sum``, ``mean``, ``max`` over the tokens of a row."""
    kind: str
    """``k1``, ``k2`` or ``k3`` of the log-ratio trainer / engine."""
    low: float
    high: float


REJECTIONS = {f"token_{kind}": ("token", kind) for kind in ("k1", "k2", "k3")} | {
    f"seq_{reduce}_{kind}": (reduce, kind) for reduce in ("sum", "mean", "max") for kind in ("k1", "k2", "k3")
}


class CorrectionConfig(Section):
    """Correction of the mismatch between the engine that sampled and the trainer that recomputes log-probs."""

    weights: Correction = Field(
        default="none",
        description="importance weights: truncated from above (TIS), or zeroed outside weight_low..weight_high",
    )
    level: CorrectionLevel = Field(default="token", description="one weight per token, or one per sequence")
    weight_high: float = Field(default=2.0, gt=0, description="upper bound of a weight")
    weight_low: float = Field(default=0.5, ge=0, description="lower bound, used by weights=mask only")
    normalize: bool = Field(default=False, description="scale the weights to a masked mean of 1")
    rejection: str | None = Field(
        default=None,
        description="comma-separated criteria that must all hold, e.g. 'seq_mean_k3,seq_max_k2'",
    )
    rejection_high: tuple[float, ...] = Field(
        default=(2.0,),
        description="per criterion, or one for all: upper bound of the estimate for k2 and k3, of the ratio "
        "trainer / engine (of its product, geometric mean or largest value over a row) for k1",
    )
    rejection_low: tuple[float, ...] = Field(
        default=(0.5,), description="per criterion, or one for all: lower bound of the ratio for k1"
    )

    @property
    def active(self) -> bool:
        """True if weights or a rejection are asked for."""
        return self.weights != "none" or self.rejection is not None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.weights == "mask" and self.weight_low > self.weight_high:
            raise ValueError(f"weight_low {self.weight_low} is above weight_high {self.weight_high}")
        self.criteria()
        return self

    def criteria(self) -> tuple[Criterion, ...]:
        """The rejection criteria; raises ValueError for an unknown name or a wrong number of bounds."""
        names = [] if self.rejection is None else [name.strip() for name in self.rejection.split(",")]
        for name in names:
            if name not in REJECTIONS:
                known = ", ".join(REJECTIONS)
                raise ValueError(f"unknown rejection {name!r}.{did_you_mean(name, REJECTIONS)} Known: {known}")
        low, high = (_per_name(bounds, len(names)) for bounds in (self.rejection_low, self.rejection_high))
        if min((*low, *high), default=1.0) <= 0:
            raise ValueError(f"rejection bounds must be above 0, got low {low} and high {high}")
        return tuple(Criterion(*REJECTIONS[n], lo, hi) for n, lo, hi in zip(names, low, high, strict=True))


def _per_name(bounds: tuple[float, ...], number: int) -> tuple[float, ...]:
    if len(bounds) == 1:
        return bounds * number
    if len(bounds) != number:
        raise ValueError(f"{len(bounds)} rejection bounds {bounds} for {number} criteria; give one, or one for each")
    return bounds


class FilterConfig(Section):
    """Dynamic sampling: groups whose rewards do not differ teach nothing and are replaced."""

    enabled: bool = Field(default=False, description="drop groups without reward spread and sample more")
    max_gen_batches: int = Field(default=3, ge=1, description="generation rounds per step, the first one included")
    when_exhausted: Literal["stop", "skip"] = Field(
        default="stop",
        description="too few groups after the last round: stop the run with counts, or log a skipped step",
    )


class OverlongConfig(Section):
    """Soft penalty for long responses (DAPO)."""

    enabled: bool = Field(default=False, description="shape the reward by the number of model tokens")
    max_length: int | None = Field(default=None, ge=1, description="model tokens; default: the maximum response length")
    buffer: int | None = Field(
        default=None,
        ge=1,
        description="the penalty grows over the last this many model tokens; default: a fifth of max_length",
    )
    factor: float = Field(default=1.0, ge=0, description="penalty at max_length")


class KLRewardConfig(Section):
    """KL penalty against the reference policy, subtracted from the token rewards."""

    coef: float = Field(default=0.0, ge=0, description="beta; 0 switches the penalty off")
    kind: KLKind = Field(default="k1", description="estimator")
    target: float | None = Field(default=None, gt=0, description="adapt beta towards this KL; None: beta is fixed")
    horizon: int = Field(default=10_000, ge=1, description="samples over which an adaptive beta reacts")


class KLLossConfig(Section):
    """KL penalty against the reference policy, added to the loss."""

    coef: float = Field(default=0.0, ge=0, description="weight; 0 switches the term off")
    kind: KLKind = Field(default="k3", description="estimator; a '+' takes the gradient of k2")


class AlgorithmConfig(Section):
    """What is optimised: estimator and policy loss are orthogonal choices."""

    advantage: str = Field(default="grpo", description="name of the advantage estimator")
    policy_loss: str = Field(default="vanilla", description="name of the policy loss")
    loss_agg_mode: LossAggMode | None = Field(
        default=None,
        description="how token losses become one number; default: the one the policy loss was published with",
    )
    norm_length: int | None = Field(
        default=None, ge=1, description="divisor of seq-mean-token-sum-norm; default: the maximum response length"
    )
    epochs: int = Field(default=1, ge=1, description="passes over the batch of a step")
    seed: int = Field(default=0, description="of random choices inside losses (clip_cov)")

    gamma: float = Field(default=1.0, ge=0, le=1, description="discount per model token")
    lam: float = Field(default=1.0, ge=0, le=1, description="lambda of GAE")
    whiten: bool = Field(default=True, description="whiten the advantages of gae and reinforce_plus_plus*")
    norm_by_std: bool = Field(default=True, description="divide by the standard deviation (False: Dr. GRPO)")

    clip_ratio_low: float = Field(default=0.2, ge=0, description="lower clip distance of the ratio")
    clip_ratio_high: float = Field(default=0.28, ge=0, description="upper clip distance of the ratio")
    clip_ratio_c: float = Field(
        default=3.0, gt=1, description="dual clip: bound of the ratio where the advantage is negative"
    )
    dro_beta: float | None = Field(default=None, description="quadratic penalty of dro, above 0; dro needs it")
    sapo_tau_positive: float = Field(default=1.0, gt=0, description="gate temperature of sapo, advantage above 0")
    sapo_tau_negative: float = Field(
        default=1.05, gt=0, description="gate temperature of sapo, advantage of 0 or below"
    )
    clip_cov_ratio: float = Field(default=2e-4, ge=0, le=1, description="fraction of tokens that clip_cov takes out")
    clip_cov_low: float = Field(default=1.0, description="clip_cov: lowest covariance of a candidate")
    clip_cov_high: float = Field(default=5.0, description="clip_cov: highest covariance of a candidate")
    kl_cov_ratio: float = Field(default=2e-4, ge=0, le=1, description="fraction of tokens that kl_cov penalises")
    kl_cov_coef: float = Field(default=1.0, ge=0, description="penalty weight of kl_cov")

    entropy_coef: float = Field(default=0.0, description="weight of the entropy bonus; 0 switches it off")
    value_clip: float = Field(default=0.2, gt=0, description="clip range of the critic's loss")
    turn_rewards: bool | None = Field(
        default=None,
        description="rewards stand at the end of the turn that earned them, not all at the end of the episode; "
        "default: where the advantage looks at turns (turn_level)",
    )
    mask_truncated: bool = Field(
        default=False, description="keep truncated rollouts out of the loss, not out of the baseline"
    )
    kl_reward: KLRewardConfig = KLRewardConfig()
    kl_loss: KLLossConfig = KLLossConfig()
    correction: CorrectionConfig = CorrectionConfig()
    filter_groups: FilterConfig = FilterConfig()
    overlong: OverlongConfig = OverlongConfig()
    extra_fields: tuple[str, ...] = Field(
        default=(),
        description="batch fields (or fields that loops, rewards or metrics leave on a rollout) that are handed to "
        "advantage and policy loss by name",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.policy_loss == "dro" and not (self.dro_beta is not None and self.dro_beta > 0):
            raise ValueError(
                f"dro_beta is {self.dro_beta!r}; policy_loss 'dro' needs a number above 0, e.g. dro_beta=0.1"
            )
        return self

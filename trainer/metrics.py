"""What a step measured, as one flat dict of numbers."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from agentgym.rollout import Rollout
from agentgym.trainer.batch import Batch
from agentgym.trainer.rollout.worker import RolloutReport


def of_rollouts(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Rewards, lengths, turns, tools and failures of a set of rollouts. Means are over those that have the value."""
    scored = [r for r in rollouts if r.reward is not None]
    played = [r for r in rollouts if r.segments]
    rewards = [r.reward for r in scored if r.reward is not None]
    values = {
        "reward/mean": mean(rewards),
        "reward/std": float(np.std(rewards)) if rewards else 0.0,
        "reward/group_std": mean(group_stds(scored)),
        "response_length/mean": mean(sum(s.num_model_tokens for s in r.segments) for r in played),
        "prompt_length/mean": mean(len(r.segments[0].prompt_ids) for r in played),
        "turns/mean": mean(r.outcome.num_turns for r in played),
        "tool/calls": mean(r.outcome.tool_calls for r in played),
        "tool/errors": mean(r.outcome.tool_errors for r in played),
        "parse/errors": mean(r.outcome.parse_errors for r in played),
        "rollout/truncated": float(sum(r.status.truncated for r in rollouts)),
        "rollout/failed": float(sum(r.status.failed for r in rollouts)),
        "rollout/retried": float(sum(r.attempts > 1 for r in rollouts)),
        "rollout/unscored": float(sum(r.reward is None and not r.status.failed for r in rollouts)),
    }
    kinds = Counter(r.outcome.error_type for r in rollouts if r.outcome.error_type is not None)
    values |= {f"errors/{kind}": float(n) for kind, n in kinds.items()}
    for name in sorted({name for r in scored for name in r.outcome.reward_components}):
        values[f"reward/component/{name}"] = mean(
            r.outcome.reward_components[name] for r in scored if name in r.outcome.reward_components
        )
    return values


def of_validation(report: RolloutReport) -> dict[str, float]:
    """Metrics of a validation, all under ``val/``."""
    values = of_rollouts(report.rollouts)
    solved = [r.reward >= 1.0 for r in report.rollouts if r.reward is not None]
    return {
        "val/reward_mean": values["reward/mean"],
        "val/pass@1": mean(solved),
        "val/tool_calls": values["tool/calls"],
        "val/tool_errors": values["tool/errors"],
        "val/parse_errors": values["parse/errors"],
        "val/turns": values["turns/mean"],
        "val/truncated": values["rollout/truncated"],
        "val/failed": values["rollout/failed"],
        "val/sessions_live": float(report.sessions_live),
    }


def of_step(
    report: RolloutReport, batch: Batch, learned: Mapping[str, float], timings: Mapping[str, float], *, version: int
) -> dict[str, float]:
    """Everything a training step measured.

    Args:
        report: of the rollouts.
        batch: as it was learned from.
        learned: metrics of the update.
        timings: seconds by phase.
        version: of the weights that the update started from.
    """
    values = of_rollouts(report.rollouts) | dict(learned) | dict(timings)
    values |= {
        "sessions/live": float(report.sessions_live),
        "sessions/opened": float(report.sessions_opened),
        "sessions/closed": float(report.sessions_closed),
        "memory/driver_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "throughput/tokens_per_s": model_tokens(report.rollouts) / max(timings["time/step_s"], 1e-9),
    }
    values |= {f"engine/{name}": value for name, value in report.engine.items()}
    if len(batch) > 0:
        mask = batch["response_mask"]
        versions = batch["weight_version"]
        advantages, returns = batch["advantages"][mask], batch["returns"][mask]
        values |= {
            "advantage/mean": float(advantages.mean()) if len(advantages) else 0.0,
            "advantage/std": float(advantages.std(correction=0)) if len(advantages) else 0.0,
            "return/mean": float(returns.mean()) if len(returns) else 0.0,
            "return/std": float(returns.std(correction=0)) if len(returns) else 0.0,
            "version/lag": float(version - int(versions.min())),
        }
    return values


def with_training_fields(rollouts: Sequence[Rollout], batch: Batch) -> list[tuple[Rollout, dict[str, Any]]]:
    """Each rollout with what the trainer made of its segments: advantages, and masks before and after rejection."""
    extras: list[dict[str, Any]] = [{"training": []} for _ in rollouts]
    if len(batch) > 0:
        lengths = batch["response_length"].tolist()
        advantages = batch["advantages"].tolist()
        after = batch["response_mask"].int().tolist()
        for row, rollout in enumerate(batch["rollout"].tolist()):
            segment = {
                "advantages": [round(a, 6) for a in advantages[row][: lengths[row]]],
                "response_mask_after": after[row][: lengths[row]],
            }
            extras[rollout]["training"].append(segment)
    return list(zip(rollouts, extras, strict=True))


def group_stds(scored: Sequence[Rollout]) -> list[float]:
    """Standard deviation of the rewards within each group of at least two."""
    groups: dict[str, list[float]] = {}
    for rollout in scored:
        if rollout.reward is not None:
            groups.setdefault(rollout.group, []).append(rollout.reward)
    return [float(np.std(rewards)) for rewards in groups.values() if len(rewards) > 1]


def model_tokens(rollouts: Sequence[Rollout]) -> int:
    """Tokens that the model sampled."""
    return sum(segment.num_model_tokens for rollout in rollouts for segment in rollout.segments)


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean; 0.0 of nothing."""
    listed = [float(v) for v in values]
    return sum(listed) / len(listed) if listed else 0.0

"""What a step measured, as one flat dict of numbers."""

from __future__ import annotations

import resource
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        "reward/length_correlation": length_correlation(scored),
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
        present = [r.outcome.reward_components.get(name) for r in scored]
        values[f"reward/component/{name}"] = mean(value for value in present if value is not None)
    for source, rows in _by(scored, lambda r: r.data_source).items():
        values[f"reward/source/{source}"] = mean(_rewards(rows))
    return values | of_environments(rollouts)


def of_environments(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What the environments of a mixture did, each by itself; nothing where there is one."""
    by_env = _by(rollouts, lambda r: r.env_id)
    if len(by_env) < 2:
        return {}
    values: dict[str, float] = {}
    for name, rows in by_env.items():
        played = [r for r in rows if r.segments]
        values |= {
            f"env/{name}/rollouts": float(len(rows)),
            f"env/{name}/reward_mean": mean(_rewards(rows)),
            f"env/{name}/response_length_mean": mean(sum(s.num_model_tokens for s in r.segments) for r in played),
            f"env/{name}/turns_mean": mean(r.outcome.num_turns for r in played),
            f"env/{name}/truncated": float(sum(r.status.truncated for r in rows)),
            f"env/{name}/failed": float(sum(r.status.failed for r in rows)),
        }
    return values


def length_correlation(rollouts: Sequence[Rollout]) -> float:
    """Pearson correlation of reward and model tokens over the scored rollouts; 0.0 where one of them is constant."""
    scored = [r for r in rollouts if r.reward is not None]
    rewards, lengths = _rewards(scored), [sum(s.num_model_tokens for s in r.segments) for r in scored]
    if len(set(rewards)) < 2 or len(set(lengths)) < 2:
        return 0.0
    return statistics.correlation(rewards, lengths)


def _rewards(rollouts: Iterable[Rollout]) -> list[float]:
    return [r.reward for r in rollouts if r.reward is not None]


def _by(rollouts: Iterable[Rollout], key: Callable[[Rollout], str]) -> dict[str, list[Rollout]]:
    """Rollouts by a name, in the order of the names; those without one are left out."""
    found: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        if key(rollout):
            found.setdefault(key(rollout), []).append(rollout)
    return dict(sorted(found.items()))


def of_validation(report: RolloutReport) -> dict[str, float]:
    """Metrics of a validation, all under ``val/``."""
    values = of_rollouts(report.rollouts)
    return {
        "val/reward_mean": values["reward/mean"],
        "val/pass@1": solved(report.rollouts),
        "val/tool_calls": values["tool/calls"],
        "val/tool_errors": values["tool/errors"],
        "val/parse_errors": values["parse/errors"],
        "val/turns": values["turns/mean"],
        "val/truncated": values["rollout/truncated"],
        "val/failed": values["rollout/failed"],
        "val/sessions_live": float(report.sessions_live),
        **_by_name(report.rollouts, lambda r: r.env_id, prefix="val"),
        **_by_name(report.rollouts, lambda r: r.data_source, prefix="val/source"),
    }


def solved(rollouts: Iterable[Rollout]) -> float:
    """Share of the scored rollouts with a reward of at least 1."""
    return mean(reward >= 1.0 for reward in _rewards(rollouts))


def _by_name(rollouts: Sequence[Rollout], key: Callable[[Rollout], str], *, prefix: str) -> dict[str, float]:
    """Validation reward for each of several environments or sources; nothing where there is one."""
    found = _by(rollouts, key)
    if len(found) < 2:
        return {}
    means = {f"{prefix}/{name}/reward_mean": mean(_rewards(rows)) for name, rows in found.items()}
    return means | {f"{prefix}/{name}/pass@1": solved(rows) for name, rows in found.items()}


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
    values["rollout/preempted"] = values.pop("engine/preemptions", 0.0)
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

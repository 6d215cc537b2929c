"""What was played for one training step, and what of it is learned from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentgym.rollout import Rollout
from agentgym.trainer.batch import Batch
from agentgym.trainer.rollout.worker import RolloutReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The rollouts of a step."""

    report: RolloutReport
    """Everything that was sampled, in the order it was asked for."""
    greedy: Sequence[Rollout] = ()
    """One greedy rollout for each prompt, whose score is the baseline of its samples (remax); not trained on."""
    groups: frozenset[str] | None = None
    """Groups that are learned from; None: all."""

    @classmethod
    def merge(cls, rounds: Sequence[Played]) -> Played:
        """Several rounds of generation as one."""
        reports = [played.report for played in rounds]
        rollouts = [rollout for report in reports for rollout in report.rollouts]
        return cls(
            report=RolloutReport.merge(reports, rollouts),
            greedy=[rollout for played in rounds for rollout in played.greedy],
        )

    def only(self, groups: Iterable[str]) -> Played:
        """The same, learning from these groups alone."""
        return replace(self, groups=frozenset(groups))

    def scores(self) -> list[tuple[str, list[float | None]]]:
        """Each group with the rewards of its rollouts, in the order played."""
        groups: dict[str, list[float | None]] = {}
        for rollout in self.report.rollouts:
            groups.setdefault(rollout.group, []).append(rollout.reward)
        return list(groups.items())

    def baselines(self, batch: Batch) -> Tensor:
        """[B] float32: score of the greedy rollout of each row's prompt; NaN where it has none."""
        scores = {rollout.group: rollout.reward for rollout in self.greedy}
        rewards = [scores.get(self.report.rollouts[i].group) for i in batch["rollout"].tolist()]
        return torch.tensor([float("nan") if r is None else r for r in rewards], dtype=torch.float32)

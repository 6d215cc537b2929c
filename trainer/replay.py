"""Recorded rollouts instead of an engine: the tool for comparing implementations of everything behind the rollout.

``agentgym train --config RUN/config.yaml trainer.replay=RUN`` learns in step n from what RUN recorded in its step n.
From the same weights that gives the same losses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from agentgym.errors import AgentGymError, ConfigError
from agentgym.rollout import Rollout
from agentgym.trainer.groups import ActorGroup
from agentgym.trainer.model import Vocabulary
from agentgym.trainer.played import Played
from agentgym.trainer.rollout.worker import RolloutReport
from agentgym.trainer.tracking import GREEDY, STEP, VOCABULARY, read_jsonl, recorded_steps


class Replay:
    """Stands in for the rollout workers.

    Args:
        run: folder of the recorded run.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.vocabulary: Vocabulary | None = None

    def check(self, vocabulary: Vocabulary) -> None:
        """Raise `ConfigError` where the token ids of the recorded run mean something else in this one."""
        self.vocabulary = vocabulary
        path = self.run / "rollouts" / VOCABULARY
        if not path.is_file():
            return
        recorded = Vocabulary(**json.loads(path.read_text()))
        if recorded.digest != vocabulary.digest:
            raise ConfigError(
                f"trainer.replay={self.run}: recorded with another tokenizer (digest {recorded.digest[:12]}) than this "
                f"model's ({vocabulary.digest[:12]}); replay with the model of that run"
            )

    def step(self, number: int) -> Played:
        """What was played for a step of the recorded run."""
        path, greedy = (self.run / "rollouts" / f"{name.format(number)}.jsonl" for name in (STEP, GREEDY))
        if not path.is_file():
            steps = recorded_steps(self.run)
            raise AgentGymError(
                f"trainer.replay={self.run}: step {number} was not recorded ({path.name} is missing); "
                f"it has {len(steps)} steps, the last is {max(steps, default=0)}"
            )
        report = RolloutReport(
            rollouts=self._read(path), sessions_opened=0, sessions_closed=0, sessions_live=0, engine={}
        )
        return Played(report=report, greedy=self._read(greedy) if greedy.is_file() else ())

    def _read(self, path: Path) -> list[Rollout]:
        own = {field.name for field in fields(Rollout)}
        rollouts = [Rollout.from_dict({k: v for k, v in row.items() if k in own}) for row in read_jsonl(path)]
        self._check_ids(rollouts, path)
        return rollouts

    def _check_ids(self, rollouts: Sequence[Rollout], path: Path) -> None:
        """Ids beyond the vocabulary would fail far from here."""
        ids = (max([*s.prompt_ids, *s.response_ids], default=0) for r in rollouts for s in r.segments)
        highest = max(ids, default=0)
        if self.vocabulary is not None and highest >= self.vocabulary.size:
            raise ConfigError(
                f"{path}: holds token id {highest}, but the model has {self.vocabulary.size} ids; "
                f"replay with the model of that run"
            )

    def sync_weights(self, actor: ActorGroup, version: int) -> None:
        """There is no engine to keep up to date."""

"""The fit loop: `Trainer.fit` reads like the algorithm; every line of a step is one named method below it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from agentgym.console import Progress
from agentgym.loops.base import derive_seed
from agentgym.rollout import Rollout
from agentgym.trainer import checkpoint, metrics
from agentgym.trainer.algorithms import get_advantage
from agentgym.trainer.batch import Batch, make_batch, mask_truncated, union
from agentgym.trainer.cluster import Interrupted
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.data import Draw, TaskSampler
from agentgym.trainer.failures import check_failures, check_prompts
from agentgym.trainer.groups import ActorGroup, ReferenceGroup, RolloutGroup
from agentgym.trainer.requests import training_requests, validation_requests
from agentgym.trainer.rollout.worker import RolloutReport
from agentgym.trainer.schedule import learning_rate
from agentgym.trainer.tracking import RunLog


class Trainer:
    """Learns from rollouts until the steps are done or a stop is asked for.

    Args:
        config: of the run.
        actor, rollout: the worker groups; ``reference`` where a KL to the model before training is asked for.
        sampler: of training tasks.
        val_task_ids: tasks of validation, played greedily.
        log: the record of the run.
        progress: what a person sees.
        stop: true once the run is asked to stop.
        total_steps: of the whole run.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        actor: ActorGroup,
        rollout: RolloutGroup,
        reference: ReferenceGroup | None,
        sampler: TaskSampler,
        val_task_ids: Sequence[str],
        log: RunLog,
        progress: Progress,
        stop: Callable[[], bool],
        total_steps: int,
    ) -> None:
        self.config = config
        self.actor = actor
        self.rollout = rollout
        self.reference = reference
        self.sampler = sampler
        self.val_task_ids = val_task_ids
        self.log = log
        self.progress = progress
        self.stop = stop
        self.total_steps = total_steps
        self.checkpoints = log.folder / "checkpoints"
        self.step = 0
        self.val_reward: float | None = None
        """Of the current weights; None where they were not validated."""
        self.best: tuple[float, int] | None = None
        """Best validation reward of a saved step, and that step."""
        self._timings: dict[str, float] = {}

    def fit(self) -> None:
        """Train from the current step to the last one.

        On a stop the step in progress is finished or abandoned, and the state after the last finished step is saved.
        """
        try:
            if self.step == 0 and self.config.trainer.val_before:
                self.record({}, self.validate(), [])
            while self.step < self.total_steps and not self.stop():
                self._timings = {}
                with self.timed("step"):
                    draws = self.sampler.next_batch()
                    report = self.generate(draws)
                    batch = make_batch(report.rollouts)
                    self.add_old_log_probs(batch)
                    self.add_reference_log_probs(batch)
                    self.add_advantages(batch)
                    learned = self.update_actor(batch)
                    self.sync_weights()
                self.step += 1
                validated = self.validate() if self.due(self.config.trainer.val_every) else {}
                values = metrics.of_step(report, batch, learned, self._timings, version=self.step - 1)
                self.record(values, validated, metrics.with_training_fields(report.rollouts, batch))
                if self.due(self.config.trainer.save_every):
                    self.save()
        except Interrupted:
            self.sampler.position = self.step
        if self.stop():
            self.save()

    # -- the steps of a step -------------------------------------------------------------------------------------

    def generate(self, draws: Sequence[Draw]) -> RolloutReport:
        """Play every drawn task ``rollout.n`` times with the current weights. Too many failures end the run."""
        self.progress.status("rollout")
        with self.timed("rollout"):
            report = self.rollout.generate(training_requests(self.config, draws, self.step), self.stop)
        self.check(report)
        return report

    def add_old_log_probs(self, batch: Batch) -> None:
        """Log-probs of the behaviour policy under the trainer's own forward pass.

        With a single optimizer step they equal the ones that the update computes anyway, and are taken from there.
        """
        single = self.config.algo.epochs == 1 and self.config.trainer.mini_batch_size is None
        if not single and len(batch) > 0:
            self.progress.status("log-probs")
            with self.timed("old_log_probs"):
                union(batch, {"old_log_probs": self.actor.log_probs(batch)})

    def add_reference_log_probs(self, batch: Batch) -> None:
        """Log-probs of the model before training, where a KL to it is asked for."""
        if self.reference is not None and len(batch) > 0:
            with self.timed("reference"):
                union(batch, {"ref_log_probs": self.reference.log_probs(batch)})

    def add_advantages(self, batch: Batch) -> None:
        """Advantages and returns of every model token; rows of masked truncations leave the loss afterwards."""
        algo = self.config.algo
        with self.timed("advantages"):
            advantages, returns = get_advantage(algo.advantage)(
                batch["token_level_rewards"],
                batch["response_mask"],
                batch["group"],
                valid=batch["valid"],
                rollout=batch["rollout"],
                config=algo,
            )
            union(batch, {"advantages": advantages, "returns": returns})
            if algo.mask_truncated:
                mask_truncated(batch)

    def update_actor(self, batch: Batch) -> dict[str, float]:
        """``algo.epochs`` passes over the batch in mini-batches of rollouts; nothing where nothing can be learned."""
        if len(batch) == 0:
            return {"actor/skipped_updates": 1.0}
        self.progress.status("update")
        with self.timed("update"):
            lr = learning_rate(self.config.trainer, self.step, self.total_steps)
            return self.actor.update(batch, list(self.mini_batches(batch)), lr)

    def mini_batches(self, batch: Batch) -> Iterator[list[int]]:
        """Rows of each mini-batch: whole rollouts, in a new random order in every epoch."""
        size = self.config.trainer.mini_batch_size
        rows_of: dict[int, list[int]] = {}
        for row, rollout in enumerate(batch["rollout"].tolist()):
            rows_of.setdefault(rollout, []).append(row)
        rollouts = list(rows_of)
        for epoch in range(self.config.algo.epochs):
            order = rollouts
            if size is not None:
                seed = derive_seed(self.config.trainer.seed, "mini-batches", self.step, epoch)
                order = [rollouts[i] for i in np.random.default_rng(seed).permutation(len(rollouts))]
            width = size if size is not None else len(order)
            for start in range(0, len(order), width):
                yield [row for rollout in order[start : start + width] for row in rows_of[rollout]]

    def sync_weights(self) -> None:
        """Give the engines the new weights; the version is the number of finished steps."""
        with self.timed("sync"):
            self.rollout.sync_weights(self.actor.weights(), self.step + 1)

    # -- around the steps ----------------------------------------------------------------------------------------

    def due(self, every: int) -> bool:
        """True at multiples of ``every`` and at the last step."""
        return self.step == self.total_steps or (every > 0 and self.step % every == 0)

    def validate(self) -> dict[str, float]:
        """Play the validation tasks greedily with the current weights."""
        if not self.val_task_ids:
            return {}
        self.progress.status("validation")
        with self.timed("validation"):
            report = self.rollout.generate(validation_requests(self.config, self.val_task_ids, self.step), self.stop)
        self.check(report)
        self.log.rollouts(f"validation-{self.step:06d}", report.rollouts)
        values = metrics.of_validation(report)
        self.val_reward = values["val/reward_mean"]
        return values | {"time/validation_s": self._timings["time/validation_s"]}

    def check(self, report: RolloutReport) -> None:
        """Raise where what was played must end the run."""
        check_failures(report.rollouts, self.config.trainer.max_failure_rate, first_step=self.step == 0)
        check_prompts(report.rollouts, self.config.rollout.max_prompt_length)

    def record(
        self,
        values: dict[str, float],
        validated: dict[str, float],
        rollouts: Sequence[tuple[Rollout, dict[str, object]]],
    ) -> None:
        """Write one step's metrics and rollouts, and show them."""
        if not validated:
            self.val_reward = None
        if rollouts:
            self.log.rollouts(f"step-{self.step:06d}", [r for r, _ in rollouts], [extra for _, extra in rollouts])
        self.log.metrics(self.step, values | validated)
        self.progress.update(self.step, values | validated)

    def save(self) -> None:
        """Write a checkpoint of the current state, unless it exists; then remove old ones."""
        self.progress.status("saving")
        state = {"step": self.step, "data_position": self.sampler.position, "val_reward": self.val_reward}
        checkpoint.save(self.checkpoints, self.step, state, self.actor.save)
        if self.val_reward is not None and (self.best is None or self.val_reward >= self.best[0]):
            self.best = (self.val_reward, self.step)
        checkpoint.clean(
            self.checkpoints,
            keep=self.config.trainer.keep_checkpoints,
            protect={self.best[1]} if self.best is not None else set(),
        )

    def resume(self, folder: Path) -> None:
        """Take over the state of a checkpoint; the actor has loaded its model already."""
        state = checkpoint.read_state(folder)
        self.step = state["step"]
        self.sampler.position = state["data_position"]
        self.val_reward = state["val_reward"]
        scored = [(s["val_reward"], s["step"]) for s in map(checkpoint.read_state, self.complete())]
        self.best = max(((v, n) for v, n in scored if v is not None), default=None)
        self.actor.load_optimizer(folder)
        self.rollout.sync_weights(self.actor.weights(), self.step)

    def complete(self) -> list[Path]:
        """Complete checkpoints of this run, oldest first."""
        return checkpoint.complete_checkpoints(self.checkpoints)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure a phase as ``time/NAME_s``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._timings[f"time/{name}_s"] = time.perf_counter() - start

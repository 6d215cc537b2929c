"""The fit loop: `Trainer.fit` reads like the algorithm; every line of a step is one named method below it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from agentgym.console import Progress
from agentgym.loops.base import derive_seed
from agentgym.rollout import Rollout
from agentgym.trainer import checkpoint, metrics
from agentgym.trainer.algorithms import (
    AdaptiveKL,
    GroupCollector,
    explained_variance,
    get_advantage,
    kl_in_reward,
    rollout_correction,
)
from agentgym.trainer.batch import Batch, add_overlong_penalty, make_batch, mask_truncated, union
from agentgym.trainer.cluster import Interrupted
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.data import TaskSampler
from agentgym.trainer.failures import check_failures, check_prompts
from agentgym.trainer.groups import ActorGroup, CriticGroup, ReferenceGroup, RolloutGroup
from agentgym.trainer.played import Played
from agentgym.trainer.replay import Replay
from agentgym.trainer.requests import baseline_requests, training_requests, validation_requests
from agentgym.trainer.rollout.worker import RolloutReport
from agentgym.trainer.schedule import learning_rate
from agentgym.trainer.tasks import TaskRef
from agentgym.trainer.tracking import GREEDY, STEP, VALIDATION, RunLog


class Trainer:
    """Learns from rollouts until the steps are done or a stop is asked for.

    Args:
        config: of the run.
        actor, rollout: the worker groups; `Replay` in place of the latter learns from recorded rollouts.
        reference: where a KL to the model before training is asked for.
        critic: where values are asked for.
        sampler: of training tasks.
        val_tasks: tasks of validation, played greedily.
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
        rollout: RolloutGroup | Replay,
        reference: ReferenceGroup | None,
        critic: CriticGroup | None,
        sampler: TaskSampler,
        val_tasks: Sequence[TaskRef],
        log: RunLog,
        progress: Progress,
        stop: Callable[[], bool],
        total_steps: int,
    ) -> None:
        self.config = config
        self.actor = actor
        self.rollout = rollout
        self.reference = reference
        self.critic = critic
        self.sampler = sampler
        self.val_tasks = val_tasks
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
        kl = config.algo.kl_reward
        self.kl_control = AdaptiveKL(kl.coef, target=kl.target, horizon=kl.horizon)
        self._timings: dict[str, float] = {}
        self._measured: dict[str, float] = {}
        """Metrics of the present step beside those of the updates."""

    def fit(self) -> None:
        """Train from the current step to the last one.

        On a stop the step in progress is finished or abandoned, and the state after the last finished step is saved.
        """
        position = self.sampler.position
        try:
            self.validate_start()
            while self.step < self.total_steps and not self.stop():
                self._timings, self._measured = {}, {}
                with self.timed("step"):
                    played = self.play()
                    batch = self.make_batch(played)
                    self.shape_rewards(batch)
                    self.add_old_log_probs(batch)
                    self.add_reference_log_probs(batch)
                    self.add_values(batch)
                    self.correct_mismatch(batch)
                    self.penalise_kl(batch)
                    self.add_advantages(batch)
                    learned = self.update_critic(batch) | self.update_actor(batch)
                    self.sync_weights()
                self.step += 1
                position = self.sampler.position
                validated = self.validate_step()
                learned = self._measured | learned
                values = metrics.of_step(played.report, batch, learned, self._timings, version=self.step - 1)
                rollouts = metrics.with_training_fields(played.report.rollouts, batch)
                self.record(values, validated, rollouts, played.greedy)
                if self.due(self.config.trainer.save_every):
                    self.save()
        except Interrupted:
            self.sampler.position = position
        if self.stop():
            self.save()

    # -- the steps of a step -------------------------------------------------------------------------------------

    def play(self) -> Played:
        """Sample tasks and play them; in several rounds where groups that teach nothing are to be replaced."""
        settings = self.config.algo.filter_groups
        if isinstance(self.rollout, Replay):  # what was recorded is all there is
            settings = settings.model_copy(update={"max_gen_batches": 1})
        collector: GroupCollector[str] = GroupCollector(self.config.data.batch_size, settings)
        rounds: list[Played] = []
        while not collector.finished:
            rounds.append(self.generate())
            collector.add(rounds[-1].scores())
        played = Played.merge(rounds)
        if not settings.enabled:
            return played
        self._measured |= {f"filter/{name}": value for name, value in collector.metrics().items()}
        return played.only(collector.take() or ())

    def generate(self) -> Played:
        """Play the next tasks ``rollout.n`` times with the current weights. Too many failures end the run."""
        if isinstance(self.rollout, Replay):
            return self.rollout.step(self.step + 1)
        self.progress.status("rollout")
        draws = self.sampler.next_batch()
        sampled = training_requests(self.config, draws, self.step)
        greedy = baseline_requests(self.config, draws, self.step) if self.config.algo.needs_baselines else []
        with self.timed("rollout"):
            report = self.rollout.generate([*sampled, *greedy], self.stop)
        self.check(report)
        rollouts = report.rollouts
        return Played(report=replace(report, rollouts=rollouts[: len(sampled)]), greedy=rollouts[len(sampled) :])

    def make_batch(self, played: Played) -> Batch:
        """The rollouts that are learned from as tensors; no rows where a step is skipped."""
        algo = self.config.algo
        batch = make_batch(
            played.report.rollouts,
            groups=played.groups,
            turn_rewards=algo.rewards_by_turn,
            extra_fields=algo.extra_fields,
        )
        if algo.needs_baselines:
            union(batch, {"reward_baselines": played.baselines(batch)})
        return batch

    def shape_rewards(self, batch: Batch) -> None:
        """Take the overlong penalty off the rewards, where it is asked for."""
        if self.config.algo.overlong.enabled and len(batch) > 0:
            buffer, length = self.config.overlong_lengths
            factor = self.config.algo.overlong.factor
            penalty = add_overlong_penalty(batch, max_length=length, buffer=buffer, factor=factor)
            self._measured["reward/overlong_penalty"] = penalty

    def add_old_log_probs(self, batch: Batch) -> None:
        """Log-probs of the behaviour policy under the trainer's own forward pass.

        With a single optimizer step they equal the ones that the update computes anyway, and are taken from there,
        unless something before the update needs them.
        """
        algo = self.config.algo
        single = algo.epochs == 1 and self.config.trainer.mini_batch_size is None
        needed = not single or algo.correction.active or algo.kl_reward.coef > 0
        if needed and len(batch) > 0:
            self.progress.status("log-probs")
            with self.timed("old_log_probs"):
                union(batch, {"old_log_probs": self.actor.log_probs(batch)})

    def add_reference_log_probs(self, batch: Batch) -> None:
        """Log-probs of the model before training, where a KL to it is asked for."""
        if self.reference is not None and len(batch) > 0:
            with self.timed("reference"):
                union(batch, {"ref_log_probs": self.reference.log_probs(batch)})

    def add_values(self, batch: Batch) -> None:
        """What the critic expects before each token, where there is one."""
        if self.critic is not None and len(batch) > 0:
            self.progress.status("values")
            with self.timed("values"):
                union(batch, {"values": self.critic.values(batch)})

    def correct_mismatch(self, batch: Batch) -> None:
        """Weights and rejections for tokens that the engine sampled with other probabilities than the trainer's.

        ``response_mask`` loses what is rejected; ``loss_mask`` keeps it, for the denominators.
        """
        settings = self.config.algo.correction
        if settings.active and len(batch) > 0:
            corrected = rollout_correction(
                batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"], settings
            )
            batch["response_mask"] = corrected.response_mask
            if corrected.weights is not None:
                union(batch, {"rollout_is_weights": corrected.weights})
            self._measured |= {f"correction/{name}": value for name, value in corrected.metrics.items()}

    def penalise_kl(self, batch: Batch) -> None:
        """Take the KL to the model before training off the rewards, where it is asked for, and adapt its weight."""
        settings = self.config.algo.kl_reward
        if settings.coef > 0 and len(batch) > 0:
            coef = self.kl_control.coef
            batch["token_level_rewards"], kl = kl_in_reward(
                batch["token_level_rewards"],
                batch["old_log_probs"],
                batch["ref_log_probs"],
                batch["loss_mask"],
                coef,
                settings.kind,
            )
            self.kl_control.update(kl, len(batch["rollout"].unique()))
            self._measured |= {"actor/ref_kl": kl, "reward/kl": kl, "reward/kl_coef": coef}

    def add_advantages(self, batch: Batch) -> None:
        """Advantages and returns of every model token; rows of masked truncations leave the loss afterwards.

        Rejected tokens are part of what happened, so they count here; a rejected row does not.
        """
        algo = self.config.algo
        if len(batch) == 0:
            return
        names = {*algo.extra_fields, "turn_index", "values", "reward_baselines"} & set(batch.keys())
        with self.timed("advantages"):
            advantages, returns = get_advantage(algo.advantage)(
                batch["token_level_rewards"],
                batch["loss_mask"],
                batch["group"],
                valid=batch["valid"] & batch["response_mask"].any(-1),
                rollout=batch["rollout"],
                config=algo,
                **{name: batch[name] for name in names},
            )
            union(batch, {"advantages": advantages, "returns": returns})
            if algo.mask_truncated:
                mask_truncated(batch)

    def update_critic(self, batch: Batch) -> dict[str, float]:
        """Move the values towards the returns, in mini-batches like those of the policy."""
        if self.critic is None or len(batch) == 0:
            return {}
        self.progress.status("critic")
        settings = self.config.trainer
        with self.timed("update_critic"):
            learned = batch["response_mask"] & batch["valid"][:, None]
            explained = explained_variance(batch["values"], batch["returns"], learned)
            lr = learning_rate(settings, self.step, self.total_steps, peak=self.config.critic.lr)
            epochs = self.config.critic.epochs or self.config.algo.epochs
            learned_values = self.critic.update(batch, list(self.mini_batches(batch, epochs)), lr)
        return learned_values | {"critic/explained_variance": explained}

    def update_actor(self, batch: Batch) -> dict[str, float]:
        """``algo.epochs`` passes over the batch in mini-batches of rollouts; nothing where nothing can be learned."""
        if len(batch) == 0 or (self.critic is not None and self.step < self.config.critic.warmup_steps):
            return {"actor/skipped_updates": 1.0}
        self.progress.status("update")
        with self.timed("update"):
            lr = learning_rate(self.config.trainer, self.step, self.total_steps)
            return self.actor.update(batch, list(self.mini_batches(batch, self.config.algo.epochs)), lr)

    def mini_batches(self, batch: Batch, epochs: int) -> Iterator[list[int]]:
        """Rows of each mini-batch: whole rollouts, in a new random order in every epoch."""
        size = self.config.trainer.mini_batch_size
        rows_of: dict[int, list[int]] = {}
        for row, rollout in enumerate(batch["rollout"].tolist()):
            rows_of.setdefault(rollout, []).append(row)
        rollouts = list(rows_of)
        for epoch in range(epochs):
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
            self.rollout.sync_weights(self.actor, self.step + 1)

    # -- around the steps ----------------------------------------------------------------------------------------

    def due(self, every: int) -> bool:
        """True at multiples of ``every`` and at the last step."""
        return self.step == self.total_steps or (every > 0 and self.step % every == 0)

    def validate_start(self) -> None:
        """Validate what the run starts from; after a resume, what a stop kept the last step from."""
        if self.step == 0:
            if self.config.trainer.val_before:
                self.record({}, self.validate(), [])
        elif self.val_reward is None and self.due(self.config.trainer.val_every):
            self.log.amend(self.step, self.validate())

    def validate_step(self) -> dict[str, float]:
        """Validate the step that was just finished, if it is due. A stop abandons the validation, not the step."""
        if not self.due(self.config.trainer.val_every):
            return {}
        try:
            return self.validate()
        except Interrupted:
            return {}

    def validate(self) -> dict[str, float]:
        """Play the validation tasks greedily with the current weights."""
        if not self.val_tasks or isinstance(self.rollout, Replay):
            return {}
        self.progress.status("validation")
        with self.timed("validation"):
            report = self.rollout.generate(validation_requests(self.config, self.val_tasks, self.step), self.stop)
        self.check(report)
        self.log.rollouts(VALIDATION.format(self.step), report.rollouts)
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
        greedy: Sequence[Rollout] = (),
    ) -> None:
        """Write one step's metrics and rollouts, and show them."""
        if not validated:
            self.val_reward = None
        if rollouts:
            self.log.rollouts(STEP.format(self.step), [r for r, _ in rollouts], [extra for _, extra in rollouts])
        if greedy:
            self.log.rollouts(GREEDY.format(self.step), greedy)
        self.log.metrics(self.step, values | validated)
        self.progress.update(self.step, values | validated)

    def save(self) -> None:
        """Write a checkpoint of the current state, unless it exists; then remove old ones."""
        self.progress.status("saving")
        state = {
            "step": self.step,
            "data_position": self.sampler.position,
            "val_reward": self.val_reward,
            "kl_coef": self.kl_control.coef,
        }
        checkpoint.save(self.checkpoints, self.step, state, self.write_models)
        if self.val_reward is not None and (self.best is None or self.val_reward >= self.best[0]):
            self.best = (self.val_reward, self.step)
        checkpoint.clean(
            self.checkpoints,
            keep=self.config.trainer.keep_checkpoints,
            protect={self.best[1]} if self.best is not None else set(),
        )

    def write_models(self, folder: Path) -> None:
        """Write everything that learns into the folder of a checkpoint."""
        self.actor.save(folder)
        if self.critic is not None:
            self.critic.save(folder)

    def resume(self, folder: Path) -> None:
        """Take over the state of a checkpoint; the actor has loaded its model already."""
        state = checkpoint.read_state(folder)
        self.step = state["step"]
        self.sampler.position = state["data_position"]
        self.val_reward = state["val_reward"]
        scored = [(s["val_reward"], s["step"]) for s in map(checkpoint.read_state, self.complete())]
        self.best = max(((v, n) for v, n in scored if v is not None), default=None)
        if self.kl_control.target is not None:  # a fixed weight is the configuration's
            self.kl_control.coef = state["kl_coef"]
        self.actor.load_optimizer(folder)
        if self.critic is not None:
            self.critic.load(folder)
        self.rollout.sync_weights(self.actor, self.step)

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
            key = f"time/{name}_s"
            self._timings[key] = self._timings.get(key, 0.0) + time.perf_counter() - start

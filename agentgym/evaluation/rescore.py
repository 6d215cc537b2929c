"""Recorded rollouts scored again, without a model: with a reward function, or with the environment's own score."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, model_validator

from agentgym import plugins, registration
from agentgym.config import ConfigModel, Names, section, setting
from agentgym.data.config import FilesConfig, ToolsConfig, provide_dataset
from agentgym.errors import AgentGymError, ConfigError, EnvError
from agentgym.evaluation.records import Record
from agentgym.evaluation.results import Results
from agentgym.evaluation.rows import final_answer
from agentgym.rewards.config import RewardConfig, make_scorer
from agentgym.rollout import Rollout
from agentgym.settings import EnvConfig
from agentgym.statistics import Estimate, clustered_mean
from agentgym.tally import error_type, status_of
from agentgym.tool_env import ToolEnv
from agentgym.types import SPLITS, RolloutStatus, Task

if TYPE_CHECKING:
    from agentgym.rewards.scorer import Scorer


class ScoreConfig(ConfigModel):
    """What scores recorded rollouts, or replays them."""

    plugins: Names = setting([], "Modules or Python files that register environments and rewards")
    env: EnvConfig | None = setting(None, "Environment of the tasks; null: the one that was recorded")
    split: str | None = setting(None, "Split of the tasks; null: the one that was recorded, else any")
    data: FilesConfig = section(FilesConfig, "Files of env=dataset")
    tools: ToolsConfig = section(ToolsConfig, "Tools of env=dataset")
    reward: RewardConfig = section(RewardConfig, "Who scores; with nothing set the environment does")
    parser: str = setting("hermes", "Format of the model's tool calls, for malformed ones in a replay")
    limit: int | None = setting(None, "Only the first rollouts; null: all", ge=1)
    concurrency: int = setting(64, "Rollouts in work at the same time", ge=1)
    step_timeout: float = setting(120.0, "Seconds for one step of a replay", gt=0)
    output: Path | None = setting(
        None, "Folder for the rollouts with their new rewards, as an evaluation writes it; null: they are only shown"
    )

    @model_validator(mode="after")
    def _dataset_has_its_files(self) -> ScoreConfig:
        if self.env is not None:
            provide_dataset(self.env, self.data, self.tools)
        return self


SECTIONS: dict[str, type[BaseModel] | None] = {
    "plugins": None,
    "env": None,
    "split": None,
    "data": FilesConfig,
    "tools": ToolsConfig,
    "reward": RewardConfig,
}
"""Settings that are those of the recorded run, where nothing else is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """One rollout before and after."""

    before: Rollout
    after: Rollout

    @property
    def name(self) -> str:
        return f"{self.before.task_id}/{self.before.sample}"

    @property
    def changed(self) -> bool:
        """Whether the reward is another one; None, which is no reward, differs from every number."""
        old, new = self.before.reward, self.after.reward
        return (old is None) != (new is None) or (old is not None and new is not None and abs(old - new) > 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class RescoreReport:
    """What scoring again gave."""

    rollouts: Sequence[Rescored]

    @property
    def errors(self) -> list[Rescored]:
        """What could not be scored."""
        return [one for one in self.rollouts if one.after.reward is None]

    @property
    def mean(self) -> Estimate | None:
        """Over what could be scored, clustered by task."""
        return _mean([one.after for one in self.rollouts])

    def lines(self, limit: int = 20) -> list[str]:
        """The report as text."""
        changed = [one for one in self.rollouts if one.changed]
        lines = [
            f"recorded  {_shown(_mean([one.before for one in self.rollouts]))}",
            f"now       {_shown(self.mean)}",
            f"rollouts  {len(self.rollouts)}: {len(changed)} with another reward",
        ]
        for one in changed[:limit]:
            lines.append(f"  {one.name:<32} {_number(one.before.reward)} -> {_number(one.after.reward)}")
        if len(changed) > limit:
            lines.append(f"  ... and {len(changed) - limit} more")
        if self.errors:
            first = (self.errors[0].after.outcome.error or "").partition("\n")[0]
            coverage = 1 - len(self.errors) / len(self.rollouts)
            lines += [
                "",
                f"ERRORS: {len(self.errors)} of {len(self.rollouts)} rollouts could not be scored (coverage "
                f"{coverage:.3f}); the mean leaves them out.",
                f"  first  {self.errors[0].name}: {first}",
            ]
        return lines


def rescore(config: ScoreConfig, records: Sequence[Record]) -> RescoreReport:
    """Score recorded rollouts again; with ``config.output`` they are written there with their new rewards.

    Raises:
        ConfigError: an unknown environment or reward function, or no way to score is named.
    """
    plugins.load(config.plugins)
    records = records[: config.limit]
    report = RescoreReport(rollouts=asyncio.run(_rescore(config, records)))
    if config.output is not None:
        with Results(config.output) as results:
            for one in report.rollouts:
                results.add(one.after)
    return report


async def _rescore(config: ScoreConfig, records: Sequence[Record]) -> list[Rescored]:
    environments = Environments(config)
    scorer = make_scorer(config.reward, max_response_length=0)
    permits = asyncio.Semaphore(config.concurrency)
    if scorer is not None:
        scorer.expect(record.rollout.group for record in records)

    async def one(record: Record) -> Rescored:
        rollout = scorable(record.rollout)
        # A batched reward waits for a whole group: a permit that is held meanwhile could be the one it waits for.
        async with permits if scorer is None or not scorer.manager.batched else asyncio.Semaphore(1):
            after = await _score(environments, scorer, record, rollout)
        return Rescored(before=record.rollout, after=after)

    try:
        return list(await asyncio.gather(*[one(record) for record in records]))
    finally:
        environments.close()
        if scorer is not None:
            await scorer.aclose()


async def _score(environments: Environments, scorer: Scorer | None, record: Record, rollout: Rollout) -> Rollout:
    if rollout.status.failed:
        return rollout
    task = environments.task(record, needed=scorer is None)
    if scorer is not None:
        return await scorer.score(rollout, task, rollout.reward)
    assert task is not None
    env = environments.env(record)
    if not isinstance(env, ToolEnv):
        raise ConfigError(
            f"environment {env.name!r} scores while it is played, not at the end: use --replay, or name a reward"
        )
    try:
        score, components = await env.score_answer(task, final_answer(rollout.conversation))
    except AgentGymError as error:
        return failed(rollout, error)
    outcome = rollout.outcome
    reward = (
        score + env.tool_reward_weight * sum(outcome.tool_rewards) + env.turn_score_weight * sum(outcome.turn_scores)
    )
    return replace(rollout, outcome=replace(outcome, reward=reward, reward_components=components))


def scorable(rollout: Rollout) -> Rollout:
    """The rollout without its old reward. One whose scorer had failed counts as completed: its answer is there."""
    outcome = rollout.outcome
    if outcome.status is RolloutStatus.FAILED_ENV and final_answer(rollout.conversation):
        outcome = replace(outcome, status=RolloutStatus.COMPLETED, error=None, error_type=None)
    return replace(rollout, outcome=outcome)


def failed(rollout: Rollout, error: AgentGymError) -> Rollout:
    """The rollout as one that could not be scored."""
    trace = error.traceback_text if isinstance(error, EnvError) else ""
    outcome = replace(
        rollout.outcome,
        status=status_of(error),
        reward=None,
        error_type=error_type(error),
        error=f"{error}\n{trace}".strip(),
    )
    return replace(rollout, outcome=outcome)


class Environments:
    """The environments and tasks of recorded rollouts, made when first needed."""

    def __init__(self, config: ScoreConfig) -> None:
        self._config = config
        self._members = {} if config.env is None else {member.name: member for member in config.env.members()}
        self._envs: dict[str, Any] = {}
        self._tasks: dict[tuple[str, str], Mapping[str, Task]] = {}

    def settings(self, record: Record) -> EnvConfig:
        """Which environment, with which arguments. Raises `ConfigError` where nothing says."""
        name = record.rollout.env_id
        if len(self._members) == 1:
            return next(iter(self._members.values()))
        if name in self._members:
            return self._members[name]
        if not name:
            raise ConfigError(f"{record.place}: it does not say its environment: name it with env=NAME, or a reward")
        return EnvConfig(name=name)

    def env(self, record: Record) -> Any:
        """The environment, without wrappers."""
        settings = self.settings(record)
        if settings.name not in self._envs:
            self._envs[settings.name] = registration.make(settings.name, **settings.kwargs)
        return self._envs[settings.name].unwrapped

    def task(self, record: Record, *, needed: bool = True) -> Task | None:
        """The task that was played: the environment's of that id, else what a message log says itself.

        Raises:
            ConfigError: there is none, and it is ``needed``.
        """
        rollout = record.rollout
        if self._members or (record.own and rollout.env_id in registration.list_envs()):
            name = self.settings(record).name
            named = self._config.split or rollout.split
            for split in [named] if named else reversed(SPLITS):  # mostly it was validation
                if (name, split) not in self._tasks:
                    self._tasks[name, split] = {task.id: task for task in self.env(record).tasks(split)}
                if (found := self._tasks[name, split].get(rollout.task_id)) is not None:
                    return found
        if needed:
            raise ConfigError(
                f"{record.place}: no task {rollout.task_id!r} in "
                f"{f'environment {self.settings(record).name!r}' if self._members or rollout.env_id else 'sight'}: "
                f"name the environment it was played in (env=NAME, env.KEY=VALUE, split=NAME), or a reward function"
            )
        return Task(
            id=rollout.task_id,
            prompt=[message for message in rollout.conversation if message["role"] in ("system", "user")][:2],
            data=record.extra,
            data_source=rollout.data_source,
        )

    def close(self) -> None:
        """Close all environments."""
        for env in self._envs.values():
            env.close()


def _mean(rollouts: Sequence[Rollout]) -> Estimate | None:
    grouped: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.reward is not None:
            grouped.setdefault(rollout.task_id, []).append(rollout.reward)
    return clustered_mean(list(grouped.values()))


def _shown(value: Estimate | None) -> str:
    return "no reward" if value is None else f"{value.mean:.3f}  [{value.low:.3f}, {value.high:.3f}]"


def _number(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"

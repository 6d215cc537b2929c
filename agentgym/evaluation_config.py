"""The configuration of an evaluation: every key, its default and what it means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import model_validator

from agentgym.config import ConfigModel, Names, section, setting
from agentgym.settings import EnvConfig, ModelConfig, RolloutConfig


class EvalRolloutConfig(RolloutConfig):
    """``rollout=...`` in an evaluation: greedy unless several samples per task are asked for."""

    temperature: float = setting(0.0, "Sampling temperature; 0 is greedy. With n above 1 the default is 1", ge=0.0)


class EvalConfig(ConfigModel):
    """A policy (a model, or an agent that needs none) and the tasks it is measured on."""

    plugins: Names = setting([], "Modules or Python files that register environments, loops, parsers")
    env: EnvConfig = setting(..., "the environment to evaluate in, for example env=calculator-math")
    model: ModelConfig = section(ModelConfig, "The model to evaluate")
    agent: str | None = setting(
        None,
        "Instead of a model: `oracle`, the environment's own perfect player; null: the model plays",
        synonyms=["policy"],
    )
    split: str = setting("validation", "Split of the environment's tasks")
    tasks: int | None = setting(
        None, "Use only the first tasks of the split; null: all", ge=1, synonyms=["limit", "num_tasks", "max_samples"]
    )
    n: int = setting(1, "Samples per task", ge=1, synonyms=["num_samples", "n_samples"])
    seed: int = setting(0, "Seed of the sampling", ge=0)
    threads: int | None = setting(None, "CPU threads for computing; null: all cores", ge=1)
    rollout: EvalRolloutConfig = section(EvalRolloutConfig, "How episodes are played")
    output: Path | None = setting(None, "Folder for report and rollouts; null: only the summary is printed")

    @model_validator(mode="before")
    @classmethod
    def _several_samples_are_sampled(cls, data: Any) -> Any:
        """n > 1 greedy samples are all the same, so they are sampled unless a temperature was given."""
        if not isinstance(data, dict) or not isinstance(n := data.get("n"), int) or n <= 1:
            return data
        rollout = data.get("rollout", {})
        if isinstance(rollout, dict) and "temperature" not in rollout:
            return {**data, "rollout": {**rollout, "temperature": 1.0}}
        return data

    @model_validator(mode="after")
    def _samples_differ(self) -> EvalConfig:
        if self.n > 1 and self.rollout.temperature == 0 and self.agent is None:
            raise ValueError(f"n={self.n} samples at rollout.temperature=0 are all the same: set it above 0, or n=1")
        return self

    @model_validator(mode="after")
    def _agent_is_known(self) -> EvalConfig:
        if self.agent not in (None, "oracle"):
            raise ValueError(f"agent={self.agent!r}: expected 'oracle', or null to let the model play")
        return self

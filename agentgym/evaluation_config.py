"""The configuration of an evaluation: every key, its default and what it means."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import field_validator, model_validator

from agentgym.config import ConfigModel, Names, section, setting
from agentgym.data.config import FilesConfig, ToolsConfig, provide_dataset
from agentgym.rewards.config import RewardConfig
from agentgym.settings import EnvConfig, ModelConfig, RolloutConfig


class EvalRolloutConfig(RolloutConfig):
    """``rollout=...`` in an evaluation: greedy unless several samples per task are asked for."""

    temperature: float = setting(0.0, "Sampling temperature; 0 is greedy. With n above 1 the default is 1", ge=0.0)

    session_limit: int = setting(
        64,
        "Rollouts that are played at the same time",
        ge=1,
        synonyms=["concurrency", "max_concurrency", "max_connections", "num_concurrent", "workers"],
    )


class EndpointConfig(ConfigModel):
    """``endpoint=URL``: a model behind an OpenAI-compatible API."""

    chosen_by: ClassVar[str | None] = "url"

    url: str | None = setting(
        None,
        "Address of the API, e.g. http://127.0.0.1:8000/v1; `model` is then a name that it knows",
        synonyms=["base_url", "api_base"],
    )
    key_env: str = setting("OPENAI_API_KEY", "Environment variable that holds the key", synonyms=["api_key"])
    max_retries: int = setting(5, "Times a request is tried again after 429, 5xx, a timeout or a lost connection", ge=0)
    timeout: float = setting(300.0, "Seconds to wait for an answer, or for the next piece of a stream", gt=0)
    requests_per_minute: float | None = setting(
        None, "Requests are spaced so that there are no more; null: no limit", gt=0, synonyms=["rate_limit", "rpm"]
    )
    stream: bool = setting(False, "Ask for the answer piece by piece")
    limit_key: Literal["max_tokens", "max_completion_tokens"] = setting(
        "max_tokens", "What the API calls the limit of tokens; newer models of OpenAI want max_completion_tokens"
    )
    extra_body: dict[str, Any] = setting({}, "Further fields of every request, e.g. {reasoning_effort: low}")

    @field_validator("url", mode="after")
    @classmethod
    def _url_is_an_address(cls, value: str | None) -> str | None:
        if value is not None and not re.match(r"https?://\w|[\w-]+[.:]|localhost", value):
            raise ValueError("expected an address, e.g. http://127.0.0.1:8000/v1")
        return value


class EvalConfig(ConfigModel):
    """A policy (a model, or an agent that needs none) and the tasks it is measured on."""

    plugins: Names = setting([], "Modules or Python files that register environments, loops, parsers")
    env: EnvConfig = setting(..., "the environment to evaluate in, for example env=calculator-math")
    model: ModelConfig = section(ModelConfig, "The model to evaluate")
    agent: str | None = setting(
        None,
        "Who plays: `oracle` (the environment's own perfect player), `noop` (empty answers), or an async function of "
        "yours, my_module:my_agent or my_file.py:my_agent; null: the model",
        synonyms=["policy"],
    )
    endpoint: EndpointConfig = section(EndpointConfig, "Where the model is, if it is not on this machine")
    split: str = setting("validation", "Split of the environment's tasks")
    tasks: int | None = setting(
        None, "Use only the first tasks of the split; null: all", ge=1, synonyms=["limit", "num_tasks", "max_samples"]
    )
    n: int = setting(1, "Samples per task", ge=1, synonyms=["num_samples", "n_samples"])
    seed: int = setting(0, "Seed of the sampling", ge=0)
    threads: int | None = setting(None, "CPU threads for computing; null: all cores", ge=1)
    rollout: EvalRolloutConfig = section(EvalRolloutConfig, "How episodes are played")
    success: float = setting(1.0, "A rollout with a reward of at least this is solved (pass@k)")
    interval: Literal["t", "bootstrap"] = setting("t", "How confidence intervals are made; both cluster by task")
    data: FilesConfig = section(FilesConfig, "Files of env=dataset")
    tools: ToolsConfig = section(ToolsConfig, "Tools of env=dataset")
    reward: RewardConfig = section(RewardConfig, "Who scores")
    output: Path | None = setting(
        None,
        "Folder for rollouts and report; null: evals/ENV-POLICY from the command line, none from Python",
        synonyms=["output_dir", "log_dir"],
    )

    @property
    def policy(self) -> str:
        """Who plays, for a person."""
        model = self.model.path if self.endpoint.url is None else f"{self.model.path} at {self.endpoint.url}"
        return model if self.agent is None else self.agent

    @model_validator(mode="after")
    def _dataset_has_its_files(self) -> EvalConfig:
        provide_dataset(self.env, self.data, self.tools)
        return self

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
        if self.n > 1 and self.rollout.temperature == 0 and self.agent is None and self.endpoint.url is None:
            raise ValueError(f"n={self.n} samples at rollout.temperature=0 are all the same: set it above 0, or n=1")
        return self

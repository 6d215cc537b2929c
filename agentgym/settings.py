"""The sections that training and evaluation share: which environment, which model, how it is played."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, PrivateAttr, field_validator

from agentgym.config import ConfigModel, section, setting
from agentgym.errors import ConfigError, did_you_mean

EngineName = Literal["torch", "vllm", "scripted"]


class EnvConfig(ConfigModel):
    """``env=NAME env.KEY=VALUE``: the environment, and keyword arguments of its constructor.

    Every key but those below goes to the constructor; `agentgym.registration.check_kwargs` checks their names.
    ``env=A,B`` is a mixture: ``env.A.KEY=VALUE`` goes to the constructor of A, ``env.weights.A=2`` draws A twice as
    often as an environment of weight 1.
    """

    model_config = ConfigDict(extra="allow")

    chosen_by: ClassVar[str | None] = "name"

    name: str = setting(
        ...,
        "Registered name of the environment, or several with commas; `agentgym envs` lists them",
        synonyms=["environment"],
    )
    weights: dict[str, float] | None = setting(
        None, "Of the environments of a mixture, by name; null: all the same", synonyms=["mixture", "env_weights"]
    )
    max_turns: int | None = setting(
        None,
        "Assistant turns per episode; null: what the environment registered",
        ge=1,
        synonyms=["max_steps_per_episode"],
    )
    max_user_turns: int | None = setting(
        None, "Turns of the user simulator per episode; null: what the environment registered", ge=1
    )

    _provided: dict[str, dict[str, Any]] = PrivateAttr(default_factory=dict)

    @field_validator("weights", mode="after")
    @classmethod
    def _weights_are_positive(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is not None and not all(weight > 0 for weight in value.values()):
            raise ValueError("expected numbers above 0; leave an environment out of env= instead")
        return value

    @property
    def names(self) -> list[str]:
        """The environments: one, or those of a mixture."""
        return [name.strip() for name in self.name.split(",") if name.strip()]

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments for the constructor of a single environment."""
        return {**self._provided.get(self.name, {}), **(self.__pydantic_extra__ or {})}

    def provide(self, name: str, kwargs: Mapping[str, Any]) -> None:
        """Add constructor arguments of environment ``name`` that other sections of the configuration stand for."""
        self._provided[name] = dict(kwargs)

    def members(self) -> list[EnvConfig]:
        """One configuration per environment; just this one where it is no mixture.

        Raises:
            ConfigError: a key or a weight that belongs to no environment of the mixture.
        """
        names = self.names
        extra = self.__pydantic_extra__ or {}
        if len(names) == 1:
            if self.weights is not None:
                raise ConfigError(f"env.weights={self.weights}: env={self.name} is no mixture; write env=A,B")
            return [self]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"env={self.name}: expected different names, like env=A,B")
        for key, value in extra.items():
            if key not in names or not isinstance(value, dict):
                raise ConfigError(
                    f"env.{key}: which environment of the mixture is it for?{did_you_mean(key, names)} "
                    f"Write env.NAME.KEY=VALUE with one of {', '.join(names)}"
                )
        for name in self.weights or {}:
            if name not in names:
                raise ConfigError(f"env.weights.{name}: not in env={self.name}.{did_you_mean(name, names)}")
        limits = {"max_turns": self.max_turns, "max_user_turns": self.max_user_turns}
        members = []
        for name in names:
            member = EnvConfig.model_validate({"name": name, **limits, **extra.get(name, {})})
            member.provide(name, self._provided.get(name, {}))
            members.append(member)
        return members

    def weight(self, name: str) -> float:
        """How often an environment of the mixture is drawn, relative to the others."""
        return (self.weights or {}).get(name, 1.0)


class ModelConfig(ConfigModel):
    """``model=tiny|FOLDER|HUB-ID``."""

    chosen_by: ClassVar[str | None] = "path"

    path: str = setting(
        "tiny",
        "`tiny` (shipped), a Hugging Face model folder, a run folder (its best checkpoint) or a hub id",
        synonyms=["model_name_or_path", "model_path", "model_name"],
    )
    revision: str | None = setting(None, "Branch, tag or commit of a hub id; null: its main branch")
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "Number format of the weights in training and generation", synonyms=["torch_dtype", "precision"]
    )


class VllmConfig(ConfigModel):
    """``rollout.vllm.KEY=VALUE``: settings of ``rollout=vllm`` alone."""

    engines: int | None = setting(
        None,
        "vLLM engines that share the requests; null: as many as the GPUs hold, 1 on the CPU",
        ge=1,
        synonyms=["num_engines", "vllm_num_engines", "data_parallel_size", "num_replicas"],
    )
    tensor_parallel: int = setting(
        1,
        "GPUs (processes on the CPU) that share the model of one engine",
        ge=1,
        synonyms=["tensor_parallel_size", "tensor_model_parallel_size", "tp"],
    )
    colocate: bool = setting(
        True, "Engines take turns with the trainer on the same GPUs; false: they have GPUs of their own"
    )
    gpu_memory: float | None = setting(
        None,
        "Share of a GPU's memory that an engine may use; null: 0.9, or 0.5 where it shares the GPU with the trainer",
        gt=0.0,
        le=1.0,
        synonyms=["gpu_memory_utilization", "mem_fraction_static"],
    )
    kv_cache_gb: float | None = setting(
        None,
        "GiB for keys and values of one engine; null: what is left of gpu_memory, on the CPU what "
        "rollout.max_slots sequences need",
        gt=0.0,
        synonyms=["kv_cache_memory"],
    )
    max_batched_tokens: int | None = setting(
        None, "Most tokens of one forward pass; null: automatic", ge=1, synonyms=["max_num_batched_tokens"]
    )
    eager: bool | None = setting(
        None,
        "Run without CUDA graphs and compilation: starts sooner, generates slower; null: on for the CPU",
        synonyms=["enforce_eager"],
    )
    request_timeout: float = setting(600.0, "Seconds for one turn of the model", gt=0.0)
    start_timeout: float = setting(600.0, "Seconds for an engine to start and load the model", gt=0.0)
    health_every: float = setting(10.0, "Seconds between health checks of an engine", gt=0.0)
    log_level: Literal["error", "warning", "info", "debug"] = setting(
        "error", "What vLLM logs; under Ray it goes to Ray's log files"
    )


class RolloutConfig(ConfigModel):
    """``rollout=torch|vllm|scripted``: how episodes are played and tokens are sampled."""

    chosen_by: ClassVar[str | None] = "engine"

    engine: EngineName = setting("torch", "What generates the tokens")
    agent_loop: str | dict[str, Any] = setting(
        "tool_agent",
        "Registered name of the loop that plays an episode; with arguments {name: external, agent: my_file.py:fn} "
        "(your own agent, in any framework), or {_target_: 'module:Class', ...}",
        synonyms=["loop", "agent"],
    )
    parser: str = setting(
        "hermes", "Format of the model's tool calls", synonyms=["tool_parser", "tool_call_parser", "format"]
    )
    template_kwargs: dict[str, Any] = setting(
        {}, "Extra arguments of the chat template, e.g. {enable_thinking: false}", synonyms=["chat_template_kwargs"]
    )
    temperature: float = setting(1.0, "Sampling temperature; 0 is greedy", ge=0.0)
    top_p: float = setting(1.0, "Sample from the smallest set of tokens with this probability; 1: all", gt=0.0, le=1.0)
    top_k: int = setting(0, "Sample from this many most likely tokens; 0: all", ge=0)
    max_prompt_length: int = setting(
        1024, "Tokens of the first prompt, tool schemas included; a longer one ends its rollout", ge=1
    )
    max_response_length: int = setting(
        1024,
        "Tokens of an episode after the first prompt: the model's and the environment's",
        ge=1,
        synonyms=["max_new_tokens", "max_tokens", "max_completion_length", "response_length"],
    )
    max_turn_tokens: int | None = setting(None, "Tokens the model may write in one turn; null: what is left", ge=1)
    max_slots: int = setting(
        64, "Sequences that the engine generates at the same time", ge=1, synonyms=["max_num_seqs"]
    )
    deterministic: bool | None = setting(
        None, "Same tokens in every run of the same seed, at some cost; null: on for the CPU"
    )
    vllm: VllmConfig = section(VllmConfig, "Settings of the vllm engine")
    session_limit: int = setting(256, "Sessions that are open at the same time", ge=1)
    open_timeout: float = setting(60.0, "Seconds to open a session", gt=0)
    step_timeout: float = setting(120.0, "Seconds for one step of an environment, tool calls included", gt=0)
    session_timeout: float | None = setting(None, "Seconds for a whole episode; null: no limit", gt=0)
    close_timeout: float = setting(10.0, "Seconds to close a session", gt=0)

"""The configuration of a training run: every key, its default and what it means. Imports no torch.

`agentgym.config.load_config(TrainConfig, ...)` composes one; `agentgym config train ...` prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import field_validator, model_validator

from agentgym.config import ConfigModel, Names, section, setting
from agentgym.data.config import FilesConfig, ToolsConfig, provide_dataset
from agentgym.rewards.config import RewardConfig
from agentgym.settings import EnvConfig, ModelConfig, RolloutConfig
from agentgym.trainer.algorithms.config import AlgorithmConfig

LoggerName = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "trackio"]

GROUP_ADVANTAGES = frozenset({"grpo", "rloo", "opo", "reinforce_plus_plus_baseline", "gpg", "grpo_passk", "turn_level"})
"""Advantages that compare the samples of one prompt: with one sample each they are all zero."""


class AlgoConfig(ConfigModel, AlgorithmConfig):
    """``algo=grpo``: the settings of `AlgorithmConfig`, where a preset may set some of them."""

    chosen_by: ClassVar[str | None] = "name"
    only_presets: ClassVar[bool] = True
    other_names: ClassVar[Mapping[str, str]] = {
        "adv_estimator": "advantage",
        "loss_mode": "policy_loss",
        "ppo_epochs": "epochs",
        "num_iterations": "epochs",
        "kl_coef": "kl_loss.coef",
        "kl_loss_coef": "kl_loss.coef",
        "beta": "kl_loss.coef",
        "kl_loss_type": "kl_loss.kind",
        "kl_kind": "kl_loss.kind",
        "kl_penalty": "kl_reward.kind",
        "clip_ratio": "clip_ratio_low",
        "cliprange": "clip_ratio_low",
        "epsilon": "clip_ratio_low",
        "entropy_coeff": "entropy_coef",
        "norm_adv_by_std_in_grpo": "norm_by_std",
        "cliprange_value": "value_clip",
        "vf_clip": "value_clip",
        "extra_loss_fields": "extra_fields",
        "filter_overlong": "mask_truncated",
    }

    name: str = setting("grpo", "Preset whose values apply unless given")

    @property
    def needs_reference(self) -> bool:
        """True if a KL to the model before training is part of the objective."""
        return self.kl_loss.coef > 0 or self.kl_reward.coef > 0

    @property
    def needs_values(self) -> bool:
        """True if the advantages are computed from a critic's values."""
        return self.advantage == "gae"

    @property
    def needs_baselines(self) -> bool:
        """True if every prompt is also played greedily, for the score to compare with."""
        return self.advantage == "remax"

    @property
    def rewards_by_turn(self) -> bool:
        """True if rewards stand at the end of each turn."""
        return self.turn_rewards if self.turn_rewards is not None else self.advantage == "turn_level"


class CriticConfig(ConfigModel):
    """The value model of PPO: the policy's architecture with a head of one number, and its own AdamW."""

    enabled: bool | None = setting(None, "Train a critic; null: where the advantage needs one (gae)")
    path: str | None = setting(None, "Model whose backbone the critic starts from; null: the policy's")
    lr: float = setting(1e-5, "Peak learning rate; its course is that of trainer.lr", gt=0.0)
    weight_decay: float = setting(0.01, "Weight decay", ge=0.0)
    grad_clip: float = setting(1.0, "Gradients are scaled down to this norm", gt=0.0)
    epochs: int | None = setting(None, "Passes over the batch of a step; null: algo.epochs", ge=1)
    warmup_steps: int = setting(
        0, "First steps of the run in which only the critic learns", ge=0, synonyms=["critic_warmup"]
    )


class DataConfig(FilesConfig):
    """Which tasks, in which order."""

    batch_size: int = setting(
        16, "Prompts per step; each is sampled rollout.n times", ge=1, synonyms=["train_batch_size", "num_prompts"]
    )
    train_size: int | None = setting(None, "Use only the first tasks of the training split; null: all", ge=1)
    val_size: int | None = setting(None, "Use only the first tasks of the validation split; null: all", ge=1)
    shuffle: bool = setting(True, "Draw training tasks in a new random order in every epoch")
    seed: int | None = setting(None, "Seed of that order; null: trainer.seed")
    curriculum: str | None = setting(
        None, "Instead of shuffling: easy_first, or `file.py:name` of a function (tasks, epoch, rng) -> order"
    )
    filter_overlong_prompts: bool = setting(
        False, "Leave out tasks whose first prompt is longer than rollout.max_prompt_length"
    )
    truncation: Literal["end", "error"] = setting(
        "end", "A longer prompt that is not left out: ends its rollout (end), or is an error at the start (error)"
    )

    @property
    def measures_prompts(self) -> bool:
        """Whether all prompts are rendered at the start."""
        return self.filter_overlong_prompts or self.truncation == "error"


class TrainRolloutConfig(RolloutConfig):
    """``rollout=...`` in training: the log-probs must be those of the full distribution."""

    n: int = setting(
        8, "Samples per prompt", ge=1, synonyms=["group_size", "num_generations", "num_samples", "samples_per_prompt"]
    )

    @field_validator("temperature", mode="after")
    @classmethod
    def _samples(cls, value: float) -> float:
        if value <= 0:
            raise ValueError("training samples, so it needs a temperature above 0; validation is greedy by itself")
        return value

    @field_validator("top_p", "top_k", mode="after")
    @classmethod
    def _full_distribution(cls, value: float, info: Any) -> float:
        if (info.field_name == "top_p" and value < 1) or (info.field_name == "top_k" and value > 0):
            off = "1" if info.field_name == "top_p" else "0"
            raise ValueError(
                f"cutting the distribution makes the log-probs of training wrong; leave rollout.{info.field_name}={off}"
            )
        return value


class TrainerConfig(ConfigModel):
    """The run: length, optimizer, batches, validation, checkpoints, processes."""

    total_steps: int | None = setting(
        None,
        "Steps of the run; null: as many as trainer.total_epochs takes",
        ge=1,
        synonyms=["steps", "max_steps", "num_steps", "total_training_steps"],
    )
    total_epochs: int | None = setting(
        None,
        "Passes over the training tasks; null with total_steps=null: one",
        ge=1,
        synonyms=["epochs", "num_epochs", "num_train_epochs"],
    )
    seed: int = setting(0, "Seed of everything random in the run", ge=0, synonyms=["seed", "random_seed"])
    cluster: Literal["ray", "inline"] = setting(
        "ray", "`ray`: workers are Ray actors; `inline`: all in this process, for debugging"
    )
    workers: int = setting(1, "Processes that train the model, each with a shard of it", ge=1, synonyms=["world_size"])
    gpus: int | None = setting(
        None,
        "GPUs to train on, with a process on each; null: trainer.workers of them, where there are any",
        ge=1,
        synonyms=["n_gpus_per_node", "num_gpus"],
    )
    threads: int | None = setting(None, "CPU threads for computing; null: all cores", ge=1, synonyms=["num_threads"])
    lr: float = setting(1e-6, "Peak learning rate of AdamW", gt=0.0, synonyms=["lr", "learning_rate"])
    weight_decay: float = setting(0.01, "Weight decay of AdamW", ge=0.0)
    betas: tuple[float, float] = setting((0.9, 0.999), "Moment decay rates of AdamW")
    warmup_steps: int = setting(
        0, "Steps over which the learning rate rises from 0", ge=0, synonyms=["lr_warmup_steps"]
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = setting(
        "constant",
        "Course of the learning rate after the warm-up, down to 0 at the end",
        synonyms=["lr_scheduler_type"],
    )
    grad_clip: float = setting(1.0, "Gradients are scaled down to this norm", gt=0.0, synonyms=["max_grad_norm"])
    mini_batch_size: int | None = setting(
        None, "Rollouts per optimizer step; null: the whole batch", ge=1, synonyms=["ppo_mini_batch_size"]
    )
    max_tokens_per_micro_batch: int = setting(
        16384,
        "Tokens that go through the model at a time; bounds the memory, does not change the result",
        ge=1,
        synonyms=["micro_batch_size", "ppo_max_token_len_per_gpu", "per_device_train_batch_size"],
    )
    val_every: int = setting(
        10, "Steps between validations; 0: only at the end", ge=0, synonyms=["test_freq", "eval_steps"]
    )
    val_before: bool = setting(True, "Validate before the first step", synonyms=["val_before_train"])
    save_every: int = setting(
        50, "Steps between checkpoints; 0: only at the end", ge=0, synonyms=["save_freq", "save_steps"]
    )
    keep_checkpoints: int = setting(
        2, "Newest checkpoints that are kept beside the best one", ge=1, synonyms=["save_total_limit"]
    )
    max_failure_rate: float = setting(
        0.2, "Share of a step's rollouts that may fail before the run stops", ge=0.0, le=1.0
    )
    run_dir: Path = setting(Path("runs"), "Folder of the runs", synonyms=["output_dir", "default_local_dir"])
    name: str | None = setting(
        None,
        "Folder of this run below run_dir; null: made of env, model and algo",
        synonyms=["experiment_name", "run_name"],
    )
    resume: str | None = setting(None, "Folder of the run to continue; `--resume` sets it", synonyms=["resume_from"])
    replay: str | None = setting(
        None, "Folder of a run whose recorded rollouts are learned from, step by step, instead of playing new ones"
    )
    step_timeout: float = setting(1800.0, "Seconds after which a step that does not end is an error", gt=0.0)
    loggers: list[LoggerName] = setting(
        ["console", "jsonl", "tensorboard"],
        "Where metrics go: tensorboard, wandb, mlflow, trackio; the progress line and metrics.jsonl are always there",
        synonyms=["logger", "report_to"],
    )

    @field_validator("name", mode="after")
    @classmethod
    def _name_is_a_folder_name(cls, value: str | None) -> str | None:
        if value is not None and (value in ("", ".", "..") or "/" in value or "\0" in value):
            raise ValueError(f"{value!r} is not the name of a folder: trainer.run_dir says where runs are")
        return value

    @model_validator(mode="after")
    def _one_length(self) -> TrainerConfig:
        if self.total_steps is not None and self.total_epochs is not None:
            raise ValueError(
                f"trainer.total_steps={self.total_steps} and trainer.total_epochs={self.total_epochs} are both set: "
                f"set one of them to null"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _a_process_on_each_gpu(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not isinstance(data.get("gpus"), int):
            return data
        if data.get("workers") not in (None, data["gpus"]):
            raise ValueError(
                f"trainer.gpus={data['gpus']} means a process on each GPU, but trainer.workers={data['workers']}: "
                f"leave one of them out"
            )
        return {**data, "workers": data["gpus"]}

    @model_validator(mode="after")
    def _inline_is_one_process(self) -> TrainerConfig:
        if self.cluster == "inline" and self.workers > 1:
            raise ValueError(
                f"trainer.cluster=inline is one process, but trainer.workers={self.workers}: "
                f"lower it to 1, or use trainer.cluster=ray"
            )
        return self

    @field_validator("betas", mode="after")
    @classmethod
    def _betas_are_rates(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("expected two numbers of at least 0 and below 1")
        return value


class TrainConfig(ConfigModel):
    """A whole training run."""

    plugins: Names = setting(
        [], "Modules or Python files that register environments, loops, losses; imported in every process"
    )
    env: EnvConfig = setting(..., "the environment to train in, for example env=calculator-math")
    model: ModelConfig = section(ModelConfig, "The model to train")
    algo: AlgoConfig = section(AlgoConfig, "The algorithm")
    critic: CriticConfig = section(CriticConfig, "The value model, where the algorithm has one")
    rollout: TrainRolloutConfig = section(TrainRolloutConfig, "How episodes are played")
    data: DataConfig = section(DataConfig, "Which tasks")
    tools: ToolsConfig = section(ToolsConfig, "Tools of env=dataset")
    reward: RewardConfig = section(RewardConfig, "Who scores")
    trainer: TrainerConfig = section(TrainerConfig, "The run")

    @model_validator(mode="after")
    def _dataset_has_its_files(self) -> TrainConfig:
        provide_dataset(self.env, self.data, self.tools)
        return self

    @property
    def needs_critic(self) -> bool:
        """True if a value model is trained."""
        return self.critic.enabled if self.critic.enabled is not None else self.algo.needs_values

    @property
    def rollouts_per_step(self) -> int:
        return self.data.batch_size * self.rollout.n

    @property
    def data_seed(self) -> int:
        return self.trainer.seed if self.data.seed is None else self.data.seed

    @property
    def norm_length(self) -> int:
        """Divisor of the aggregation mode ``seq-mean-token-sum-norm``."""
        return self.rollout.max_response_length if self.algo.norm_length is None else self.algo.norm_length

    @property
    def overlong_lengths(self) -> tuple[int, int]:
        """(buffer, longest response) of the overlong shaping, in model tokens."""
        overlong = self.algo.overlong
        length = self.rollout.max_response_length if overlong.max_length is None else overlong.max_length
        return (max(1, length // 5) if overlong.buffer is None else overlong.buffer), length

    def num_steps(self, num_tasks: int) -> int:
        """Steps of the run with ``num_tasks`` training tasks, whole batches only."""
        if self.trainer.total_steps is not None:
            return self.trainer.total_steps
        return (self.trainer.total_epochs or 1) * (num_tasks // self.data.batch_size)

    @model_validator(mode="after")
    def _mini_batch_fits(self) -> TrainConfig:
        size, batch = self.trainer.mini_batch_size, self.rollouts_per_step
        if size is not None and size > batch:
            raise ValueError(
                f"trainer.mini_batch_size={size} is above the {batch} rollouts of a step "
                f"(data.batch_size={self.data.batch_size} x rollout.n={self.rollout.n}): lower it, or null for all"
            )
        return self

    @model_validator(mode="after")
    def _rollout_fits_micro_batch(self) -> TrainConfig:
        longest = self.rollout.max_prompt_length + self.rollout.max_response_length
        cap = self.trainer.max_tokens_per_micro_batch
        if longest > cap:
            raise ValueError(
                f"trainer.max_tokens_per_micro_batch={cap} is below the longest rollout of {longest} tokens "
                f"(rollout.max_prompt_length + rollout.max_response_length): raise it to {longest} or more"
            )
        return self

    @model_validator(mode="after")
    def _values_come_from_a_critic(self) -> TrainConfig:
        if self.algo.needs_values and not self.needs_critic:
            raise ValueError(
                f"critic.enabled=false: advantage {self.algo.advantage!r} is computed from a critic's values; "
                f"leave it null, or choose another advantage"
            )
        return self

    @model_validator(mode="after")
    def _overlong_buffer_fits(self) -> TrainConfig:
        buffer, length = self.overlong_lengths
        if self.algo.overlong.enabled and buffer > length:
            raise ValueError(
                f"algo.overlong.buffer={buffer} is above the {length} tokens of a response "
                f"(algo.overlong.max_length or rollout.max_response_length): every response would be penalised"
            )
        return self

    @model_validator(mode="after")
    def _filter_can_see_spread(self) -> TrainConfig:
        if self.rollout.n == 1 and self.algo.filter_groups.enabled:
            raise ValueError(
                "rollout.n=1: algo.filter_groups drops prompts whose samples do not differ, and needs at least 2"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> TrainConfig:
        if self.rollout.n == 1 and self.algo.advantage in GROUP_ADVANTAGES:
            raise ValueError(
                f"rollout.n=1: advantage {self.algo.advantage!r} compares the samples of a prompt and needs at least 2"
            )
        return self

"""The tasks of a run: listed from its environments, limited in number, without prompts that are too long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentgym import plugins, registration
from agentgym.errors import ConfigError
from agentgym.trainer.config import TrainConfig
from agentgym.types import SPLITS

if TYPE_CHECKING:
    from agentgym.env import Env
    from agentgym.settings import EnvConfig
    from agentgym.tokens import Renderer
    from agentgym.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRef:
    """A task by name: what the driver keeps of it."""

    env: str
    task_id: str
    difficulty: float | None = None
    """For curricula: ``difficulty`` in the task's data, or in its ``extra_info``."""


def load_tasks(config: TrainConfig, line: Callable[[str], None]) -> tuple[list[TaskRef], list[TaskRef]]:
    """Training and validation tasks of all environments, as ``data.*`` limits and filters them.

    Args:
        config: of the run.
        line: told how many tasks were dropped.

    Raises:
        ConfigError: a prompt is too long and ``data.truncation=error``, or all of an environment's are.
    """
    plugins.load(config.plugins)
    lengths = _PromptLengths(config) if config.data.measures_prompts else None
    found: dict[str, list[TaskRef]] = {split: [] for split in SPLITS}
    for member in config.env.members():
        made: Any = registration.make(member.name, **member.kwargs)
        env: Env = made.unwrapped
        try:
            for split, limit in zip(SPLITS, (config.data.train_size, config.data.val_size), strict=True):
                tasks = list(env.tasks(split))[:limit]
                if lengths is not None:
                    tasks = lengths.filter(env, member, split, tasks, line)
                found[split] += [
                    TaskRef(env=member.name, task_id=task.id, difficulty=difficulty_of(task)) for task in tasks
                ]
        finally:
            env.close()
    return found["train"], found["validation"]


def difficulty_of(task: Task) -> float | None:
    """``difficulty`` of the task's data or of its ``extra_info``; None where there is no number."""
    extra = task.data.get("extra_info")
    for source in (task.data, extra if isinstance(extra, Mapping) else {}):
        value = source.get("difficulty")
        if isinstance(value, int | float):
            return float(value)
    return None


class _PromptLengths:
    """Measures first prompts with the render of the rollouts, tool schemas included."""

    def __init__(self, config: TrainConfig) -> None:
        from agentgym.tokens import Renderer
        from agentgym.trainer.model import load_tokenizer

        tokenizer = load_tokenizer(config.model.path, revision=config.model.revision)
        self.renderer: Renderer = Renderer(tokenizer, template_kwargs=config.rollout.template_kwargs)
        self.limit = config.rollout.max_prompt_length
        self.data = config.data

    def filter(
        self, env: Env, member: EnvConfig, split: str, tasks: Sequence[Task], line: Callable[[str], None]
    ) -> list[Task]:
        """The tasks whose prompt fits. Raises `ConfigError` as the settings say."""
        kept, longest = [], (0, "")
        for task in tasks:
            length = self.measure(env, split, task)
            if length <= self.limit:
                kept.append(task)
            longest = max(longest, (length, task.id))
        dropped = len(tasks) - len(kept)
        where = f"env={member.name}: {dropped} of {len(tasks)} {split} prompts are longer than "
        where += f"rollout.max_prompt_length={self.limit} tokens (the longest: task {longest[1]} with {longest[0]})"
        if dropped and not self.data.filter_overlong_prompts:
            raise ConfigError(
                f"{where}: raise it, set data.filter_overlong_prompts=true to leave them out, or data.truncation=end"
            )
        if tasks and not kept:
            raise ConfigError(f"{where}: no task is left; raise it to at least {longest[0]}")
        if dropped:
            line(f"dropped {where}")
        return kept

    def measure(self, env: Env, split: str, task: Task) -> int:
        """Tokens of the task's first prompt."""
        observation, _ = env.reset(seed=0, options={"task_id": task.id, "split": split})
        return len(self.renderer.prompt(list(observation), [tool.tool_schema for tool in env.tools]))

"""`DatasetEnv`: plays the rows of data files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from agentgym.data.files import DataFile, read_file
from agentgym.data.rows import RowReader, check_same_schema
from agentgym.errors import ConfigError, boundary
from agentgym.objects import load_object
from agentgym.rewards.builtin import find_scorer, score_builtin, write_answer
from agentgym.tool import BaseTool
from agentgym.tool_env import Score, ToolEnv
from agentgym.tool_files import load_tools
from agentgym.types import AssistantTurn, Task


class DatasetEnv(ToolEnv):
    """Rows of parquet, json or jsonl files in the usual schema; see `agentgym.data.rows.RowReader`.

    Without a reward function the answer is scored by a built-in scorer of the row's ``data_source``.

    Args:
        train_files, val_files: of the splits ``train`` and ``validation``. With neither given there are a few rows to
            look at.
        prompt_key: column of the prompts.
        dataset: ``file.py:Class`` or ``module:Class``; ``Class(files, split, **dataset_kwargs)`` gives the rows instead
            of the files: an iterable of mappings with the same columns.
        dataset_kwargs: its further arguments.
        tool_files: YAML or Python files of tools; a row's ``tool_selection`` chooses among them.
        system_prompt: first message where a row has no system message.
        interaction: name of the simulated user, where a row names none.
        settings: of `ToolEnv`.
    """

    def __init__(
        self,
        *,
        train_files: Sequence[str] | None = None,
        val_files: Sequence[str] | None = None,
        prompt_key: str = "prompt",
        dataset: str | None = None,
        dataset_kwargs: Mapping[str, Any] | None = None,
        tool_files: Sequence[str] = (),
        system_prompt: str | None = None,
        interaction: str | Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.sample = train_files is None and val_files is None and dataset is None
        self.files = {"train": tuple(train_files or ()), "validation": tuple(val_files or ())}
        self.dataset = dataset
        self.dataset_kwargs = dict(dataset_kwargs or {})
        self.tools = _load_tools(tuple(tool_files)) if tool_files else ()
        self.reader = RowReader(prompt_key=prompt_key, tools=self.tools)
        self.system_prompt = system_prompt
        if interaction is not None:
            self.interaction = interaction

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self.files:
            raise ConfigError(f"environment {self.name!r} has no split {split!r}; expected train or validation")
        if self.sample:
            return self.reader.tasks([_sample(split)])
        key = "data.train_files" if split == "train" else "data.val_files"
        if not self.files[split]:
            raise ConfigError(f"env={self.name} needs {key}: parquet, json or jsonl files, e.g. {key}={split}.parquet")
        files = self._rows_of(split)
        tasks = self.reader.tasks(files)
        if split == "validation" and self.files["train"]:
            check_same_schema(self._rows_of("train"), files)
        return tasks

    def score(self, task: Task, answer: str) -> Score:
        return score_builtin(task.data_source, answer, task.data["reward_model"].get("ground_truth"))

    def oracle(self, task: Task) -> list[AssistantTurn]:
        return [AssistantTurn(content=write_answer(task.data_source, task.data["reward_model"].get("ground_truth")))]

    def check_scoring(self, task: Task) -> None:
        style = task.data["reward_model"].get("style", "rule")
        if style == "model":
            raise ConfigError(
                f"task {task.id!r}: reward_model.style=model needs a reward model: set reward.manager=model and "
                f"reward.options.model or reward.options.endpoint, or a function of your own with reward.path"
            )
        find_scorer(task.data_source, where=f"task {task.id!r}")

    def _rows_of(self, split: str) -> list[DataFile]:
        paths = self.files[split]
        if self.dataset is None:
            return [_read(path, os.stat(path).st_mtime_ns if os.path.exists(path) else 0) for path in paths]
        make = load_object(self.dataset, what="data.dataset")
        where = f"{', '.join(paths)} (through {self.dataset})"
        with boundary(f"data.dataset={self.dataset}"):
            rows: list[Any] = list(make(list(paths), split, **self.dataset_kwargs))
        if not rows:
            raise ConfigError(f"{where}: no rows; expected at least one")
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise ConfigError(f"{where}: row {index} is a {type(row).__name__}; expected a mapping of columns")
        return [DataFile(path=where, columns=list(dict.fromkeys(name for row in rows for name in row)), rows=rows)]


def _sample(split: str) -> DataFile:
    numbers = range(8) if split == "train" else range(8, 12)
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"How much is {i} plus {i}? Answer like this: #### 12"}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"split": split, "index": i},
        }
        for i in numbers
    ]
    return DataFile(path=f"sample-{split}", columns=list(rows[0]), rows=rows)


@lru_cache(maxsize=16)
def _load_tools(files: tuple[str, ...]) -> tuple[BaseTool, ...]:
    """One object of each tool serves all sessions of the process."""
    return tuple(load_tools(*files))


@lru_cache(maxsize=16)
def _read(path: str, _modified: int) -> DataFile:
    return read_file(path)

"""Settings of data files and their tools, for training and evaluation alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from agentgym.config import ConfigModel, Names, setting
from agentgym.objects import absolute
from agentgym.settings import EnvConfig


class FilesConfig(ConfigModel):
    """``data.train_files=...``: the files that ``env=dataset`` plays."""

    train_files: Names = setting(
        [], "Parquet, json or jsonl files of env=dataset to train on", synonyms=["train_file", "train_data"]
    )
    val_files: Names = setting(
        [], "The same for validation", synonyms=["val_file", "test_files", "eval_files", "validation_files"]
    )
    prompt_key: str = setting("prompt", "Column of the prompts")
    dataset: str | None = setting(
        None,
        "`file.py:Class` or `module:Class` that gives the rows instead: Class(files, split, **data.dataset_kwargs)",
        synonyms=["custom_cls", "dataset_class"],
    )
    dataset_kwargs: dict[str, Any] = setting({}, "Keyword arguments of that class")


class ToolsConfig(ConfigModel):
    """``tools=FILE``: the tools of ``env=dataset``."""

    chosen_by: ClassVar[str | None] = "path"

    path: Names = setting(
        [],
        "YAML lists of tools, or Python files of function tools, that rows of env=dataset may use",
        synonyms=["tool_config_path", "tools_path", "tools_config_file"],
    )


def dataset_kwargs(data: FilesConfig, tools: ToolsConfig) -> dict[str, Any]:
    """The arguments of environment ``dataset`` that these settings stand for; files with absolute paths."""
    return {
        "train_files": _absolute(data.train_files),
        "val_files": _absolute(data.val_files),
        "prompt_key": data.prompt_key,
        "dataset": None if data.dataset is None else absolute(data.dataset),
        "dataset_kwargs": dict(data.dataset_kwargs),
        "tool_files": _absolute(tools.path),
    }


DATASET = "dataset"
"""Name of the environment that plays data files."""


def provide_dataset(env: EnvConfig, data: FilesConfig, tools: ToolsConfig) -> None:
    """Hand the files to environment ``dataset``. Raises ``ValueError`` where they are given to another one."""
    if DATASET in env.names:
        env.provide(DATASET, dataset_kwargs(data, tools))
        return
    given = {"data.train_files": data.train_files, "data.val_files": data.val_files, "tools.path": tools.path}
    for key, value in given.items():
        if value:
            raise ValueError(f"{key}={','.join(value)} is read by env=dataset, but this is env={env.name}")


def _absolute(files: Sequence[str]) -> list[str]:
    return [str(Path(file).expanduser().resolve()) for file in files]

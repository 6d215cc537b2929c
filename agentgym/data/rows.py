"""From rows to tasks: every fault is found here, with file, row and column, before any model loads."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agentgym.data.files import DataFile
from agentgym.errors import ConfigError, did_you_mean
from agentgym.interaction import interactions
from agentgym.tool import BaseTool
from agentgym.toolbox import read_tools_kwargs, select_tools
from agentgym.types import Message, Task

ROLES = ("system", "user", "assistant", "tool")
STYLES = ("rule", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReader:
    """Turns the rows of files into tasks.

    A row has the columns ``prompt`` (messages, or the text of a user message), ``data_source``, ``reward_model``
    (``ground_truth`` and, optionally, ``style``: ``rule`` or ``model``) and, optionally, ``extra_info``
    (``tool_selection``, ``tools_kwargs``, ``interaction_kwargs``, ``difficulty``, whatever the scorer needs) and
    ``agent_name``. All columns but the prompt are in the task's ``data``.
    """

    prompt_key: str = "prompt"
    tools: Sequence[BaseTool] = field(default_factory=tuple)
    """All tools that rows may select."""

    def tasks(self, files: Sequence[DataFile]) -> list[Task]:
        """The tasks of all files, in order; ids are ``FILE-ROW``, rows counted from 0.

        Raises:
            ConfigError: naming file, row and column.
        """
        for file in files:
            self._check_columns(file)
        stems = [Path(file.path).stem for file in files]
        names = [stem if stems.count(stem) == 1 else f"{stem}.{number}" for number, stem in enumerate(stems)]
        return [
            self.task(_Row(file.path, index, row), f"{name}-{index}")
            for name, file in zip(names, files, strict=True)
            for index, row in enumerate(file.rows)
        ]

    def task(self, row: _Row, task_id: str) -> Task:
        """The task of one row."""
        plain = {name: row.plain(name, value) for name, value in row.values.items()}
        row = _Row(row.path, row.index, plain)
        extra = row.object("extra_info")
        reward_model = self._reward_model(row)
        selection = row.names("extra_info.tool_selection", extra.get("tool_selection"))
        tools_kwargs = row.object("extra_info.tools_kwargs", extra.get("tools_kwargs"))
        where = f"{row.where}, column extra_info"
        select_tools(self.tools, selection, where=where)
        read_tools_kwargs(self.tools, tools_kwargs, where=where)
        interaction = row.object("extra_info.interaction_kwargs", extra.get("interaction_kwargs"))
        name = interaction.get("name")
        if name is not None and name not in interactions:
            raise row.wrong("extra_info.interaction_kwargs", name, f"one of {', '.join(interactions.names())}")
        return Task(
            id=task_id,
            prompt=self._prompt(row),
            data={**plain, "reward_model": reward_model, "extra_info": extra},
            tool_selection=selection,
            tools_kwargs=tools_kwargs,
            interaction_kwargs=interaction,
            agent_name=row.text("agent_name", required=False),
            data_source=row.text("data_source") or "",
        )

    def _check_columns(self, file: DataFile) -> None:
        for name in (self.prompt_key, "data_source", "reward_model"):
            if name not in file.columns:
                near = did_you_mean(name, file.columns)
                hint = " (data.prompt_key names the column of the prompts)" if name == self.prompt_key else ""
                raise ConfigError(
                    f"{file.path}: row 0: there is no column {name!r}{hint}.{near} "
                    f"Columns: {', '.join(file.columns) or 'none'}"
                )

    def _reward_model(self, row: _Row) -> dict[str, Any]:
        reward_model = row.object("reward_model", required=True)
        style = reward_model.get("style", "rule")
        if style not in STYLES:
            raise row.wrong("reward_model.style", style, " or ".join(STYLES))
        if style == "rule" and _is_null(reward_model.get("ground_truth")):
            raise row.wrong("reward_model.ground_truth", reward_model.get("ground_truth"), "the true answer")
        return reward_model

    def _prompt(self, row: _Row) -> str | list[Message]:
        value = row.values.get(self.prompt_key)
        if isinstance(value, str):
            value = row.decoded(value)
        if isinstance(value, str) and value.strip():
            return value
        if not isinstance(value, list) or not value:
            raise row.wrong(self.prompt_key, value, "a list of messages, or the text of a user message")
        for number, message in enumerate(value):
            self._check_message(row, f"{self.prompt_key}[{number}]", message)
        return value

    def _check_message(self, row: _Row, column: str, message: Any) -> None:
        if not isinstance(message, dict) or "role" not in message:
            raise row.wrong(column, message, "a message {'role': ..., 'content': ...}")
        if message["role"] not in ROLES:
            raise row.wrong(f"{column}.role", message["role"], f"one of {', '.join(ROLES)}")
        if "content" not in message and "tool_calls" in message:
            message["content"] = ""
        if not isinstance(message.get("content"), str | list):
            raise row.wrong(f"{column}.content", message.get("content"), "text or a list of parts")


@dataclass(frozen=True, slots=True)
class _Row:
    """One row, and how to say what is wrong with it."""

    path: str
    index: int
    values: Mapping[str, Any]

    @property
    def where(self) -> str:
        return f"{self.path}: row {self.index}"

    def wrong(self, column: str, value: Any, expected: str) -> ConfigError:
        shown = "null or missing" if _is_null(value) else f"{value!r}"[:80]
        known = ", ".join(self.values)
        return ConfigError(f"{self.where}, column {column}: {shown}; expected {expected}. Columns: {known}")

    def text(self, column: str, *, required: bool = True) -> str | None:
        value = self.values.get(column)
        if _is_null(value) and not required:
            return None
        if not isinstance(value, str):
            raise self.wrong(column, value, "text")
        return value

    def object(self, column: str, value: Any = ..., *, required: bool = False) -> dict[str, Any]:
        """An object, also as JSON text; an empty one where there is none."""
        value = self.values.get(column) if value is ... else value
        if isinstance(value, str):
            value = self.decoded(value)
        if _is_null(value) and not required:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(column, value, "an object")
        return value

    def names(self, column: str, value: Any) -> list[str] | None:
        if _is_null(value):
            return None
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.wrong(column, value, "a list of names, [] for none, or null for all")
        return value

    def decoded(self, text: str) -> Any:
        """What JSON text of an object or a list stands for; the text itself if it is none."""
        if not text.lstrip().startswith(("{", "[")):
            return text
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    def plain(self, column: str, value: Any) -> Any:
        """``value`` as plain data: numpy arrays as lists, dates as ISO text. A `ConfigError` for anything else."""
        if value is None or isinstance(value, str | bool | int | float):
            return value
        if isinstance(value, Mapping):
            return {self._key(column, name): self.plain(f"{column}.{name}", part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(f"{column}[{number}]", part) for number, part in enumerate(value)]
        if isinstance(value, np.ndarray | np.generic):
            return self.plain(column, value.tolist())
        if isinstance(value, datetime.date | datetime.time):
            return value.isoformat()
        if isinstance(value, decimal.Decimal):
            return float(value)
        kind = type(value).__name__
        raise ConfigError(
            f"{self.where}, column {column}: {value!r:.60} of type {kind} cannot be stored as JSON; expected text, "
            f"numbers, true, false, null, lists and objects of them"
        )

    def _key(self, column: str, name: Any) -> str:
        if not isinstance(name, str):
            raise ConfigError(f"{self.where}, column {column}: key {name!r} is not text")
        return name


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


Described = Mapping[str, frozenset[str]]


def check_same_schema(train: Sequence[DataFile], validation: Sequence[DataFile]) -> None:
    """Raise `ConfigError` where validation files have other columns, or values of another kind, than training files.

    Compared are the names of the columns, the kind of their values (text, number, list, object), and those of
    ``reward_model.ground_truth``. Nulls fit everything.
    """
    expected, origin = _described(train[0]), train[0].path
    for file in [*train[1:], *validation]:
        found = _described(file)
        for name in [*expected, *found]:
            if name not in found or name not in expected:
                has, lacks = (origin, file.path) if name in expected else (file.path, origin)
                top = [column for column in (expected if has == file.path else found) if "." not in column]
                raise ConfigError(
                    f"{file.path}: row 0, column {name}: {has} has this column, {lacks} does not; training and "
                    f"validation files need the same columns. Columns of {lacks}: {', '.join(top)}"
                )
            if expected[name] and found[name] and not expected[name] & found[name]:
                row = next(index for index, row in enumerate(file.rows) if _kind(_at(row, name)) in found[name])
                raise ConfigError(
                    f"{file.path}: row {row}, column {name}: holds {_words(found[name])}, in {origin} it holds "
                    f"{_words(expected[name])}; training and validation files need the same schema"
                )


_TRUTH = "reward_model.ground_truth"


def _described(file: DataFile) -> Described:
    names = [*file.columns, *([_TRUTH] if "reward_model" in file.columns else [])]
    return {name: frozenset(filter(None, (_kind(_at(row, name)) for row in file.rows))) for name in names}


def _at(row: Mapping[str, Any], name: str) -> Any:
    if name != _TRUTH:
        return row.get(name)
    value = row.get("reward_model")
    return value.get("ground_truth") if isinstance(value, Mapping) else None


def _kind(value: Any) -> str:
    kinds: Sequence[tuple[Callable[[Any], bool], str]] = (
        (_is_null, ""),
        (lambda v: isinstance(v, bool | np.bool_), "true or false"),
        (lambda v: isinstance(v, int | float | np.number), "numbers"),
        (lambda v: isinstance(v, str), "text"),
        (lambda v: isinstance(v, Mapping), "objects"),
    )
    return next((name for matches, name in kinds if matches(value)), "lists")


def _words(kinds: frozenset[str]) -> str:
    return " and ".join(sorted(kinds))

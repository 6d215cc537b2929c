"""Recorded rollouts, read for scoring, replaying and viewing: agentgym's own and plain message logs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agentgym.config import Layer, read_yaml
from agentgym.errors import ConfigError
from agentgym.evaluation.results import ROLLOUTS, complete_lines
from agentgym.messages import from_openai_messages
from agentgym.rollout import Rollout
from agentgym.types import Outcome, RolloutStatus

CONVERSATIONS = ("messages", "conversation", "conversations")
"""Keys under which message logs hold their messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One recorded rollout, and where it stands."""

    rollout: Rollout
    place: str
    """File and line, for messages."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The other fields of a message log's line: ``ground_truth``, ``data_source``, ``extra_info`` ..."""
    own: bool = True
    """Written by agentgym; False: a message log."""


def read_records(path: Path) -> list[Record]:
    """All rollouts in a file, or in the folder of an evaluation or a training run.

    A line is a rollout as agentgym writes it, an object with ``messages`` in OpenAI's form (``task_id``, ``reward``
    and others beside it are used), or a bare list of messages.

    Raises:
        ConfigError: nothing is there, or a line is none of these.
    """
    records: list[Record] = []
    for file in rollout_files(path):
        for number, line in enumerate(complete_lines(file), 1):
            place = f"{file}, line {number}"
            try:
                records.append(_read(json.loads(line), place, number))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{place}: not a recorded rollout ({type(error).__name__}: {error})") from None
    if not records:
        raise ConfigError(f"{path}: no recorded rollouts in it")
    return records


def rollout_files(path: Path) -> list[Path]:
    """The files of rollouts that ``path`` means."""
    if path.is_file():
        return [path]
    found = [path / ROLLOUTS] if (path / ROLLOUTS).is_file() else sorted((path / "rollouts").glob("*.jsonl"))
    if not found:
        raise ConfigError(
            f"{path}: no rollouts there; expected a file of rollouts (jsonl), or the folder of an evaluation or a run"
        )
    return found


def settings_beside(path: Path, sections: Mapping[str, type[BaseModel] | None]) -> list[Layer]:
    """The settings under which the rollouts were played, if they are there.

    Args:
        path: of the rollouts.
        sections: top-level keys that are wanted; of one with a model only that model's keys.
    """
    folders = [path, path.parent, path.parent.parent] if path.is_file() else [path]
    file = next((folder / "config.yaml" for folder in folders if (folder / "config.yaml").is_file()), None)
    if file is None:
        return []
    recorded = read_yaml(file)
    data = {
        name: recorded[name]
        if model is None
        else {key: value for key, value in recorded[name].items() if key in model.model_fields}
        for name, model in sections.items()
        if name in recorded
    }
    return [Layer(str(file), data)]


def _read(data: Any, place: str, number: int) -> Record:
    if isinstance(data, list):
        data = {"messages": data}
    if "outcome" in data and "conversation" in data:
        names = {entry.name for entry in fields(Rollout)}
        return Record(
            rollout=Rollout.from_dict({key: value for key, value in data.items() if key in names}), place=place
        )
    key = next((key for key in CONVERSATIONS if isinstance(data.get(key), list)), None)
    if key is None:
        raise ConfigError(
            f"{place}: neither a rollout of agentgym nor a message log; expected an object with 'messages', "
            f"found {', '.join(map(str, data))}"
        )
    return _message_log(data, data[key], place, number)


def _message_log(data: Mapping[str, Any], messages: list[Any], place: str, number: int) -> Record:
    try:
        conversation = from_openai_messages(messages)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    turns = [message for message in conversation if message["role"] == "assistant"]
    reward = data.get("reward")
    task_id = str(data.get("task_id") or data.get("id") or f"line-{number}")
    rollout = Rollout(
        env_id=str(data.get("env_id") or ""),
        task_id=task_id,
        group=task_id,
        sample=int(data.get("sample") or 0),
        outcome=Outcome(
            status=RolloutStatus.COMPLETED,
            reward=None if reward is None else float(reward),
            num_turns=len(turns),
            tool_calls=sum(len(turn.get("tool_calls", ())) for turn in turns),
        ),
        conversation=conversation,
        split=str(data.get("split") or ""),
        seed=data.get("seed"),
        data_source=str(data.get("data_source") or ""),
    )
    return Record(rollout=rollout, place=place, extra=data, own=False)

"""``agentgym view``: recorded rollouts in the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.config import read_yaml
from agentgym.console import Console
from agentgym.errors import ConfigError, did_you_mean
from agentgym.messages import text_of

if TYPE_CHECKING:
    from agentgym.evaluation.records import Record
    from agentgym.rollout import Rollout

Piece = tuple[str, str]
"""Text and style."""

STYLES = {"assistant": "green", "system": "dim", "user": "cyan", "tool": "yellow"}
MASKED, SAMPLED = "dim", "green"


def view_command(
    path: Path, *, task: str | None, sample: int | None, only: str | None, limit: int, tokens: bool
) -> int:
    """Print the chosen rollouts. Returns the exit code."""
    from agentgym.evaluation.records import read_records

    records = chosen(read_records(path), task=task, sample=sample, only=only)
    decode = _decoder(path) if tokens else None
    console = Console()
    for record in records[:limit]:
        for line in rollout_lines(record, decode):
            _print(console, line)
    rest = len(records) - limit
    more = f"; {rest} more (--limit {len(records)}, or choose with --task, --sample, --only)" if rest > 0 else ""
    console.line(f"{min(limit, len(records))} of {len(records)} rollouts{more}")
    return 0


def chosen(records: Sequence[Record], *, task: str | None, sample: int | None, only: str | None) -> list[Record]:
    """The rollouts that are asked for. Raises `ConfigError` where there are none.

    Args:
        only: ``failed`` (could not be scored), ``solved`` (reward of at least 1), ``unsolved``, or a status.
    """
    found = [
        record
        for record in records
        if (task is None or record.rollout.task_id == task)
        and (sample is None or record.rollout.sample == sample)
        and (only is None or _is(record.rollout, only))
    ]
    if not found:
        known = {record.rollout.task_id for record in records}
        hint = did_you_mean(task, known) if task is not None and task not in known else ""
        raise ConfigError(
            f"no such rollout among {len(records)} (--task {task} --sample {sample} --only {only}).{hint}"
        )
    return found


def _is(rollout: Rollout, only: str) -> bool:
    if only == "failed":
        return rollout.reward is None
    if only in ("solved", "unsolved"):
        return rollout.reward is not None and (rollout.reward >= 1.0) == (only == "solved")
    return str(rollout.status) == only


def rollout_lines(record: Record, decode: Any = None) -> Iterator[list[Piece]]:
    """A rollout as lines of styled pieces: a title, the conversation (or its tokens), what went wrong."""
    rollout, outcome = record.rollout, record.rollout.outcome
    reward = "not scored" if outcome.reward is None else f"reward {outcome.reward:g}"
    title = f"== {rollout.task_id} / {rollout.sample}  {outcome.status}  {reward}  {outcome.num_turns} turns"
    yield [(title, "bold red" if outcome.status.failed else "bold")]
    if decode is not None and rollout.segments:
        yield from _token_lines(rollout, decode)
    else:
        for message in rollout.conversation:
            name = f" {message['name']}" if "name" in message else ""
            style = STYLES.get(message["role"], "")
            yield [(f"[{message['role']}{name}]", f"bold {style}")]
            if text := text_of(message):
                yield [(text, style)]
            for call in message.get("tool_calls", ()):
                function = call["function"]
                arguments = json.dumps(function["arguments"], ensure_ascii=False)
                yield [(f"-> {function['name']}({arguments})", style)]
    if outcome.reward_components:
        yield [("components " + ", ".join(f"{k} {v}" for k, v in outcome.reward_components.items()), "")]
    if outcome.error:
        yield [(outcome.error, "red")]
    yield [("", "")]


def _token_lines(rollout: Rollout, decode: Any) -> Iterator[list[Piece]]:
    """What the model saw, token by token: what it sampled (trained on) in one colour, all else in another."""
    for number, segment in enumerate(rollout.segments):
        sampled, total = segment.num_model_tokens, len(segment.response_ids)
        yield [(f"[segment {number}: {len(segment.prompt_ids)} prompt tokens, {sampled} of {total} sampled]", "bold")]
        pieces: list[Piece] = [(decode(segment.prompt_ids), MASKED)]
        for span in segment.spans:
            style = SAMPLED if span.kind == "model" else MASKED
            pieces.append((decode(segment.response_ids[span.start : span.stop]), style))
        yield pieces


def _decoder(path: Path) -> Any:
    from agentgym.trainer.model import load_tokenizer

    folders = [path, path.parent, path.parent.parent]
    files = [folder / "config.yaml" for folder in folders if (folder / "config.yaml").is_file()]
    if not files:
        raise ConfigError(f"--tokens: {path} has no config.yaml beside it that names the model whose tokens these are")
    model = read_yaml(files[0])["model"]
    return load_tokenizer(model["path"], revision=model.get("revision")).decode


def _print(console: Console, pieces: Sequence[Piece]) -> None:
    """One line; in colour on a terminal."""
    from rich.console import Console as RichConsole
    from rich.text import Text

    text = Text()
    for piece, style in pieces:
        text.append(piece, style)
    RichConsole(file=console.file, highlight=False, soft_wrap=True).print(text)

"""The results of an evaluation on disk: every rollout is a line as soon as it ends, so that nothing is lost.

    config.yaml      the resolved configuration
    rollouts.jsonl   one rollout per line; while the evaluation runs in the order in which they ended
    report.json, report.html

A line is written by a single call. Whatever stops the process, at most the last line is incomplete; it is left out when
the file is read. Of two lines of one (task, sample) the one that did not fail counts, else the later one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from agentgym.atomic import write_atomically
from agentgym.errors import ConfigError
from agentgym.evaluation.rows import Key, Row
from agentgym.rollout import Rollout

ROLLOUTS = "rollouts.jsonl"


class Results:
    """The rows of an evaluation, kept in memory and, with a folder, on disk.

    Args:
        folder: where to; None: memory only.
        resume: keep what is there; else a folder that holds rollouts is refused.

    Raises:
        ConfigError: the folder holds rollouts and ``resume`` is off, or a line is no rollout.
    """

    def __init__(self, folder: Path | None, *, resume: bool = False) -> None:
        self.folder = folder
        self._rows: dict[Key, Row] = {}
        self._lines: dict[Key, bytes] = {}
        self._file: BinaryIO | None = None
        if folder is None:
            return
        path = folder / ROLLOUTS
        if path.exists():
            if not resume:
                raise ConfigError(
                    f"output={folder} holds the rollouts of an evaluation: go on with it (--resume), or choose another"
                )
            for line in complete_lines(path):
                self._keep(line)
        folder.mkdir(parents=True, exist_ok=True)
        self._rewrite(self._lines.values())
        self._file = path.open("ab", buffering=0)

    @property
    def rows(self) -> Mapping[Key, Row]:
        """One row per (task, sample)."""
        return self._rows

    def missing(self, wanted: Sequence[Key]) -> list[Key]:
        """What is to be played of ``wanted``: what has no row yet, or failed."""
        return [key for key in wanted if key not in self._rows or self._rows[key].status.failed]

    def add(self, rollout: Rollout) -> None:
        """Keep the rollout; on disk when this returns."""
        line = (
            json.dumps(rollout.to_dict(), ensure_ascii=False, default=str).encode("utf-8", "backslashreplace") + b"\n"
        )
        self._keep(line)
        if self._file is not None:
            self._file.write(line)

    def close(self, order: Sequence[Key]) -> None:
        """Bring the lines into ``order``, one per key, those of other keys behind; the lines themselves stay as they
        are, to the byte."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        places = {key: place for place, key in enumerate(order)}
        ordered = sorted(self._lines, key=lambda key: (places.get(key, len(places)), key))
        self._rewrite(self._lines[key] for key in ordered)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file; what was not brought into order by `close` is complete all the same."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _keep(self, line: bytes) -> None:
        try:
            row = Row.of(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            where = f"{self.folder}/{ROLLOUTS}"
            raise ConfigError(f"{where}: not the line of a rollout ({type(error).__name__}: {error})") from None
        known = self._rows.get(row.key)
        if known is not None and row.status.failed and not known.status.failed:
            return
        self._rows[row.key] = row
        if self.folder is not None:
            self._lines[row.key] = line

    def _rewrite(self, lines: Iterable[bytes]) -> None:
        assert self.folder is not None
        temporary = self.folder / f".{ROLLOUTS}"
        with temporary.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.folder / ROLLOUTS)


def complete_lines(path: Path) -> list[bytes]:
    """The lines that end with a newline; what a killed process left half-written is not among them."""
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n") and line.strip()]


def read_rows(folder: Path) -> list[Row]:
    """The rows of an evaluation's folder, or of a file of rollouts. Raises `ConfigError` if there are none."""
    path = folder / ROLLOUTS if folder.is_dir() else folder
    if not path.is_file():
        raise ConfigError(f"{folder}: no evaluation there; expected a folder with {ROLLOUTS}, or such a file")
    rows: dict[Key, Row] = {}
    for number, line in enumerate(complete_lines(path), 1):
        try:
            row = Row.of(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: not a rollout ({type(error).__name__}: {error})") from None
        if not (row.key in rows and row.status.failed and not rows[row.key].status.failed):
            rows[row.key] = row
    return list(rows.values())


def write_json(path: Path, data: Any) -> None:
    """Write a file whole or not at all."""
    write_atomically(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")

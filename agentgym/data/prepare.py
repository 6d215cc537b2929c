"""Well-known data sets as data files: ``agentgym data prepare NAME``."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym.data.files import DataFile, read_file, write_rows
from agentgym.errors import ConfigError, did_you_mean

Rows = list[dict[str, Any]]

GSM8K_URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/{split}.jsonl"
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_TRUTH = re.compile(r"####\s*(-?[\d.,]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a data set becomes rows."""

    url: str
    """Where its files are, with ``{split}``."""
    splits: Mapping[str, str]
    """Name of the written file -> split of the source."""
    convert: Callable[[DataFile, str], Rows]


def prepare(name: str, *, source: Path | None, output: Path, timeout: float = 60.0) -> list[str]:
    """Write ``train.parquet`` and ``val.parquet`` into ``output``.

    Args:
        name: of the data set.
        source: a folder with its files (``train.jsonl``, ``test-00000-of-00001.parquet``, ...); None: they are
            downloaded.
        output: folder.
        timeout: seconds for the download of one file.

    Returns:
        One line for each file written.

    Raises:
        ConfigError: an unknown name, a missing or malformed source, or no network.
    """
    if name not in RECIPES:
        raise ConfigError(
            f"data prepare {name}: no such data set.{did_you_mean(name, RECIPES)} Known: {', '.join(RECIPES)}"
        )
    recipe = RECIPES[name]
    found = {
        target: recipe.convert(
            read_file(_find(source, split) if source else _download(recipe, split, output, timeout)), split
        )
        for target, split in recipe.splits.items()
    }
    lines = []
    for target, rows in found.items():
        path = output / f"{target}.parquet"
        write_rows(path, rows)
        lines.append(f"{path}: {len(rows)} rows")
    return lines


def _find(source: Path, split: str) -> Path:
    """The file of a split in a folder: the first one whose name begins with it."""
    if not source.is_dir():
        raise ConfigError(f"--source {source}: no such folder; expected one with files train.* and {split}.*")
    for suffix in (".parquet", ".jsonl", ".json"):
        for path in sorted(source.glob(f"{split}*{suffix}")):
            return path
    names = ", ".join(sorted(path.name for path in source.iterdir())) or "nothing"
    raise ConfigError(f"--source {source}: no file {split}*.parquet, .jsonl or .json there; it has {names}")


def _download(recipe: Recipe, split: str, output: Path, timeout: float) -> Path:
    """Fetch a file, once: it is kept in ``output/source``."""
    url = recipe.url.format(split=split)
    path = output / "source" / url.rpartition("/")[2]
    if path.is_file():
        return path
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            content: bytes = response.read()
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"{url} cannot be downloaded ({reason}): get the file elsewhere, put it into a folder as {path.name} and "
            f"pass --source FOLDER"
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def gsm8k_rows(file: DataFile, split: str) -> Rows:
    """Grade-school mathematics (Cobbe et al. 2021): ``question`` and ``answer`` with the number after ``####``."""
    rows = []
    for index, row in enumerate(file.rows):
        question, answer = _texts(file, index, row, ("question", "answer"))
        truth = _TRUTH.search(answer)
        if truth is None:
            raise ConfigError(f"{file.path}: row {index}, column answer: no number after '####' in {answer[-60:]!r}")
        rows.append(
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"{question} {GSM8K_INSTRUCTION}"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": truth[1].replace(",", "").rstrip(".")},
                "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
            }
        )
    return rows


def _texts(file: DataFile, index: int, row: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    for column in columns:
        if not isinstance(row.get(column), str):
            raise ConfigError(
                f"{file.path}: row {index}, column {column}: {row.get(column)!r}; expected text. "
                f"Columns: {', '.join(file.columns)}"
            )
    return [row[column] for column in columns]


RECIPES: Mapping[str, Recipe] = {
    "gsm8k": Recipe(url=GSM8K_URL, splits={"train": "train", "val": "test"}, convert=gsm8k_rows)
}

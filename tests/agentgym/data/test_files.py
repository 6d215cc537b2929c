"""What is written is what is read, and what Arrow fills in is taken out again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentgym.data import read_file, write_rows
from agentgym.errors import ConfigError


def tools_row(tools_kwargs: Any, **extra: Any) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": "hi"}],
        "data_source": "s",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"tools_kwargs": tools_kwargs, **extra},
    }


# E2
KWARGS = [
    {"calculator": {"create_kwargs": {"precision": 2}}},
    {"search": {"create_kwargs": {"k": 3}}},
    {},
    {"calculator": {"create_kwargs": {"mode": "exact"}}, "search": {"create_kwargs": {"k": 1}}},
]


def test_rows_of_a_foreign_parquet_file_have_their_own_keys_alone(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    rows = [tools_row(kwargs, answer=None if i else "x") for i, kwargs in enumerate(KWARGS)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    read = read_file(path).rows
    assert [row["extra_info"]["tools_kwargs"] for row in read] == KWARGS
    # a field that rows have in common keeps its null
    assert [row["extra_info"]["answer"] for row in read] == ["x", None, None, None]


def test_nulls_that_every_row_wrote_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    rows = [tools_row({"calculator": {"create_kwargs": {"limit": None}}}) for _ in range(2)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert read_file(path).rows[0]["extra_info"]["tools_kwargs"] == rows[0]["extra_info"]["tools_kwargs"]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.json"])
def test_what_write_rows_writes_comes_back_equal(tmp_path: Path, name: str) -> None:
    rows = [tools_row({**kwargs, "note": None}, selection=[] if i else ["a"]) for i, kwargs in enumerate(KWARGS)]
    write_rows(tmp_path / name, rows)
    assert list(read_file(tmp_path / name).rows) == rows
    assert read_file(tmp_path / name).columns == ["prompt", "data_source", "reward_model", "extra_info"]


def test_a_list_that_is_empty_in_the_first_thousand_rows_loads(tmp_path: Path) -> None:
    rows = [tools_row({}, tool_selection=[] if i < 1000 else ["calculator"]) for i in range(1001)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_file(path).rows
    assert read[0]["extra_info"]["tool_selection"] == []
    assert read[1000]["extra_info"]["tool_selection"] == ["calculator"]


def test_arrow_maps_are_objects(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    kind = pa.map_(pa.string(), pa.int64())
    pq.write_table(pa.table({"m": pa.array([{"a": 1}, {"b": 2}], type=kind)}), path)
    assert [row["m"] for row in read_file(path).rows] == [{"a": 1}, {"b": 2}]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("rows.parquet", "", ["rows.parquet", "empty", "0 bytes"]),
        ("rows.parquet", "not parquet", ["rows.parquet", "not a parquet file"]),
        ("rows.jsonl", "", ["rows.jsonl", "empty"]),
        ("rows.jsonl", "\n\n", ["rows.jsonl", "no rows"]),
        ("rows.json", "[]", ["rows.json", "no rows"]),
        ("rows.json", '{"a": 1}', ["rows.json", "dict", "list of objects"]),
        ("rows.jsonl", '{"a": 1}\n{"a": \n', ["rows.jsonl", "line 2", "not JSON"]),
        ("rows.jsonl", '{"a": 1}\n[1]\n', ["rows.jsonl", "row 1", "object"]),
        ("rows.jsonl", b'{"a": "\xff"}\n', ["rows.jsonl", "UTF-8"]),
        ("rows.csv", "a,b\n", ["rows.csv", ".parquet"]),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, name: str, content: str | bytes, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_file(write(tmp_path / name, content))
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_parquet_file_without_rows_and_a_missing_file_are_errors(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], type=pa.string())}), tmp_path / "train.parquet")
    with pytest.raises(ConfigError, match="no rows"):
        read_file(tmp_path / "train.parquet")
    with pytest.raises(ConfigError, match=r"Did you mean 'train\.parquet'"):
        read_file(tmp_path / "trian.parquet")

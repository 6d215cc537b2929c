"""Reading and writing data files: parquet, json, jsonl. What was written is what is read.

Arrow gives every value of a nested column the keys of all of them, with nulls where a row had none:
``{"calculator": {...}}`` in one row and ``{"search": {...}}`` in another come back as
``{"calculator": {...}, "search": None}`` and the reverse. That is undone here, as far as a file can tell:

* A null struct or list inside a struct is taken for such filling and dropped.
* A null text or number is dropped where keys are names that vary by row (two levels deep and more, e.g. the arguments
  of a tool), and kept on the first level of a column (``extra_info.answer``), where rows have fields in common.
* A field that is null in every row was written as null, and stays.

Files of `write_rows` keep nested columns as JSON text, so that nothing is lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".parquet", ".jsonl", ".json")
JSON_COLUMNS = b"agentgym.json_columns"
"""Key of a parquet file's metadata: names of the columns that hold JSON text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """The rows of one file."""

    path: str
    columns: Sequence[str]
    """All columns that occur, in the order of their first occurrence."""
    rows: Sequence[Mapping[str, Any]]


def read_file(path: str | Path) -> DataFile:
    """Read one file.

    Raises:
        ConfigError: no such file, another format, nothing in it, or a line that is not a JSON object.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        beside = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(f"data file {str(path)!r} does not exist.{did_you_mean(path.name, beside)}")
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"data file {str(path)!r}: expected a name that ends in {', '.join(SUFFIXES)}")
    if path.stat().st_size == 0:
        raise ConfigError(f"data file {str(path)!r} is empty (0 bytes); expected at least one row")
    rows = _read_parquet(path) if path.suffix == ".parquet" else _read_json(path)
    if not rows:
        raise ConfigError(f"data file {str(path)!r} has no rows; expected at least one")
    return DataFile(path=str(path), columns=list(dict.fromkeys(name for row in rows for name in row)), rows=rows)


def write_rows(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of plain data as parquet, jsonl or json, by the name's ending; `read_file` gives equal rows back."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    if path.suffix == ".jsonl":
        temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        temporary.write_text(json.dumps(list(rows), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    elif path.suffix == ".parquet":
        _write_parquet(temporary, rows)
    else:
        raise ConfigError(f"data file {str(path)!r}: expected a name that ends in {', '.join(SUFFIXES)}")
    temporary.rename(path)


# -- JSON --------------------------------------------------------------------------------------------------------------


def _read_json(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"data file {str(path)!r} is not UTF-8 text: {error}") from None
    if path.suffix == ".jsonl":
        found = [_parse(path, line, number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    else:
        found = _parse(path, text, None)
        if not isinstance(found, list):
            raise ConfigError(f"data file {str(path)!r} holds a {type(found).__name__}; expected a list of objects")
    for index, row in enumerate(found):
        if not isinstance(row, dict):
            raise ConfigError(f"{path}: row {index} is {row!r:.60}; expected an object with the columns as keys")
    return found


def _parse(path: Path, text: str, line: int | None) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {line}, column {error.colno}" if line is not None else f"line {error.lineno}"
        raise ConfigError(f"{path}: {where} is not JSON: {error.msg}") from None


# -- parquet -----------------------------------------------------------------------------------------------------------


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path).read()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise ConfigError(f"data file {str(path)!r} is not a parquet file that can be read: {error}") from None
    coded = json.loads((table.schema.metadata or {}).get(JSON_COLUMNS, b"[]"))
    columns = {name: _column(path, table, name, coded) for name in table.column_names}
    return [{name: values[row] for name, values in columns.items()} for row in range(table.num_rows)]


def _column(path: Path, table: pa.Table, name: str, coded: Sequence[str]) -> list[Any]:
    column = table.column(name)
    try:
        values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{path}: column {name}: {error}") from None
    if name in coded:
        return [None if value is None else json.loads(value) for value in values]
    return [_unfilled(value, column.type, depth=0) for value in values]


def _unfilled(value: Any, kind: pa.DataType, *, depth: int) -> Any:
    """``value`` of an Arrow column without the nulls that Arrow filled in; see the module."""
    import pyarrow as pa

    if value is None:
        return None
    if pa.types.is_struct(kind):
        result = {}
        for index in range(kind.num_fields):
            field = kind.field(index)
            part = value[field.name]
            if part is None and not pa.types.is_null(field.type) and (depth > 0 or pa.types.is_nested(field.type)):
                continue
            result[field.name] = _unfilled(part, field.type, depth=depth + 1)
        return result
    if pa.types.is_map(kind):
        return {name: _unfilled(part, kind.item_type, depth=depth + 1) for name, part in value.items()}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [_unfilled(part, kind.value_type, depth=depth + 1) for part in value]
    return value


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows for name in row))
    coded = [name for name in names if any(isinstance(row.get(name), dict | list) for row in rows)]
    columns = {
        name: [
            json.dumps(row[name], ensure_ascii=False) if name in coded and row.get(name) is not None else row.get(name)
            for row in rows
        ]
        for name in names
    }
    table = pa.table(columns)
    pq.write_table(table.replace_schema_metadata({JSON_COLUMNS: json.dumps(coded).encode()}), path)

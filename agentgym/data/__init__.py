"""Data files: rows in the field's usual schema, checked and turned into tasks before any model loads."""

from agentgym.data.files import DataFile, read_file, write_rows
from agentgym.data.rows import RowReader

__all__ = ["DataFile", "RowReader", "read_file", "write_rows"]

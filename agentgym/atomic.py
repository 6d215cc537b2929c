"""Files that are whole whenever they are there."""

from __future__ import annotations

from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write a text file: whoever reads it, also after this process was killed, finds the old content or the new one."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)

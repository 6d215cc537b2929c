"""``agentgym compare``: two evaluations side by side."""

from __future__ import annotations

import json
from pathlib import Path

from agentgym.console import Console


def compare_command(first: Path, second: Path, *, everything: bool, as_json: bool) -> int:
    """Print the comparison. Returns the exit code."""
    from agentgym.evaluation.compare import compare

    found = compare(first, second)
    console = Console()
    if as_json:
        console.line(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
        return 0
    for line in found.lines(None if everything else 20):
        console.line(line)
    return 0

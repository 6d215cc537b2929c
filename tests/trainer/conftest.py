"""Makes `factories` and `runs` importable beside the tests; the environment of small runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that registers the environment ``parity-test``."""
    from runs import PLUGIN

    path = tmp_path_factory.mktemp("plugin") / "parity_env.py"
    path.write_text(PLUGIN)
    return path

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import agentgym.tools


def test_the_author_names_are_exported() -> None:
    assert {"BaseTool", "function_tool", "ToolResponse", "ToolContext", "ToolError", "Toolbox", "load_tools"} <= set(
        agentgym.tools.__all__
    )
    assert all(hasattr(agentgym.tools, name) for name in agentgym.tools.__all__)


def test_import_under_another_name_is_refused() -> None:
    spec = importlib.util.spec_from_file_location("tools", Path(agentgym.tools.__file__))
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"import this package as 'agentgym\.tools', not as 'tools'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_importing_the_tools_loads_nothing_heavy() -> None:
    code = (
        "import sys, agentgym.tools, agentgym.tools.calculator;"
        "print([n for n in ('torch', 'ray', 'vllm', 'transformers', 'docker', 'jsonschema') if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"

"""What users and the parts of agentgym may rely on: public names, import weight, dependency arrows."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import agentgym

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "agentgym"

PUBLIC = [
    "AgentLoop",
    "AgentLoopOutput",
    "AssistantTurn",
    "BaseTool",
    "Env",
    "Rollout",
    "RolloutStatus",
    "Session",
    "SessionManager",
    "Task",
    "ToolCall",
    "ToolEnv",
    "ToolResponse",
    "check_env",
    "errors",
    "evaluate",
    "function_tool",
    "list_envs",
    "make",
    "register",
    "register_agent_loop",
    "spec",
]

HEAVY = {"torch", "ray", "vllm", "transformers", "tensordict"}
"""No module of the core may import these when it is imported itself."""


# -- public names ------------------------------------------------------------------------------------------------------


def test_the_public_names_are_these() -> None:
    assert agentgym.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(agentgym, name)
    assert getattr(agentgym, name) is value
    assert value.__doc__
    assert name in dir(agentgym)


def test_star_import_gives_the_public_names() -> None:
    namespace: dict[str, object] = {}
    exec("from agentgym import *", namespace)
    assert set(PUBLIC) == set(namespace) - {"__builtins__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'agentgym' has no attribute 'Enviroment'"):
        agentgym.Enviroment  # noqa: B018 - reading it is the test


def test_static_tools_see_what_is_resolved_lazily() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    static = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert static == {**agentgym._LAZY, "errors": "agentgym"}


# -- import weight -----------------------------------------------------------------------------------------------------


def imported_by(code: str) -> set[str]:
    """Top-level packages in ``sys.modules`` after running ``code`` in a new interpreter."""
    report = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_agentgym_is_light() -> None:
    modules = imported_by("import agentgym; agentgym.list_envs()")
    assert not modules & {*HEAVY, "docker", "aiohttp", "jsonschema", "omegaconf", "pyarrow", "rich", "typer", "yaml"}


def test_the_command_line_is_light_until_a_command_runs() -> None:
    modules = imported_by("import agentgym.cli")
    assert not modules & {*HEAVY, "docker", "aiohttp", "pyarrow"}


def test_no_module_of_the_core_imports_a_heavy_package() -> None:
    names = [module.name for module in modules_of(PACKAGE) if module.part != "trainer"]
    assert len(names) > 20
    assert not imported_by("\n".join(f"import {name}" for name in names)) & HEAVY


# -- dependency arrows -------------------------------------------------------------------------------------------------


class Module(NamedTuple):
    """A source file of the package."""

    name: str
    path: Path

    @property
    def part(self) -> str:
        return part_of(self.name)


class Import(NamedTuple):
    """One import of a module of agentgym."""

    module: Module
    target: str
    lazy: bool
    """Inside a function."""

    def __str__(self) -> str:
        return f"{self.module.name} imports {self.target}{' lazily' if self.lazy else ''}"


def part_of(name: str) -> str:
    """``envs``, ``tools``, ``trainer``, ``cli`` or ``core``."""
    second = name.split(".")[1] if "." in name else ""
    return second if second in ("envs", "tools", "trainer", "cli") else "core"


def modules_of(package: Path, prefix: str = "agentgym") -> Iterator[Module]:
    for path in sorted(package.iterdir()):
        if path.is_dir() and (path / "__init__.py").exists():
            yield from modules_of(path, f"{prefix}.{path.name}")
        elif path.name == "__init__.py":
            yield Module(prefix, path)
        elif path.suffix == ".py" and path.name != "__main__.py":
            yield Module(f"{prefix}.{path.stem}", path)


def imports_of(module: Module) -> Iterator[Import]:
    """What runs: imports for type checkers only are left out."""
    tree = ast.parse(module.path.read_text())

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from (Import(module, alias.name, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
                    base = importlib.util.resolve_name("." * child.level + base, package)
                yield from (Import(module, f"{base}.{alias.name}", lazy) for alias in child.names)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from visit(child, lazy or inside)

    for found in visit(tree, False):
        if found.target.split(".")[0] == "agentgym":
            yield found


ALLOWED = {
    "core": {"core"},
    "tools": {"core", "tools"},
    "envs": {"core", "tools", "envs"},
    "trainer": {"core", "trainer"},
    "cli": {"core", "cli"},
}
"""What a part may import when it is imported."""


def test_the_parts_depend_on_each_other_as_the_arrows_say() -> None:
    found = [found for module in modules_of(PACKAGE) for found in imports_of(module)]
    assert len(found) > 50
    wrong = [str(f) for f in found if part_of(f.target) not in ALLOWED[f.module.part] and not f.lazy]
    assert wrong == []


def test_what_is_imported_lazily_follows_the_arrows_too() -> None:
    """Except that the ways in start what they are for: the trainer, its engines, tool servers, sandboxes."""
    found = [found for module in modules_of(PACKAGE) for found in imports_of(module) if found.lazy]
    against = [f for f in found if part_of(f.target) not in ALLOWED[f.module.part]]
    starts = [f for f in against if f.module.part == "cli" or f.module.name.startswith("agentgym.evaluation.")]
    assert [str(f) for f in against if f not in starts] == []
    assert {part_of(f.target) for f in starts} == {"trainer", "tools"}


@pytest.mark.parametrize("name", ["envs", "tools", "trainer"])
def test_a_folder_imported_under_another_name_says_so(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert f"import this package as 'agentgym.{name}', not as '{name}'" in done.stderr

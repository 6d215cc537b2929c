"""Tools from files: YAML lists of tool classes, and Python files of function tools."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from agentgym.errors import ConfigError, EnvError, boundary, did_you_mean
from agentgym.objects import load_file
from agentgym.registry import import_target
from agentgym.tool import BaseTool
from agentgym.toolbox import select_tools

_ENTRY_KEYS = ("class_name", "config", "tool_schema")

_SOURCES = {
    "server": "agentgym.tools.server.remote:tools_of_entry",
    "mcp": "agentgym.tools.mcp:tools_of_entry",
}
"""Entries that stand for all tools of a server, by their first key."""


def load_tools(*paths: str | Path) -> list[BaseTool]:
    """The tools of one or more files, in order.

    A YAML file has a list of entries; ``config`` and ``tool_schema`` may be left out where the class has them::

        tools:
          - class_name: my_package.tools.SearchTool     # or my_package.tools:SearchTool, or search.py:SearchTool
            config: {endpoint: "http://127.0.0.1:8000"}
            tool_schema: {type: function, function: {name: search, description: ..., parameters: {...}}}

    An entry may also stand for the tools of a server (see `agentgym.tools.server` and `agentgym.tools.mcp`), which is
    asked for them here::

          - server: http://127.0.0.1:8000               # a tool server; unix:PATH; process, with files: [...]
          - mcp: {command: [my-mcp-server, --stdio]}    # an MCP server; or its URL

    ``class_name`` may also name a function tool. A file of Python code in it is looked for beside the YAML file.

    A Python file gives every tool that stands at its top level under a public name: functions decorated with
    `agentgym.tools.function_tool`, objects of `BaseTool`, and those it imports.

    Raises:
        ConfigError: a missing file, class or function, a wrong key, or two tools of the same name.
    """
    tools = [tool for path in paths for tool in _load_file(Path(path))]
    return select_tools(tools, None, where=", ".join(map(str, paths)))


def _load_file(path: Path) -> list[BaseTool]:
    if not path.is_file():
        beside = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(f"tool file {str(path)!r} does not exist.{did_you_mean(path.name, beside)}")
    if path.suffix == ".py":
        return _load_python(path)
    if path.suffix in (".yaml", ".yml"):
        return _load_yaml(path)
    raise ConfigError(f"tool file {str(path)!r}: expected a name that ends in .yaml, .yml or .py")


def _load_python(path: Path) -> list[BaseTool]:
    module = load_file(path, what="tool file")
    found: dict[int, BaseTool] = {}
    for name, value in vars(module).items():
        if isinstance(value, BaseTool) and not name.startswith("_"):
            found[id(value)] = value
    if not found:
        raise ConfigError(
            f"tool file {str(path)!r} has no tools. Decorate functions with agentgym.tools.function_tool; "
            f"classes are listed in a YAML file."
        )
    return list(found.values())


def _load_yaml(path: Path) -> list[BaseTool]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"tool file {str(path)!r} is not YAML: {error}") from error
    if not isinstance(content, Mapping) or not isinstance(content.get("tools"), list) or len(content) > 1:
        raise ConfigError(f"tool file {str(path)!r}: expected one key 'tools' with a list of entries")
    return [
        tool
        for index, entry in enumerate(content["tools"])
        for tool in _read_entry(path, f"{path}: tools[{index}]", entry)
    ]


def _read_entry(path: Path, where: str, entry: Any) -> list[BaseTool]:
    for key, target in _SOURCES.items():
        if isinstance(entry, Mapping) and key in entry:
            found: list[BaseTool] = import_target(target, what=where)(entry, folder=path.parent, where=where)
            return found
    return [_build(path, where, entry)]


def _build(path: Path, where: str, entry: Any) -> BaseTool:
    """One entry of a YAML file."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("class_name"), str):
        raise ConfigError(
            f"{where}: {entry!r}: expected the keys {', '.join(_ENTRY_KEYS)}; class_name is required "
            f"(or {' or '.join(_SOURCES)})"
        )
    for key in entry:
        if key not in _ENTRY_KEYS:
            raise ConfigError(
                f"{where}: unknown key {key!r}.{did_you_mean(str(key), _ENTRY_KEYS)} Known: {', '.join(_ENTRY_KEYS)}."
            )
    config, schema = entry.get("config") or {}, entry.get("tool_schema")
    if not isinstance(config, Mapping) or not isinstance(schema, Mapping | None):
        raise ConfigError(f"{where}: config {config!r}, tool_schema {schema!r}: expected mappings")
    target = _find(path, where, entry["class_name"])
    if isinstance(target, BaseTool):
        if config or schema:
            raise ConfigError(f"{where}: {entry['class_name']!r} is a tool already; remove config and tool_schema")
        return target
    if not isinstance(target, type) or not issubclass(target, BaseTool):
        raise ConfigError(f"{where}: {entry['class_name']!r} is {target!r}; expected a subclass of agentgym.BaseTool")
    try:
        with boundary(f"{where}: making {entry['class_name']!r}"):
            return target(dict(config), schema)
    except EnvError as error:
        raise ConfigError(str(error)) from error


def _find(path: Path, where: str, class_name: str) -> Any:
    """The class or function tool under an import path, or in a file: ``tools.py:MyTool``."""
    file, _, attribute = class_name.partition(":")
    if not file.endswith(".py"):
        return import_target(class_name, what=f"{where}: class_name")
    source = path.parent / file
    if not source.is_file():
        beside = [item.name for item in source.parent.iterdir()] if source.parent.is_dir() else []
        raise ConfigError(f"{where}: file {str(source)!r} does not exist.{did_you_mean(source.name, beside)}")
    module = load_file(source, what="tool file")
    if not hasattr(module, attribute):
        known = [name for name, value in vars(module).items() if isinstance(value, type | BaseTool)]
        raise ConfigError(f"{where}: {file!r} has no {attribute!r}.{did_you_mean(attribute, known)}")
    return getattr(module, attribute)

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentgym.errors import ConfigError
from agentgym.tool_files import load_tools
from agentgym.toolbox import Toolbox
from agentgym.types import ToolCall

PYTHON = '''
from agentgym.tools import BaseTool, ToolResponse, function_tool
from agentgym.tools.calculator import calculator

@function_tool
def shout(text: str) -> str:
    """Shout."""
    return text.upper()

@function_tool
async def wait() -> None: ...

_hidden = function_tool("hidden")(lambda: None)
alias = shout

def helper(): ...

class Adder(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=str(parameters["a"] + self.config.get("offset", 0))), None, {}

class Strict(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.path = config["path"]

class NotATool: ...
'''
SCHEMA = """
    tool_schema:
      type: function
      function:
        name: adder
        description: Adds an offset.
        parameters: {type: object, properties: {a: {type: integer}}, required: [a]}
"""


@pytest.fixture
def python_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_tools.py"
    path.write_text(PYTHON)
    return path


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "tools.yaml"
    path.write_text(text)
    return path


async def run(tool: Any, **arguments: Any) -> str | None:
    [result] = await Toolbox([tool]).execute([ToolCall(name=tool.name, arguments=arguments)])
    return result.response.text


async def test_python_file_gives_its_public_tools_in_order(python_file: Path) -> None:
    tools = load_tools(python_file)
    assert [tool.name for tool in tools] == ["calculator", "shout", "wait"]
    assert await run(tools[1], text="hi") == "HI"


async def test_yaml_file_makes_tools_of_classes(python_file: Path) -> None:
    path = yaml_file(
        python_file.parent,
        f"""
tools:
  - class_name: "my_tools.py:Adder"
    config: {{offset: 10}}{SCHEMA}
  - class_name: agentgym.tools.calculator.calculator
""",
    )
    adder, calculator = load_tools(str(path))
    assert (await run(adder, a=1), await run(calculator, expression="2*3")) == ("11", "6")
    assert adder.tool_schema["function"]["description"] == "Adds an offset."


def test_yaml_and_python_files_together(python_file: Path) -> None:
    path = yaml_file(python_file.parent, f"tools:\n  - class_name: my_tools.py:Adder{SCHEMA}")
    assert [tool.name for tool in load_tools(path, python_file)] == ["adder", "calculator", "shout", "wait"]


def test_a_name_that_occurs_twice_is_an_error(python_file: Path) -> None:
    path = yaml_file(python_file.parent, "tools: [{class_name: 'agentgym.tools.calculator:calculator'}]")
    assert len(load_tools(path)) == 1
    other = python_file.parent / "other.py"
    other.write_text(PYTHON)
    with pytest.raises(ConfigError, match="same name: 'calculator', 'shout', 'wait'"):
        load_tools(python_file, other)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("class_name: my_tool.py:Adder", "my_tool.py' does not exist. Did you mean 'my_tools.py'"),
        ("class_name: my_tools.py:Addr", "has no 'Addr'. Did you mean 'Adder'"),
        ("class_name: agentgym.tools.calculator:calculater", "has no 'calculater'. Did you mean 'calculator'"),
        ("class_name: no_such_module.Tool", "importing 'no_such_module' failed"),
        ("class_name: my_tools.py:NotATool", "expected a subclass of agentgym.BaseTool"),
        ("class_name: my_tools.py:helper", "expected a subclass of agentgym.BaseTool"),
        ("class_name: my_tools.py:Adder", "Adder has no tool_schema"),
        ("class_name: my_tools.py:Strict\n    tool_schema: {function: {name: s}}", "raised KeyError: 'path'"),
        ("class_name: my_tools.py:shout\n    config: {a: 1}", "is a tool already; remove config"),
        ("class_name: my_tools.py:Adder\n    confg: {}", "unknown key 'confg'. Did you mean 'config'"),
        ("class_name: my_tools.py:Adder\n    config: [1]", "expected mappings"),
        ("class: my_tools.py:Adder", "class_name is required"),
        ("class_name: my_tools.py:Adder\n    tool_schema: {function: {name: a b}}", "'a b'"),
    ],
)
def test_wrong_entries_say_what_is_wrong(python_file: Path, entry: str, words: str) -> None:
    path = yaml_file(python_file.parent, f"tools:\n  - {entry}\n")
    with pytest.raises(ConfigError) as caught:
        load_tools(path)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["tools: {a: 1}", "tool: []", "- a", "", "tools: []\nmore: 1"])
def test_yaml_of_another_form(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="expected one key 'tools' with a list"):
        load_tools(yaml_file(tmp_path, text))


def test_text_that_is_not_yaml_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)is not YAML: .*line 3"):
        load_tools(yaml_file(tmp_path, "tools:\n  - a: [\n"))


def test_missing_and_unknown_files(python_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist\. Did you mean 'my_tools\.py'"):
        load_tools(python_file.with_name("my_tool.py"))
    with pytest.raises(ConfigError, match="does not exist"):
        load_tools(python_file.parent / "nowhere" / "tools.yaml")
    text = python_file.with_suffix(".txt")
    text.write_text("")
    with pytest.raises(ConfigError, match=r"ends in \.yaml, \.yml or \.py"):
        load_tools(text)


def test_python_file_without_tools_or_with_an_error(tmp_path: Path) -> None:
    empty, broken = tmp_path / "empty.py", tmp_path / "broken.py"
    empty.write_text("x = 1")
    broken.write_text("import nothing_of_that_name")
    with pytest.raises(ConfigError, match="has no tools"):
        load_tools(empty)
    for _ in range(2):  # not remembered as imported
        with pytest.raises(ConfigError, match=r"broken\.py' raised ModuleNotFoundError: .*nothing_of_that_name"):
            load_tools(broken)


def test_one_file_loaded_twice_is_one_module(python_file: Path) -> None:
    assert load_tools(python_file)[1] is load_tools(python_file)[1]

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from agentgym.errors import ConfigError
from agentgym.tool import ToolContext, function_tool
from agentgym.tool_schema import checked_schema, derive_schema, parse_docstring

if TYPE_CHECKING:
    from decimal import Decimal


class Point(BaseModel):
    """A place."""

    x: float
    title: str = "here"


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def parameters(fn: Any, **settings: Any) -> dict[str, Any]:
    schema = derive_schema(fn, name="f", **settings).schema["function"]["parameters"]
    Draft202012Validator.check_schema(schema)
    return dict(schema)


class Ruler:
    def measure(self, x: float, unit: Literal["m", "ft"] = "m", tags: list[str] | None = None) -> str:
        """Measure something.

        Args:
            x (float) : length
        """
        return f"{x} {unit} {tags}"


def test_bound_method_with_literal_default_and_nullable_list() -> None:  # A18
    assert derive_schema(Ruler().measure, name="measure").schema == {
        "type": "function",
        "function": {
            "name": "measure",
            "description": "Measure something.",
            "parameters": {
                "type": "object",
                "properties": {
                    "x": {"type": "number", "description": "length"},
                    "unit": {"type": "string", "description": "", "enum": ["m", "ft"], "default": "m"},
                    "tags": {
                        "type": ["array", "null"],
                        "description": "",
                        "items": {"type": "string"},
                        "default": None,
                    },
                },
                "required": ["x"],
            },
        },
    }


@pytest.mark.parametrize("line", ["x (float): length", "x (float) : length", "x: length", "x : length"])
def test_both_docstring_spellings(line: str) -> None:  # A18
    _, texts = parse_docstring(f"Do it.\n\n    Args:\n        {line}\n")
    assert texts == {"x": "length"}


def test_docstring_sections_continuations_and_paragraphs() -> None:
    text = """Find a thing
    in a pile.

    Second paragraph: with a colon.

    Arguments:
        query (str, optional): what to look for,
            over: two lines
        limit: at most
          so many

    Returns:
        found: the thing
    """
    assert parse_docstring(text) == (
        "Find a thing in a pile.\n\nSecond paragraph: with a colon.",
        {"query": "what to look for, over: two lines", "limit": "at most so many"},
    )


def test_docstring_without_sections_and_without_text() -> None:
    assert parse_docstring("Just this.") == ("Just this.", {})
    assert parse_docstring("") == ("", {})


def test_undocumented_parameter_has_an_empty_description_for_every_tool() -> None:  # A18
    def documented(a: int) -> None:
        """Args:
        b: of another
        """

    def bare(a: int) -> None: ...

    assert parameters(documented)["properties"]["a"] == parameters(bare)["properties"]["a"]
    assert parameters(bare)["properties"]["a"] == {"type": "integer", "description": ""}


def test_non_ascii_words_stay_as_they_are() -> None:  # A16
    def f(城市: str) -> None:
        """查询天气。

        Args:
            城市: 名称
        """

    schema = derive_schema(f, name="weather").schema["function"]
    assert schema["description"] == "查询天气。"
    assert schema["parameters"]["properties"] == {"城市": {"type": "string", "description": "名称"}}


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (int, {"type": "integer"}),
        (bool, {"type": "boolean"}),
        (Any, {}),
        (int | str, {"type": ["integer", "string"]}),
        (int | None, {"type": ["integer", "null"]}),
        (Literal["a", 1], {"enum": ["a", 1]}),
        (Literal["a"], {"type": "string", "enum": ["a"]}),
        (Literal["a"] | None, {"type": ["string", "null"], "enum": ["a", None]}),
        (Colour, {"type": "string", "enum": ["red", "blue"]}),
        (dict[str, list[int]], {
            "type": "object",
            "additionalProperties": {"type": "array", "items": {"type": "integer"}},
        }),
        (Annotated[int, Field(ge=0)], {"type": "integer", "minimum": 0}),
    ],
)  # fmt: skip
def test_hints(hint: Any, expected: dict[str, Any]) -> None:
    def f(a): ...  # type: ignore[no-untyped-def]

    f.__annotations__ = {"a": hint}
    assert parameters(f)["properties"]["a"] == {"description": "", **expected}


def test_nested_models_are_written_in_place_and_keep_a_field_named_title() -> None:
    def f(points: list[Point], origin: Point | None = None) -> None: ...

    properties = parameters(f)["properties"]
    point = {
        "type": "object",
        "description": "A place.",
        "properties": {"x": {"type": "number"}, "title": {"type": "string", "default": "here"}},
        "required": ["x"],
    }
    assert properties["points"] == {"type": "array", "description": "", "items": point}
    assert properties["origin"] == {**point, "type": ["object", "null"], "default": None}


def test_a_model_that_contains_itself_keeps_its_definition() -> None:
    def f(tree: Tree) -> None: ...

    schema = parameters(f)
    validator = Draft202012Validator(schema)
    assert validator.is_valid({"tree": {"value": 1, "children": [{"value": 2, "children": [{"value": 3}]}]}})
    assert not validator.is_valid({"tree": {"value": 1, "children": [{"value": 2, "children": [{"value": "x"}]}]}})


def test_field_description_counts_and_the_docstring_goes_before_it() -> None:
    def f(a: Annotated[int, Field(description="from field")], b: Annotated[int, Field(description="no")]) -> None:
        """F.

        Args:
            b: from docstring
        """

    properties = parameters(f)["properties"]
    assert properties["a"] == {"type": "integer", "description": "from field"}
    assert properties["b"] == {"type": "integer", "description": "from docstring"}


def test_defaults_are_json_or_left_out() -> None:
    marker = object()

    def f(point: Point = Point(x=1), thing: Any = marker, n: int = None) -> None: ...  # type: ignore[assignment]  # noqa: B008, RUF013

    schema = parameters(f)
    assert schema["properties"]["point"]["default"] == {"x": 1.0, "title": "here"}
    assert "default" not in schema["properties"]["thing"]
    assert schema["properties"]["n"] == {"type": ["integer", "null"], "description": "", "default": None}
    assert schema["required"] == []


def test_context_parameter_is_left_out_also_as_a_string() -> None:
    @function_tool
    def one(a: int, context: ToolContext) -> None: ...

    @function_tool
    def two(where: ToolContext | None, a: int) -> None: ...

    for tool in (one, two):
        assert list(tool.tool_schema["function"]["parameters"]["properties"]) == ["a"]


def test_local_types_resolve() -> None:
    class Local(BaseModel):
        n: int

    @function_tool
    def f(local: Local) -> None: ...

    assert f.tool_schema["function"]["parameters"]["properties"]["local"]["properties"] == {"n": {"type": "integer"}}


def test_the_result_hint_need_not_exist_at_run_time() -> None:
    def f(a: int) -> Decimal: ...  # type: ignore[empty-body]

    assert list(parameters(f)["properties"]) == ["a"]


def test_partial_arguments_are_not_shown() -> None:
    def f(a: int, key: str, b: int = 2) -> None: ...

    schema = parameters(functools.partial(f, key="secret"))
    assert list(schema["properties"]) == ["a", "b"]
    assert "secret" not in str(schema)


def test_callable_object() -> None:
    class Adder:
        def __call__(self, a: int) -> int:
            """Add.

            Args:
                a: number
            """
            return a

    schema = derive_schema(Adder(), name="adder").schema["function"]
    assert (schema["description"], schema["parameters"]["properties"]["a"]["description"]) == ("Add.", "number")


def variadic(*args: int) -> None: ...
def keywords(**kwargs: int) -> None: ...
def positional(a: int, /) -> None: ...
def unhinted(a) -> None: ...  # type: ignore[no-untyped-def]
def no_json(a: Callable[[], int]) -> None: ...
def typing_only(a: Decimal) -> None: ...


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (variadic, r"'f'.*\*args.*list"),
        (keywords, r"'f'.*\*\*kwargs.*dict"),
        (positional, "'a' is positional-only"),
        (unhinted, "'a' has no type hint"),
        (no_json, "'a' has the hint"),
        (typing_only, "Decimal.*TYPE_CHECKING"),
    ],
)
def test_what_has_no_schema_is_refused_by_name(fn: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        derive_schema(fn, name="f")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"name": "f"}, "expected"),
        ({"type": "tool", "function": {"name": "f"}}, "expected"),
        ({"type": "function", "function": {"name": "a b"}}, "'a b'.*1 to 64"),
        ({"type": "function", "function": {"name": ""}}, "1 to 64"),
        ({"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}, '"type": "object"'),
    ],
)
def test_malformed_schemas_are_refused(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        checked_schema(schema)


def test_missing_parts_of_a_schema_are_filled_in() -> None:
    assert checked_schema({"function": {"name": "f", "strict": True}}) == {
        "type": "function",
        "function": {
            "name": "f",
            "description": "",
            "strict": True,
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }

from typing import Any

import pytest

from agentgym.errors import ConfigError, ToolError
from agentgym.tool_arguments import ArgumentChecker, read_arguments

PARAMETERS = {
    "type": "object",
    "properties": {
        "x": {"type": "number"},
        "unit": {"type": "string", "enum": ["m", "ft"]},
        "tags": {"type": ["array", "null"], "items": {"type": "string"}},
        "point": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]},
        "count": {"type": "integer", "minimum": 1},
    },
    "required": ["x"],
}


@pytest.mark.parametrize("arguments", ["", "  ", {}, None, "null", "{}"])
def test_absent_arguments_are_an_empty_object(arguments: Any) -> None:  # A9
    assert read_arguments(arguments) == {}


def test_json_text_of_an_object_is_read() -> None:
    assert read_arguments('{"city": "Z\\u00fcrich\n東京"}') == {"city": "Zürich\n東京"}  # A16


@pytest.mark.parametrize(
    ("arguments", "words"), [("[1]", "object, got array"), ("{a", "not JSON"), (3, "number 3"), ('"x"', 'string "x"')]
)
def test_other_arguments_are_refused(arguments: Any, words: str) -> None:
    with pytest.raises(ToolError, match=words):
        read_arguments(arguments)


def test_read_arguments_gives_a_new_dict() -> None:
    given = {"a": 1}
    read = read_arguments(given)
    read["b"] = 2
    assert given == {"a": 1}


def message(arguments: dict[str, Any], *, closed: bool = True) -> str:
    with pytest.raises(ToolError) as caught:
        ArgumentChecker("measure", PARAMETERS, closed=closed).check(arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "missing required parameter 'x' (number)"),  # A14
        ({"x": "3"}, "parameter 'x' must be number, got string \"3\""),
        ({"x": None}, "parameter 'x' must be number, got null"),
        ({"x": True}, "parameter 'x' must be number, got boolean true"),
        ({"x": 1, "unit": "km"}, 'parameter \'unit\' must be one of "m", "ft", got string "km"'),
        ({"x": 1, "tags": ["a", 2]}, "parameter 'tags'[1] must be string, got number 2"),
        ({"x": 1, "tags": "a"}, "parameter 'tags' must be array or null, got string \"a\""),
        ({"x": 1, "point": {}}, "missing required parameter 'lat' (number) in parameter 'point'"),
        ({"x": 1, "either": "a"}, "parameter 'either' must be integer or array of integer, got string \"a\""),
        ({"x": 1, "count": 0}, "parameter 'count': 0 is less than the minimum of 1"),
        ({"x": 1, "unti": "m"}, "unknown parameter 'unti', did you mean 'unit'"),
    ],
)
def test_problems_are_named(arguments: dict[str, Any], problem: str) -> None:
    assert message(arguments).startswith(
        f"invalid arguments for 'measure': {problem}. Parameters: x (number, required), "
    )


def test_all_problems_are_named_up_to_five() -> None:
    text = message({"unit": "km", "foo": 1})
    assert "missing required parameter 'x'" in text
    assert "'unit' must be one of" in text
    assert "unknown parameter 'foo'" in text
    many = {"x": 1, "tags": list(range(100))}
    assert message(many).count("must be string") == 5
    assert "; and 95 more" in message(many)


def test_long_values_are_cut_in_messages() -> None:
    assert len(message({"x": "9" * 10_000})) < 600


def test_valid_arguments_pass() -> None:
    ArgumentChecker("measure", PARAMETERS, closed=True).check(
        {"x": 1, "unit": "m", "tags": None, "point": {"lat": 1, "more": 2}, "either": [1], "count": 3.0}
    )


def test_further_parameters_pass_where_the_schema_is_open() -> None:
    ArgumentChecker("measure", PARAMETERS, closed=False).check({"x": 1, "more": 2})


def test_wrong_schema_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"'f'.*not a JSON schema"):
        ArgumentChecker("f", {"type": "object", "properties": {"x": {"type": "nunber"}}}, closed=True)

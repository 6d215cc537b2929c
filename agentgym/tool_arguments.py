"""Checking the arguments of a call against a tool's JSON schema, with messages that a model can act on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pydantic

from agentgym.errors import ConfigError, ToolError, did_you_mean

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

_MAX_PROBLEMS = 5
"""A message names at most this many problems."""


def read_arguments(arguments: Any) -> dict[str, Any]:
    """The arguments of a call as a new dict: None and blank text are ``{}``, JSON text of an object is read.

    Raises:
        ToolError: anything else.
    """
    if arguments is None:
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if isinstance(arguments, str):
        if not arguments.strip():
            return {}
        try:
            value = json.loads(arguments, strict=False)
        except ValueError as error:
            raise ToolError(f"arguments are not JSON: {error}") from error
        if value is None or isinstance(value, dict):
            return value or {}
        arguments = value
    raise ToolError(f"arguments must be a JSON object, got {_show(arguments)}")


class ArgumentChecker:
    """The compiled form of one tool's parameters.

    Args:
        name: the tool's name, for messages.
        parameters: JSON schema of an object.
        closed: refuse parameters that the schema does not name, also where it does not say so.

    Raises:
        ConfigError: ``parameters`` is not a JSON schema.
    """

    def __init__(self, name: str, parameters: Mapping[str, Any], *, closed: bool) -> None:
        self._name = name
        self._properties: Mapping[str, Any] = parameters.get("properties", {})
        self._required = set(parameters.get("required", ()))
        self._validator = _compile(name, {**parameters, "additionalProperties": False} if closed else parameters)

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raise `ToolError` naming every problem (up to five) and the parameters that exist."""
        problems = [_problem(error) for error in self._validator.iter_errors(arguments)]
        if problems:
            raise ToolError(self.message(problems))

    def message(self, problems: list[str]) -> str:
        """One text for a list of problems."""
        known = ", ".join(
            f"{key} ({_kind(schema)}{', required' if key in self._required else ''})"
            for key, schema in self._properties.items()
        )
        more = f"; and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
        return (
            f"invalid arguments for {self._name!r}: {'; '.join(problems[:_MAX_PROBLEMS])}{more}. "
            f"Parameters: {known or 'none'}"
        )


def convert_arguments(
    checker: ArgumentChecker, adapters: Mapping[str, pydantic.TypeAdapter[Any]], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Turn checked JSON values into the types of the hints. Raises `ToolError` where a type has rules of its own."""
    converted: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in arguments.items():
        try:
            converted[key] = adapters[key].validate_python(value)
        except pydantic.ValidationError as error:
            for item in error.errors(include_url=False, include_context=False):
                problems.append(f"{_where([key, *item['loc']])}: {item['msg']}, got {_show(item['input'])}")
    if problems:
        raise ToolError(checker.message(problems))
    return converted


def _compile(name: str, parameters: Mapping[str, Any]) -> Validator:
    # Imported at the first tool, not with the package: 75 ms.
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from referencing import Registry

    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise ConfigError(
            f"tool {name!r}: parameters are not a JSON schema: at {error.json_path}: {error.message}"
        ) from error
    # An empty registry: a reference to elsewhere is an error, never a download.
    return Draft202012Validator(parameters, registry=Registry())


def _problem(error: ValidationError) -> str:
    """One violation of the schema in words."""
    where = _where(error.absolute_path)
    inside = f" in {where}" if error.absolute_path else ""
    rule: Any = error.validator_value
    known = error.schema.get("properties", {}) if isinstance(error.schema, Mapping) else {}
    value: Any = error.instance
    match error.validator:
        case "required":
            missing = next(key for key in rule if error.message.startswith(repr(key)))
            return f"missing required parameter {missing!r} ({_kind(known.get(missing))}){inside}"
        case "additionalProperties" if rule is False:
            extra = [key for key in value if key not in known]
            near = did_you_mean(extra[0], known).rstrip("?").replace(" Did you mean", ", did you mean")
            return f"unknown parameter {', '.join(map(repr, extra))}{inside}{near}"
        case "type":
            return f"{where} must be {_kind({'type': rule})}, got {_show(value)}"
        case "enum":
            return f"{where} must be one of {', '.join(map(_json, rule))}, got {_show(value)}"
        case "anyOf" | "oneOf":
            return f"{where} must be {_kind({'anyOf': rule})}, got {_show(value)}"
        case _:
            return f"{where}: {_cut(error.message, 200)}"


def _where(path: Any) -> str:
    """``parameter 'p'``, with what lies inside it: ``parameter 'p'[0].x``."""
    first, *rest = list(path) or ["arguments"]
    inner = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in rest)
    return f"parameter {first!r}{inner}" if path else "arguments"


def _kind(schema: Any) -> str:
    """A schema in words: ``string``, ``array of string or null``, ``one of "m", "ft"``."""
    if not isinstance(schema, Mapping):
        return "any"
    if "enum" in schema:
        return "one of " + ", ".join(map(_json, schema["enum"]))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_kind(item) for item in schema[key])
    kinds = schema.get("type", "any")
    names = [kinds] if isinstance(kinds, str) else list(kinds)
    items = schema.get("items")
    of = f" of {_kind(items)}" if isinstance(items, Mapping) and items else ""
    return " or ".join(f"array{of}" if name == "array" else name for name in names)


def _show(value: Any) -> str:
    """A value with its JSON type, cut: ``string "abc"``."""
    match value:
        case None:
            return "null"
        case bool():
            kind = "boolean"
        case str():
            kind = "string"
        case int() | float():
            kind = "number"
        case list():
            kind = "array"
        case _:
            kind = "object" if isinstance(value, Mapping) else type(value).__name__
    return f"{kind} {_json(value)}"


def _json(value: Any) -> str:
    try:
        return _cut(json.dumps(value, ensure_ascii=False), 80)
    except (TypeError, ValueError):
        return _cut(repr(value), 80)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."

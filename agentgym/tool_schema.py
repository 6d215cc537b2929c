"""OpenAI function schemas of Python functions: type hints give the types, a Google-style docstring the words."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pydantic
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError, PydanticUndefinedAnnotation
from pydantic_core import PydanticSerializationError

from agentgym.errors import ConfigError

ToolSchema = dict[str, Any]
"""``{"type": "function", "function": {"name": ..., "description": ..., "parameters": {JSON schema of an object}}}``."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SECTION = re.compile(
    r"(args|arguments|parameters|params|returns?|yields?|raises|examples?|notes?|attributes|references|see also|"
    r"todo|warnings?|warns|keyword args|keyword arguments|other parameters)\s*:\s*$",
    re.IGNORECASE,
)
_PARAMETER_SECTIONS = ("args", "arguments", "parameters", "params", "keyword args", "keyword arguments")
_ENTRY = re.compile(r"\*{0,2}(?P<name>\w+)\s*(?:\((?P<type>[^:]*)\))?\s*:(?P<text>.*)")


@dataclass(frozen=True, slots=True)
class DerivedSchema:
    """What a function's signature says about calls of it."""

    schema: ToolSchema
    adapters: Mapping[str, pydantic.TypeAdapter[Any]]
    """Per parameter: turns a JSON value into the type of the hint (a pydantic model, an enum, a float)."""


def derive_schema(
    fn: Callable[..., Any],
    *,
    name: str,
    description: str | None = None,
    leave_out: Collection[str] = (),
    namespace: Mapping[str, Any] | None = None,
) -> DerivedSchema:
    """Derive the schema of calls of ``fn``.

    The description is the docstring up to its first section. A parameter without a line in ``Args:`` gets an empty
    description (a ``Field(description=...)`` in an ``Annotated`` hint counts as a line). A parameter without a default
    is required; ``None`` as a default makes it nullable.

    Args:
        fn: function, bound method, `functools.partial` or object with ``__call__``.
        name: the tool's name.
        description: used instead of the docstring's.
        leave_out: parameters that the model does not see.
        namespace: further names for hints that are strings, usually the locals of the caller.

    Raises:
        ConfigError: a parameter without a hint, with one that has no JSON form, positional-only, or ``*args/**kwargs``.
    """
    parameters = _parameters(fn, name, leave_out)
    hints = _hints(fn, name, parameters, namespace or {})
    adapters = {key: _adapter(name, key, hint) for key, hint in hints.items()}
    summary, texts = parse_docstring(inspect.getdoc(_function_of(fn)) or "")
    properties, definitions = _properties(name, adapters)
    for key, parameter in parameters.items():
        words = texts.get(key) or properties[key].pop("description", "")
        properties[key] = _ordered(properties[key], words)
        if parameter.default is not inspect.Parameter.empty:
            properties[key] |= _default(adapters[key], parameter.default)
    required = [key for key, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if definitions:
        schema["$defs"] = definitions
    return DerivedSchema(
        checked_schema(
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": summary if description is None else description,
                    "parameters": schema,
                },
            }
        ),
        adapters,
    )


def checked_schema(schema: Mapping[str, Any]) -> ToolSchema:
    """A normal form of a tool schema: description and parameters filled in. Raises `ConfigError` on another form."""
    function = schema.get("function")
    if not isinstance(function, Mapping) or schema.get("type", "function") != "function":
        raise ConfigError(
            f'tool schema {_short(schema)}: expected {{"type": "function", '
            f'"function": {{"name": ..., "description": ..., "parameters": {{...}}}}}}'
        )
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"tool name {name!r}: expected 1 to 64 of the characters A-Z a-z 0-9 _ . -")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "required": []}
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        raise ConfigError(
            f'tool {name!r}: parameters {_short(parameters)}: expected a JSON schema with "type": "object"'
        )
    described = {"name": name, "description": function.get("description") or ""}
    return {"type": "function", "function": {**described, **_without(function, described), "parameters": parameters}}


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a Google-style docstring into (description, texts of the parameters).

    Entries are written ``x (float): length``, ``x (float) : length`` or ``x: length``; deeper indented lines continue
    an entry. The description is everything before the first section, paragraphs kept, lines of one joined.
    """
    lines = inspect.cleandoc(text).splitlines()
    starts = [index for index, line in enumerate(lines) if _SECTION.match(line)]
    head = lines[: starts[0]] if starts else lines
    paragraphs = re.split(r"\n\s*\n", "\n".join(head).strip())
    description = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    texts: dict[str, str] = {}
    for start, end in itertools.pairwise([*starts, len(lines)]):
        if lines[start].strip().rstrip(": ").lower() in _PARAMETER_SECTIONS:
            texts |= _entries(lines[start + 1 : end])
    return description, texts


def _entries(lines: list[str]) -> dict[str, str]:
    texts: dict[str, list[str]] = {}
    indent: int | None = None
    current: list[str] = []
    for line in lines:
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        if indent is None:
            indent = depth
        entry = _ENTRY.match(line.strip()) if depth <= indent else None
        if entry is not None:
            current = texts.setdefault(entry["name"], [])
            current.append(entry["text"])
        else:
            current.append(line)
    return {name: " ".join(" ".join(parts).split()) for name, parts in texts.items()}


def _function_of(fn: Callable[..., Any]) -> Any:
    """The object that carries the hints and the docstring."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if inspect.isroutine(fn):
        return fn
    return type(fn).__call__


def _parameters(fn: Callable[..., Any], name: str, leave_out: Collection[str]) -> dict[str, inspect.Parameter]:
    fixed = set(leave_out)
    inner: Any = fn
    while isinstance(inner, functools.partial):
        fixed |= set(inner.keywords)
        inner = inner.func
    found: dict[str, inspect.Parameter] = {}
    for key, parameter in inspect.signature(fn).parameters.items():
        if key in fixed:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(
                f"function tool {name!r}: {parameter} has no schema. Name every parameter, or take one list or dict."
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"function tool {name!r}: parameter {key!r} is positional-only, but calls name their arguments. "
                f"Remove the '/' from the signature."
            )
        if parameter.annotation is parameter.empty:
            raise ConfigError(f"function tool {name!r}: parameter {key!r} has no type hint. Add one, e.g. {key}: str")
        found[key] = parameter
    return found


def _hints(
    fn: Callable[..., Any], name: str, parameters: Mapping[str, inspect.Parameter], namespace: Mapping[str, Any]
) -> dict[str, Any]:
    """Hints of the parameters with strings resolved; those of other parameters and of the result are not looked at."""
    names = {**namespace, **getattr(_function_of(fn), "__globals__", {})}
    carrier = types.SimpleNamespace(__annotations__={key: value.annotation for key, value in parameters.items()})
    try:
        hints = typing.get_type_hints(carrier, globalns=names, include_extras=True)
    except (NameError, SyntaxError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"function tool {name!r}: a type hint cannot be resolved: {error}. "
            f"Names in hints must exist at run time (not only under TYPE_CHECKING)."
        ) from error
    return {key: hint | None if parameters[key].default is None else hint for key, hint in hints.items()}


def _adapter(name: str, key: str, hint: Any) -> pydantic.TypeAdapter[Any]:
    try:
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(hint)
        adapter.json_schema()
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema, PydanticUndefinedAnnotation) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"function tool {name!r}: parameter {key!r} has the hint {hint!r}, which has no JSON form ({reason}). "
            f"Use str, int, float, bool, Literal, list, dict, None or pydantic models of them."
        ) from error
    return adapter


def _properties(
    name: str, adapters: Mapping[str, pydantic.TypeAdapter[Any]]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """JSON schemas per parameter, and the definitions that refer to themselves (all others are written in place)."""
    schemas, extra = pydantic.TypeAdapter.json_schemas(
        [(key, "validation", adapter) for key, adapter in adapters.items()]
    )
    definitions = extra.get("$defs", {})
    kept: dict[str, Any] = {}
    properties = {key: _tidy(schema, definitions, kept, ()) for (key, _), schema in schemas.items()}
    return properties, kept


def _tidy(schema: Any, definitions: Mapping[str, Any], kept: dict[str, Any], path: tuple[str, ...]) -> Any:
    """Without titles and references, ``anyOf`` with null as a list of types, ``const`` as an enum of one."""
    if isinstance(schema, list):
        return [_tidy(item, definitions, kept, path) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        target = schema["$ref"].rpartition("/")[2]
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        if target in path:
            if target not in kept:
                kept[target] = {}
                kept[target] = _tidy(definitions[target], definitions, kept, (target,))
            return schema
        return _tidy({**definitions[target], **rest}, definitions, kept, (*path, target))
    tidy: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties"):
            tidy[key] = {name: _tidy(inner, definitions, kept, path) for name, inner in value.items()}
        elif key == "const":
            tidy["enum"] = [value]
        elif key in ("default", "enum", "examples"):
            tidy[key] = value
        elif key != "title":
            tidy[key] = _tidy(value, definitions, kept, path)
    return _merge_alternatives(tidy)


def _merge_alternatives(schema: dict[str, Any]) -> dict[str, Any]:
    """``anyOf`` of plain types, and of one type and null, in the short form ``"type": [...]``."""
    alternatives = schema.get("anyOf")
    if not alternatives or not all(isinstance(item.get("type"), str) for item in alternatives):
        return schema
    detailed = [item for item in alternatives if len(item) > 1]
    kinds = [item["type"] for item in alternatives]
    if len(detailed) > 1 or (detailed and set(kinds) != {detailed[0]["type"], "null"}):
        return schema
    merged = {**(detailed[0] if detailed else {}), **_without(schema, ("anyOf",)), "type": kinds}
    if "enum" in merged and None not in merged["enum"]:
        merged["enum"] = [*merged["enum"], None]
    return merged


def _ordered(schema: dict[str, Any], description: str) -> dict[str, Any]:
    """Type first, then the description: the order in which people read it."""
    kind = {"type": schema["type"]} if "type" in schema else {}
    return {**kind, "description": description, **_without(schema, ("type", "description"))}


def _default(adapter: pydantic.TypeAdapter[Any], default: Any) -> dict[str, Any]:
    """``{"default": ...}``, or nothing where the default has no JSON form."""
    try:
        return {"default": adapter.dump_python(default, mode="json", warnings=False)}
    except PydanticSerializationError:
        return {}


def _without(mapping: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."

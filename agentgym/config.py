"""Composition of a configuration: presets, YAML files and ``a.b=c`` overrides into one typed pydantic model.

    defaults of the models  <  presets of the chosen names  <  YAML files, in order  <  overrides, in order

The models (`agentgym.settings`, `agentgym.evaluation_config`, `agentgym.trainer.config`) are the only source of
defaults. A section that is chosen by name takes a plain value for its name: ``env=calculator-math`` is
``env.name=calculator-math``. Every mistake is a `ConfigError` of one short message: the key, its value, what was
expected, and the nearest valid key.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, cast, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from agentgym.errors import ConfigError, did_you_mean

M = TypeVar("M", bound="ConfigModel")

PRESETS = Path(__file__).parent / "trainer" / "presets"
"""Folder of the shipped presets: ``SECTION/NAME.yaml``, and ``model/NAME@ENV.yaml`` for a model in one environment."""

_NULLS = frozenset({"null", "Null", "NULL", "~", "None"})


class ConfigModel(BaseModel):
    """Base of all configuration models: no unknown keys, no silent conversions, frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    chosen_by: ClassVar[str | None] = None
    """The field that a plain value stands for: with ``"name"``, ``env=x`` means ``env.name=x``."""
    only_presets: ClassVar[bool] = False
    """Only names of presets can be chosen."""
    other_names: ClassVar[Mapping[str, str]] = {}
    """Keys that users of other systems look for, and the key here, for fields without ``synonyms`` of their own."""

    @field_validator("*", mode="before")
    @classmethod
    def _read_yaml_forms(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML has no tuples and paths, and reads ``1e3`` as a float: take these as what the field accepts."""
        accepted = _plain_types(cls.model_fields[info.field_name].annotation) if info.field_name is not None else set()
        if isinstance(value, float) and value.is_integer() and int in accepted and float not in accepted:
            return int(value)
        if isinstance(value, list) and tuple in accepted:
            return tuple(value)
        if isinstance(value, str) and Path in accepted:
            return Path(value)
        return value


def setting(default: Any, description: str, *, synonyms: Sequence[str] = (), **constraints: Any) -> Any:
    """A field of a configuration model.

    Args:
        default: the default; ``...`` makes the key required.
        description: one sentence for a user, with the unit.
        synonyms: names under which users of other systems look for this key; only used to suggest it.
        constraints: further arguments of `pydantic.Field`, e.g. ``ge=1``.
    """
    extra = cast(Any, {"synonyms": list(synonyms)}) if synonyms else None
    if isinstance(default, list | dict):
        return Field(default_factory=default.copy, description=description, json_schema_extra=extra, **constraints)
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def section(kind: type[BaseModel], description: str) -> Any:
    """A field of a configuration model that holds another one, with all its defaults."""
    return Field(default_factory=lambda: kind.model_validate({}), description=description)


def _split_names(value: Any) -> Any:
    if isinstance(value, str):
        return [name for part in value.split(",") if (name := part.strip())]
    return value


Names = Annotated[list[str], BeforeValidator(_split_names)]
"""A list of names; a bare string is a list of one, commas separate: ``plugins=a.py,b.py``."""


# ---------------------------------------------------------------------------------------------------- loading


@dataclass(frozen=True, slots=True)
class Layer:
    """One source of values: a YAML file or one override."""

    source: str
    """How messages call it: the file's name or the override as typed."""
    data: dict[str, Any]


def load_config(
    model: type[M],
    *,
    overrides: Sequence[str] = (),
    files: Sequence[str | Path] = (),
    base: Sequence[Layer] = (),
    presets: Path = PRESETS,
) -> M:
    """Compose and validate a configuration.

    Args:
        model: the configuration model, e.g. ``TrainConfig``.
        overrides: ``a.b=value`` strings; the value is YAML (``1e-4``, ``null``, ``[1, 2]``, ``'quoted'``).
        files: YAML files with the same keys.
        base: values that go before those of the files, but after presets.
        presets: folder of the presets.

    Raises:
        ConfigError: a missing or unreadable file, an unknown key or preset, a wrong type or value.
    """
    layers = [*base, *(_read_file(Path(file)) for file in files)]
    layers += [_parse_override(model, text) for text in overrides]
    expanded = [Layer(layer.source, expand_choices(model, layer.data)) for layer in layers]
    for layer in expanded:
        _check_keys(model, layer.data, layer.source)
    chosen = [Layer(str(path), read_yaml(path)) for path in _preset_files(model, expanded, presets)]
    known = [_known(model, layer.data) for layer in chosen]
    return validate(model, _merge([*known, *(layer.data for layer in expanded)]))


def _known(model: type[BaseModel], data: Mapping[str, Any]) -> dict[str, Any]:
    """What of a preset the model has keys for: presets are those of training, of which an evaluation has a part."""
    kept: dict[str, Any] = {}
    for key, value in data.items():
        section = _section(model, key)
        if section is not None and isinstance(value, Mapping):
            kept[key] = _known(section, value)
        elif key in model.model_fields or model.model_config.get("extra") == "allow":
            kept[key] = value
    return kept


def validate(model: type[M], data: Mapping[str, Any]) -> M:
    """``model.model_validate`` with a `ConfigError` of one line per mistake instead of a ``ValidationError``."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = list(dict.fromkeys(_explain(model, dict(item)) for item in error.errors(include_url=False)))
        raise ConfigError("\n".join(lines)) from None


def dump_config(config: BaseModel) -> str:
    """The configuration as YAML, every key written out; `load_config` with this file gives an equal configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def expand_choices(model: type[BaseModel], data: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the plain value of a section that is chosen by name: ``{"env": "x"}`` -> ``{"env": {"name": "x"}}``."""
    result: dict[str, Any] = {}
    for key, value in data.items():
        choice = _choice(model, key)
        if choice is not None and isinstance(value, str):
            value = {choice: value}
        result[key] = value
    return result


def _merge(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    try:
        merged = OmegaConf.merge({}, *[OmegaConf.create(dict(layer)) for layer in layers])
        container = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"the configuration could not be put together: {reason}") from None
    return cast(dict[str, Any], container)


def _preset_files(model: type[BaseModel], layers: Sequence[Layer], presets: Path) -> Iterator[Path]:
    """The preset files of the names chosen in ``layers`` or by default, general ones first."""
    chosen: dict[str, str] = {}
    for key in model.model_fields:
        section, choice = _section(model, key), _choice(model, key)
        if section is None or choice is None:
            continue
        values = [layer.data[key] for layer in layers if isinstance(layer.data.get(key), dict)]
        names = [value[choice] for value in values if choice in value]
        name = names[-1] if names else section.model_fields[choice].default
        if isinstance(name, str):
            chosen[key] = name
    for key, name in chosen.items():
        known = sorted(path.stem for path in (presets / key).glob("*.yaml") if "@" not in path.stem)
        if name in known:
            yield presets / key / f"{name}.yaml"
        elif getattr(_section(model, key), "only_presets", False):
            near = did_you_mean(name, known)
            raise ConfigError(f"{key}={name}: no preset of that name.{near} Known: {', '.join(known)}")
    if {"model", "env"} <= chosen.keys():
        both = presets / "model" / f"{chosen['model']}@{chosen['env']}.yaml"
        if "/" not in chosen["model"] and both.is_file():
            yield both


def _read_file(path: Path) -> Layer:
    if not path.is_file():
        near = did_you_mean(path.name, [entry.name for entry in path.parent.glob("*.y*ml")])
        raise ConfigError(f"--config {path}: no such file.{near}")
    return Layer(str(path), read_yaml(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `ConfigError` if there is none."""
    try:
        container = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {_yaml_reason(error)}") from None
    except (OSError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: cannot be read: {str(error).partition(chr(10))[0]}") from None
    if not isinstance(container, dict) or not all(isinstance(key, str) for key in container):
        raise ConfigError(f"{path}: expected 'key: value' lines at the top, found {type(container).__name__}")
    return cast(dict[str, Any], container)


def _yaml_reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return str(error).partition("\n")[0]


# -------------------------------------------------------------------------------------------------- overrides


def _parse_override(model: type[BaseModel], text: str) -> Layer:
    key, equals, value = text.partition("=")
    plain = key.strip().lstrip("+~")
    path = plain.split(".")
    if not equals:
        known = plain in all_keys(model)
        raise ConfigError(
            f"{text!r}: expected KEY=VALUE, for example {plain if known else 'env'}={'...' if known else text}"
        )
    _check_path(model, path, source=text)
    if plain != key.strip():
        raise ConfigError(f"{text!r}: keys take no '+' or '~' here. Write {plain}={value}")
    if not value.strip():
        raise ConfigError(f"{text!r}: no value. Write {plain}=null for none, or {plain}=\"''\" for an empty text")
    data: Any = _parse_value(text, value.strip(), _annotation_at(model, path))
    for part in reversed(path):
        data = {part: data}
    return Layer(text, cast(dict[str, Any], data))


def _parse_value(text: str, value: str, annotation: Any) -> Any:
    """The typed value: YAML, but literally what was typed where only text is accepted (``model.revision=1e10``)."""
    if value in _NULLS:
        return None
    if _plain_types(annotation) <= {str, Path} and annotation is not None and value[0] not in "'\"":
        return value
    try:
        parsed = OmegaConf.from_dotlist([f"value={value}"])
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r}: not valid YAML: {_yaml_reason(error)}. Put quotes around text") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{text!r}: cannot be read: {str(error).partition(chr(10))[0]}") from None
    return cast(dict[str, Any], OmegaConf.to_container(parsed, resolve=False))["value"]


def _check_keys(model: type[BaseModel], data: Mapping[str, Any], source: str) -> None:
    for path in _paths(model, data):
        _check_path(model, path, source=source)


def _paths(model: type[BaseModel], data: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Dotted paths of ``data`` down to the fields of ``model``; what lies below a free-form field is left alone."""
    for key, value in data.items():
        section = _section(model, key)
        if section is not None and isinstance(value, Mapping):
            yield from _paths(section, value, (*prefix, key))
        else:
            yield [*prefix, str(key)]


def _check_path(model: type[BaseModel], path: Sequence[str], *, source: str) -> None:
    """Raise `ConfigError` with the nearest valid key unless ``path`` names a section or a field of ``model``."""
    current = model
    for depth, part in enumerate(path):
        section = _section(current, part)
        if section is not None:
            current = section
            continue
        if part in current.model_fields:
            rest = path[depth + 1 :]
            if rest and not _is_free_form(current.model_fields[part].annotation):
                key = ".".join(path[: depth + 1])
                raise ConfigError(f"{source}: {key!r} is a single value and has no key {'.'.join(rest)!r} below it")
            return
        if part and current.model_config.get("extra") == "allow":
            return
        where = f"in section {'.'.join(path[:depth])!r}" if depth else "at the top level"
        what = f"unknown key {part!r}" if part else "empty key"
        hint = _suggest(model, list(path), depth) or f" Keys there: {', '.join(current.model_fields)}"
        raise ConfigError(f"{source}: {what} {where}.{hint}")


def _suggest(model: type[BaseModel], path: Sequence[str], depth: int) -> str:
    """`` Did you mean 'trainer.total_steps'?`` or an empty string."""
    keys, synonyms = all_keys(model), _synonyms(model)
    cleaned = [re.sub(r"\W", "_", part).lower() for part in path if part]
    if not cleaned:
        return ""
    typed, leaf, section = ".".join(cleaned), cleaned[-1], ".".join(path[:depth])
    candidates: list[str] = [typed] if typed in keys else []
    candidates += [synonyms[leaf]] if leaf in synonyms else []
    candidates += [key for key in keys if key.rpartition(".")[2] == leaf]
    inside = {key.rpartition(".")[2]: key for key in keys if key.startswith(section + ".")} if section else {}
    candidates += [inside[name] for name in difflib.get_close_matches(leaf, list(inside), n=1, cutoff=0.6)]
    if not section:
        candidates += difflib.get_close_matches(typed, list(keys), n=1, cutoff=0.6)
    leaves = {key.rpartition(".")[2]: key for key in keys}
    candidates += [leaves[name] for name in difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.75)]
    return f" Did you mean {candidates[0]!r}?" if candidates else ""


def all_keys(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Every key of ``model`` as dotted path, sections included, in the order of definition."""
    keys: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        keys[name] = field
        section = _section(model, name)
        if section is not None:
            keys |= {f"{name}.{key}": inner for key, inner in all_keys(section).items()}
    return keys


def _synonyms(model: type[BaseModel]) -> dict[str, str]:
    result: dict[str, str] = {}
    for key, field in all_keys(model).items():
        extra = field.json_schema_extra
        if isinstance(extra, dict):
            result |= dict.fromkeys(cast(list[str], extra.get("synonyms", [])), key)
        section = _section(model, key)
        if section is not None and issubclass(section, ConfigModel):
            result |= {name: f"{key}.{known}" for name, known in section.other_names.items()}
    return result


# -------------------------------------------------------------------------------------------------- messages


def _explain(model: type[BaseModel], error: Mapping[str, Any]) -> str:
    """One line for one pydantic error: key, value, expectation."""
    path = [str(part) for part in error["loc"]]
    key = ".".join(path)
    message: str = error["msg"]
    if error["type"] == "value_error":
        message = message.removeprefix("Value error, ")
        return f"{key}={_show(error['input'])}: {message}" if _is_leaf(model, path) else message
    if error["type"] == "missing" and path[-1].isdigit():
        return f"{key} is missing: expected more than {path[-1]} values ({_description(model, path)})"
    if error["type"] == "missing":
        return f"{key}=... is missing: {_description(model, path)}"
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key.{_suggest(model, path, len(path) - 1)}"
    if error["type"] == "model_type":
        return f"{key}={_show(error['input'])}: expected keys below it ({key}.KEY=VALUE), not a single value"
    expected = re.sub(r"^Input (should be|is not)( a valid)?", "expected", message).replace("dictionary", "mapping")
    near = f" Write {key}=[{error['input']}]" if error["type"] == "list_type" and _is_leaf(model, path) else ""
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        near = did_you_mean(error["input"], re.findall(r"'([^']*)'", expected))
    about = f" ({description})" if (description := _description(model, path)) else ""
    return f"{key}={_show(error['input'])}: {expected}{about}.{near}"


def _show(value: Any) -> str:
    text = "null" if value is None else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _description(model: type[BaseModel], path: Sequence[str]) -> str:
    field = all_keys(model).get(".".join(part for part in path if not part.isdigit()))
    return (field.description or "").partition(". ")[0].rstrip(".") if field is not None else ""


def _is_leaf(model: type[BaseModel], path: Sequence[str]) -> bool:
    return bool(path) and _annotation_at(model, path) is not None


# -------------------------------------------------------------------------------------------------- annotations


def _section(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The model of section ``name``; None where it is a plain field or does not exist."""
    field = model.model_fields.get(name)
    if field is None:
        return None
    for kind in _alternatives(field.annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _choice(model: type[BaseModel], name: str) -> str | None:
    """The field of section ``name`` that a plain value stands for; None where there is none."""
    section = _section(model, name)
    return section.chosen_by if section is not None and issubclass(section, ConfigModel) else None


def _annotation_at(model: type[BaseModel], path: Sequence[str]) -> Any:
    """The annotation of the field at ``path``; None for sections, free-form keys and unknown ones."""
    for depth, part in enumerate(path):
        section = _section(model, part)
        if section is not None:
            choice = _choice(model, part)
            if depth == len(path) - 1 and choice is not None:
                return section.model_fields[choice].annotation
            model = section
        elif part in model.model_fields and depth == len(path) - 1:
            return model.model_fields[part].annotation
        else:
            return None
    return None


def _alternatives(annotation: Any) -> list[Any]:
    """The members of a union, with ``Annotated`` taken off; a list of one for anything else."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for member in get_args(annotation) for kind in _alternatives(member)]
    return [annotation]


def _plain_types(annotation: Any) -> set[Any]:
    """The types a value may have, without None; the types of the values for a ``Literal``."""
    result: set[Any] = set()
    for kind in _alternatives(annotation):
        if get_origin(kind) is Literal:
            result |= {type(value) for value in get_args(kind)}
        elif kind is not type(None):
            result.add(get_origin(kind) or kind)
    return result


def _is_free_form(annotation: Any) -> bool:
    return any((get_origin(kind) or kind) is dict for kind in _alternatives(annotation))

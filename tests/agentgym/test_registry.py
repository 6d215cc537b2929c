"""The one registry."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentgym.errors import ConfigError, PluginError, RegistrationError, UnknownName
from agentgym.registry import Registry, describe_origin, import_target, same_target

SOURCE = """
def first(): return 1
def second(): return 2
class Bare: pass
class Other: pass
anonymous = lambda: 0
"""


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[[str, str], ModuleType]]:
    """Import a file of the test's directory under a name; undone at the end."""
    names = []

    def load(name: str, file: str = "plug.py") -> ModuleType:
        path = tmp_path / file
        path.write_text(SOURCE)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        names.append(name)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in names:
        del sys.modules[name]


def one() -> int:
    return 1


def two() -> int:
    return 2


def test_what_was_registered_is_found() -> None:
    registry: Registry[Callable[[], int]] = Registry("thing")
    registry.register("one", one)
    assert registry.decorator("two")(two) is two
    assert registry.get("one") is one
    assert registry.names() == list(registry) == ["one", "two"]
    assert "one" in registry
    assert "three" not in registry


def test_a_string_is_imported_at_the_first_use() -> None:
    registry: Registry[Any] = Registry("thing")
    registry.register("lazy", "json.decoder:JSONDecoder")
    registry.register("broken", "no_such_module_xyz:thing")  # nothing is imported here
    import json

    assert registry.get("lazy") is json.decoder.JSONDecoder
    with pytest.raises(PluginError, match="'broken': importing 'no_such_module_xyz' failed: ModuleNotFoundError"):
        registry.get("broken")


def test_an_unknown_name_gets_the_nearest_and_all_names() -> None:
    registry: Registry[Any] = Registry("agent loop")
    registry.register("tool_agent", one)
    registry.register("single_turn", two)
    with pytest.raises(UnknownName) as caught:
        registry.get("tool_agnet")
    assert str(caught.value).startswith(
        "unknown agent loop 'tool_agnet'. Did you mean 'tool_agent'? Known: single_turn, tool_agent."
    )
    assert "plugins=" in str(caught.value)
    assert isinstance(caught.value, ConfigError)
    with pytest.raises(UnknownName, match="Known: none"):
        Registry[Any]("thing").origin("x")


def test_the_same_target_again_is_no_conflict(load: Callable[..., ModuleType]) -> None:  # F3
    registry: Registry[Any] = Registry("thing")
    a, b = load("pack_a"), load("pack_b")  # one file, imported under two paths
    assert a.first is not b.first
    for attribute in ("first", "Bare"):
        registry.register(attribute, getattr(a, attribute))
        registry.register(attribute, getattr(a, attribute))
        registry.register(attribute, getattr(b, attribute))
        assert registry.get(attribute) is getattr(a, attribute)
    registry.register("lazy", "json:loads")
    registry.register("lazy", "json:loads")


def test_another_target_under_a_name_is_a_conflict_that_names_both_origins(load: Callable[..., ModuleType]) -> None:
    registry: Registry[Any] = Registry("thing")
    a, other = load("pack_a"), load("pack_c", "other.py")
    registry.register("x", a.Bare)
    for rival in (other.Bare, a.Other, a.first, "json:loads"):
        with pytest.raises(RegistrationError) as caught:
            registry.register("x", rival)
        assert "pack_a:Bare" in str(caught.value)
        assert describe_origin(rival) in str(caught.value)
        assert caught.value.name == "x"
    assert registry.get("x") is a.Bare
    registry.register("x", other.Bare, override=True)
    assert registry.get("x") is other.Bare
    assert registry.origin("x") == describe_origin(other.Bare)


def test_functions_made_by_one_function_or_by_lambda_are_different() -> None:
    def make(value: int) -> Callable[[], int]:
        def made() -> int:
            return value

        return made

    lambdas = [lambda value=value: value for value in (1, 2)]
    for a, b in ([make(1), make(2)], lambdas):
        registry: Registry[Any] = Registry("thing")
        registry.register("x", a)
        with pytest.raises(RegistrationError):
            registry.register("x", b)
        registry.register("x", a)
        assert registry.get("x")() == 1


def test_names_are_not_empty_and_have_no_outer_spaces() -> None:
    registry: Registry[Any] = Registry("thing")
    for name in ("", " x", "x\n"):
        with pytest.raises(RegistrationError, match="expected a non-empty name"):
            registry.register(name, one)


def test_plugins_are_loaded_before_a_name_is_unknown_and_before_listing() -> None:
    calls: list[str] = []

    def load() -> None:
        calls.append("load")
        registry.register("from_plugin", one)

    registry: Registry[Any] = Registry("thing", before_lookup=load)
    registry.register("known", two)
    assert registry.get("known") is two
    assert calls == []
    assert registry.get("from_plugin") is one
    assert calls == ["load"]
    assert registry.names() == ["from_plugin", "known"]
    assert calls == ["load", "load"]


def test_a_registry_may_say_itself_what_is_the_same() -> None:
    registry: Registry[dict[str, int]] = Registry("thing", same=lambda a, b: a == b)
    registry.register("x", {"a": 1})
    registry.register("x", {"a": 1})
    with pytest.raises(RegistrationError):
        registry.register("x", {"a": 2})


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("json:loads", None, ""),
        ("json.loads", None, ""),
        ("json:", RegistrationError, "not of the form 'module:attribute'"),
        ("json", RegistrationError, "not of the form"),
        (":loads", RegistrationError, "not of the form"),
        ("jsonn:loads", PluginError, "importing 'jsonn' failed: ModuleNotFoundError: No module named 'jsonn'"),
        ("json:JSONDecodr", PluginError, "'json' has no 'JSONDecodr'. Did you mean 'JSONDecoder'?"),
        ("json.decoder:JSONDecoder.decode", None, ""),
        ("json.decoder:JSONDecoder.decoed", PluginError, "Did you mean 'decode'?"),
    ],
)
def test_import_paths(path: str, error: type[Exception] | None, message: str) -> None:
    if error is None:
        assert callable(import_target(path, what="thing 'x'"))
    else:
        with pytest.raises(error) as caught:
            import_target(path, what="thing 'x'")
        assert message in str(caught.value)
        assert str(caught.value).startswith("thing 'x'")


def test_a_module_that_fails_while_it_is_imported_is_reported_as_that(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "broken_module_xyz.py").write_text("import no_such_dependency\n")
    (tmp_path / "raising_module_xyz.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match="No module named 'no_such_dependency'"):
        import_target("broken_module_xyz:x", what="thing 'x'")
    with pytest.raises(PluginError, match="importing 'raising_module_xyz' failed: ZeroDivisionError"):
        import_target("raising_module_xyz:x", what="thing 'x'")


def test_origins_say_where_to_look(load: Callable[..., ModuleType], tmp_path: Path) -> None:
    module = load("pack_a")
    assert describe_origin("a.b:C") == "a.b:C"
    assert describe_origin(module.second) == f"pack_a:second ({tmp_path / 'plug.py'}:3)"
    assert describe_origin(module.Bare) == f"pack_a:Bare ({tmp_path / 'plug.py'})"


def test_unrelated_things_are_not_the_same() -> None:
    assert same_target(one, one)
    assert not same_target(one, two)
    assert not same_target(object(), object())
    assert not same_target("a:b", "a:c")
    assert not same_target(one, "tests:one")

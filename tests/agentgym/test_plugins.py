"""Plugins: files, modules, the environment variable, entry points."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import gymnasium
import pytest

import agentgym
from agentgym import plugins, registration
from agentgym.errors import PluginError, RegistrationError, UnknownName

ENV = """
import agentgym
from agentgym import Env

class {cls}(Env):
    def reset(self, *, seed=None, options=None):
        return ({{"role": "user", "content": "{text}"}},), {{}}

    def step(self, action):
        return (), 1.0, True, False, {{}}

{register}
"""


def source(name: str | None, *, cls: str = "Tiny", text: str = "hello") -> str:
    """A plugin file that registers one environment; None: it has a function ``register`` instead."""
    if name is None:
        return ENV.format(cls=cls, text=text, register=f'def register():\n    agentgym.register("{text}", {cls})')
    return ENV.format(cls=cls, text=text, register=f'agentgym.register("{name}", {cls})')


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registries and plugins as they were, before and after."""
    monkeypatch.delenv(plugins.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(plugins, "_loaded", [])
    monkeypatch.setattr(plugins, "_broken", [])
    monkeypatch.setattr(plugins, "_installed", [])
    monkeypatch.setattr(plugins, "_scanned", False)
    monkeypatch.setattr(registration._registry, "_entries", dict(registration._registry._entries))
    known, modules = dict(gymnasium.registry), set(sys.modules)
    yield
    for id in set(gymnasium.registry) - set(known):
        del gymnasium.registry[id]
    for name in set(sys.modules) - modules:
        if name.startswith(("agentgym_file_", "pack_")):
            del sys.modules[name]


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution with one module and an ``agentgym.envs`` entry point, as pip would lay it out."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def install(module: str, text: str, *, target: str = "", version: str = "1.2") -> None:
        (site / f"{module}.py").write_text(text)
        info = site / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[agentgym.envs]\n{module} = {target or module}\n")

    return install


def test_a_file_is_loaded_once_and_listed_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source("mine") + "\nimport os\nos.environ['LOADS'] = os.environ.get('LOADS', '') + 'x'\n")
    monkeypatch.setenv("LOADS", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.py").symlink_to(path)
    assert plugins.load(["mine.py"]) == [str(path)]
    assert plugins.load(["./mine.py", str(path), "link.py"]) == [str(path)]
    assert plugins.loaded() == [str(path)]
    assert os.environ["LOADS"] == "x"
    assert agentgym.make("mine").reset()[0][0]["content"] == "hello"
    assert agentgym.spec("mine").plugin == str(path)


def test_classes_of_a_plugin_file_can_be_pickled(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source("mine"))
    plugins.load([str(path)])
    cls = agentgym.spec("mine").load()
    assert pickle.loads(pickle.dumps(cls)) is cls


def test_two_files_of_one_name_are_two_plugins(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "envs.py" for folder in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(source(f"env-{path.parent.name}", text=path.parent.name))
    assert plugins.load(map(str, paths)) == [str(path) for path in paths]
    assert [agentgym.make(f"env-{name}").reset()[0][0]["content"] for name in "ab"] == ["a", "b"]


def test_modules_and_functions_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pack_module.py").write_text(source("by-module"))
    (tmp_path / "pack_function.py").write_text(source(None, text="by-function"))
    monkeypatch.syspath_prepend(tmp_path)
    assert plugins.load(["pack_module", "pack_function:register"]) == ["pack_module", "pack_function:register"]
    assert {"by-module", "by-function"} <= set(agentgym.list_envs())


def test_a_module_and_its_file_are_the_same_plugin_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # F3
    path = tmp_path / "pack_twice.py"
    path.write_text(source("twice"))
    monkeypatch.syspath_prepend(tmp_path)
    assert plugins.load(["pack_twice", str(path)]) == ["pack_twice", str(path)]
    assert agentgym.list_envs().count("twice") == 1


def test_the_environment_variable_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.py").write_text(source(f"env-{name}"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(plugins.ENVIRONMENT_VARIABLE, " one.py, two.py,")
    assert plugins.load(["three.py"]) == [str(tmp_path / f"{name}.py") for name in ("one", "two", "three")]


def test_the_environment_variable_is_read_when_a_name_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late.py").write_text(source("late"))
    with pytest.raises(UnknownName):
        agentgym.make("late")
    monkeypatch.setenv(plugins.ENVIRONMENT_VARIABLE, str(tmp_path / "late.py"))
    assert agentgym.make("late").reset()[0][0]["content"] == "hello"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("typo.py", None, "there is no file"),
        ("mine", "", "importing plugin 'mine' failed: ModuleNotFoundError: No module named 'mine'"),
        ("bad.py", "import no_such_dependency", "failed: ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("bad.py", "1 / 0", "failed: ZeroDivisionError: division by zero"),
        ("bad.py", "def f(:", "failed: SyntaxError: invalid syntax"),
        ("bad.py", "raise ConnectionError('down')", "failed: ConnectionError: down"),
        ("bad.py", "import agentgym\nagentgym.register('a:b', 'm:C')", "could not register: environment id 'a:b'"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "type.py").write_text("")
    if text:
        (tmp_path / name).write_text(text)
    with pytest.raises(PluginError) as caught:
        plugins.load([name])
    assert message in str(caught.value)
    assert repr(name) in str(caught.value)
    if name.endswith(".py"):
        assert str(tmp_path / name) in str(caught.value)
    assert plugins.loaded() == []
    assert plugins.current() is None


def test_the_nearest_file_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "write_an_env.py").write_text("")
    with pytest.raises(PluginError, match=r"Did you mean 'write_an_env\.py'\?"):
        plugins.load([str(tmp_path / "write_an_evn.py")])


def test_a_missing_function_of_a_module_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pack_function.py").write_text(source(None))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=r"AttributeError: module 'pack_function' has no attribute 'regsiter'"):
        plugins.load(["pack_function:regsiter"])


def test_a_mended_plugin_can_be_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("1 / 0")
    with pytest.raises(PluginError):
        plugins.load([str(path)])
    path.write_text(source("mended-env"))
    assert plugins.load([str(path)]) == [str(path)]
    assert "mended-env" in agentgym.list_envs()


def test_entry_points_are_found_when_a_name_is_asked_for(install: Install) -> None:
    install("pack_module", source("by-module"))
    install("pack_function", source(None, text="by-function"), target="pack_function:register")
    assert agentgym.make("by-module").reset()[0][0]["content"] == "hello"
    assert agentgym.make("by-function").reset()[0][0]["content"] == "by-function"
    assert plugins.loaded() == []  # they are installed where the workers run; nothing to ship


def test_a_broken_entry_point_is_reported_with_its_distribution_never_as_not_found(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("pack_broken", "import no_such_dependency", version="3.1")
    install("pack_whole", source("whole-env"))
    for _ in range(2):
        with pytest.raises(PluginError) as caught:
            agentgym.make("from-broken")
        assert "distribution pack_broken 3.1" in str(caught.value)
        assert "ModuleNotFoundError: No module named 'no_such_dependency'" in str(caught.value)
    assert agentgym.make("whole-env").reset()[0] != ()  # others go on working
    assert "whole-env" in agentgym.list_envs()
    assert "pack_broken" in caplog.text


def test_two_plugins_that_claim_one_name(install: Install) -> None:  # F3
    install("pack_a", source("claimed", text="a"))
    install("pack_b", source("claimed", text="b"))
    install("pack_c", source("free-env"))
    for _ in range(2):  # not the first to come, and not once the error was seen
        with pytest.raises(RegistrationError) as caught:
            agentgym.make("claimed")
        assert "pack_a" in str(caught.value)
        assert "pack_b" in str(caught.value)
    assert agentgym.make("free-env").reset()[0] != ()


def test_a_plugin_that_claims_a_shipped_name_is_refused_and_both_are_named(tmp_path: Path) -> None:  # F3
    path = tmp_path / "rival.py"
    path.write_text(source("calculator-math"))
    with pytest.raises(PluginError) as caught:
        plugins.load([str(path)])
    assert "agentgym.envs.calculator_math:CalculatorMath" in str(caught.value)
    assert str(path) in str(caught.value)
    assert agentgym.spec("calculator-math").entry_point == "agentgym.envs.calculator_math:CalculatorMath"


def test_importing_agentgym_scans_nothing(install: Install, tmp_path: Path) -> None:
    install("pack_loud", "raise SystemExit('imported')")
    code = "import agentgym, sys; assert 'pack_loud' not in sys.modules; print(len(agentgym.registration.SHIPPED))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(len(registration.SHIPPED))), done.stderr


def test_the_list_of_loaded_plugins_brings_another_process_to_the_same_names(tmp_path: Path) -> None:  # F1
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(source(f"env-{name}"))
    shipped = plugins.load([str(tmp_path / "first.py"), str(tmp_path / "second.py")])
    code = "import agentgym, json; print(json.dumps([agentgym.list_envs(), agentgym.plugins.loaded()]))"
    environment = {**os.environ, plugins.ENVIRONMENT_VARIABLE: ",".join(shipped)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    names, loaded = json.loads(done.stdout)
    assert loaded == shipped
    assert names == sorted([*registration.SHIPPED, "env-first", "env-second"])
    assert set(names) <= set(agentgym.list_envs())


def test_the_fixture_is_seen_as_installed(install: Install) -> None:
    install("pack_module", source("by-module"))
    assert [point.name for point in importlib.metadata.entry_points(group="agentgym.envs")] == ["pack_module"]

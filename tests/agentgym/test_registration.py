"""Environments by name."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import pytest
from gymnasium.utils import env_checker

import agentgym
from agentgym import plugins, registration
from agentgym.env import Action, Env, Info, Observation
from agentgym.errors import ConfigError, PluginError, RegistrationError, UnknownName, UnknownVersion
from agentgym.registration import EnvSpec, check_kwargs, portable


class Digits(Env):
    """Say the number of digits back."""

    def __init__(self, digits: int = 2, *, words: list[str] | None = None) -> None:
        self.digits = digits
        self.words = words

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        super().reset(seed=seed)
        self.turns = 0
        self.word = str(self.np_random.integers(10**self.digits))
        return ({"role": "user", "content": self.word},), {}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, Info]:
        self.turns += 1
        return ({"role": "user", "content": "?"},), float(action == self.word), action == self.word, False, {}


class Other(Digits):
    pass


class Shout(Digits):
    def __init__(self, volume: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.volume = volume


def factory(*, digits: int = 3) -> Env:
    return Digits(digits)


def anything(**kwargs: Any) -> Env:
    return Digits(**kwargs)


def not_an_env() -> Any:
    return object()


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registries and plugins as they were, before and after."""
    monkeypatch.delenv(plugins.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(plugins, "_loaded", [])
    monkeypatch.setattr(registration._registry, "_entries", dict(registration._registry._entries))
    known = dict(gymnasium.registry)
    yield
    for id in set(gymnasium.registry) - set(known):
        del gymnasium.registry[id]


# -- ids and aliases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("id", "canonical", "aliases"),
    [
        ("my-env", "agentgym/my-env-v0", ["my-env", "my-env-v0", "agentgym/my-env"]),
        ("my-env-v3", "agentgym/my-env-v3", ["my-env", "my-env-v3", "agentgym/my-env"]),
        ("agentgym/my.env_2-v1", "agentgym/my.env_2-v1", ["my.env_2", "my.env_2-v1"]),
        ("pack/my-env-v1", "pack/my-env-v1", ["pack/my-env"]),
        ("x-very", "agentgym/x-very-v0", ["x-very"]),
    ],
)
def test_an_environment_is_known_by_its_id_and_its_aliases(id: str, canonical: str, aliases: list[str]) -> None:
    agentgym.register(id, Digits)
    for alias in [id, canonical, *aliases]:
        assert agentgym.spec(alias).id == canonical
    assert aliases[0] in agentgym.list_envs()
    assert canonical in gymnasium.registry
    assert agentgym.make(aliases[0]).reset(seed=0)[0] != ()


@pytest.mark.parametrize("id", ["", "a:b", "module:env-v0", "a b", "a/b/c", "/x", "x/", "tür\n"])
def test_malformed_ids_are_refused(id: str) -> None:
    with pytest.raises(RegistrationError, match="expected NAME or NAME-vN"):
        agentgym.register(id, Digits)


def test_the_bare_name_means_the_newest_version() -> None:
    agentgym.register("my-env-v2", Digits, kwargs={"digits": 2})
    agentgym.register("my-env-v10", Digits, kwargs={"digits": 10})
    agentgym.register("my-env", Digits, kwargs={"digits": 0})
    assert agentgym.spec("my-env").id == "agentgym/my-env-v10"
    assert agentgym.spec("my-env-v0").kwargs == {"digits": 0}
    assert [name for name in agentgym.list_envs() if "my-env" in name] == ["my-env", "my-env-v0", "my-env-v2"]
    assert all(agentgym.spec(name) for name in agentgym.list_envs())


def test_an_unknown_name_gets_the_nearest_and_all_names() -> None:  # F6
    with pytest.raises(UnknownName) as caught:
        agentgym.make("calculator-maths", digits=3)
    message = str(caught.value)
    assert "unknown environment 'calculator-maths'. Did you mean 'calculator-math'?" in message
    assert all(name in message for name in agentgym.list_envs())
    assert "plugins=" in message
    with pytest.raises(gymnasium.error.NameNotFound):
        agentgym.spec("agentgym/calculator-maths-v0")


@pytest.mark.parametrize("id", ["calculator math", "agentgym:calculator-math", "", "elsewhere/calculator-math"])
def test_a_malformed_name_is_an_unknown_one(id: str) -> None:
    with pytest.raises(UnknownName, match=r"Known: .*calculator-math"):
        agentgym.make(id)


def test_an_unknown_version_gets_the_known_ones() -> None:
    agentgym.register("my-env-v2", Digits)
    with pytest.raises(UnknownVersion, match="Known versions: my-env-v2") as caught:
        agentgym.spec("my-env-v1")
    assert isinstance(caught.value, gymnasium.error.VersionNotFound)


# -- conflicts ---------------------------------------------------------------------------------------------------------


def module_at(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_same_spec_twice_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # F3
    path = tmp_path / "tiny.py"
    path.write_text("from agentgym import Env\nclass Tiny(Env, abstract=True): pass\n")
    first, second = module_at("pack_one", path), module_at("pack_two", path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for target in (first.Tiny, first.Tiny, second.Tiny, "pack_one:Tiny", "pack_two:Tiny"):
            agentgym.register("tiny", target, kwargs={"a": [1]}, max_turns=3)
    assert agentgym.spec("tiny").entry_point == "pack_one:Tiny"
    for name in ("pack_one", "pack_two"):
        del sys.modules[name]


def test_the_same_spec_by_an_import_path_that_is_not_imported_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pack_lazy").mkdir()
    (tmp_path / "pack_lazy" / "__init__.py").write_text("")
    (tmp_path / "pack_lazy" / "envs.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "pack_lazy")
    agentgym.register("lazy", "pack_lazy.envs:Tiny")
    agentgym.register("lazy", "envs:Tiny")
    assert "pack_lazy.envs" not in sys.modules
    with pytest.raises(RegistrationError):
        agentgym.register("lazy", "envs:Bigger")


@pytest.mark.parametrize(
    "change",
    [
        {"entry_point": Other},
        {"entry_point": factory},
        {"entry_point": "json:loads"},
        {"kwargs": {"digits": 4}},
        {"kwargs": None},
        {"max_turns": 6},
        {"max_user_turns": 1},
    ],
)
def test_another_spec_under_a_name_is_a_conflict_that_names_both_origins(change: dict[str, Any]) -> None:  # F3
    base: dict[str, Any] = {"entry_point": Digits, "kwargs": {"digits": 3}, "max_turns": 5}
    agentgym.register("my-env", **base)
    before = agentgym.spec("my-env")
    rival = {**base, **change}
    with pytest.raises(RegistrationError) as caught:
        agentgym.register("my-env", **rival)
    message = str(caught.value)
    assert f"{Digits.__module__}:Digits" in message
    assert __file__ in message
    assert "override=True" in message
    if isinstance(rival["entry_point"], str):
        assert rival["entry_point"] in message
    assert agentgym.spec("my-env") == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agentgym.register("my-env", **rival, override=True)
    assert agentgym.spec("my-env") != before
    assert gymnasium.spec("agentgym/my-env-v0").kwargs == (rival["kwargs"] or {})


def test_a_description_does_not_make_another_spec() -> None:
    agentgym.register("my-env", Digits, description="one")
    agentgym.register("my-env", Digits, description="two")


@pytest.mark.parametrize("name", ["max_turns", "max_user_turns"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True])
def test_limits_are_whole_numbers_from_one_on(name: str, value: Any) -> None:
    with pytest.raises(RegistrationError, match=f"{name}={value!r}; expected a whole number"):
        agentgym.register("my-env", Digits, **{name: value})
    assert "my-env" not in agentgym.list_envs()


# -- making ------------------------------------------------------------------------------------------------------------


def test_keyword_arguments_do_not_leak() -> None:
    words = ["a"]
    given = {"digits": 5, "words": words}
    agentgym.register("my-env", Digits, kwargs=given)
    given["digits"] = 9
    words.append("b")
    made: Any = agentgym.make("my-env")
    assert (made.digits, made.words) == (5, ["a"])
    made.words.append("c")
    dict(agentgym.spec("my-env").kwargs)["words"].append("d")
    via_gymnasium: Any = gymnasium.make("agentgym/my-env-v0").unwrapped
    via_gymnasium.words.append("e")
    other: Any = agentgym.make("my-env", digits=7)
    assert (other.digits, other.words) == (7, ["a"])
    again: Any = agentgym.make("my-env")
    assert (again.digits, again.words) == (5, ["a"])


def test_what_make_sets_on_the_environment() -> None:
    agentgym.register("my-env", Digits, kwargs={"digits": 3}, max_turns=5, max_user_turns=2)
    env = agentgym.make("my-env", words=["x"])
    assert (env.max_turns, env.max_user_turns, env.name) == (5, 2, "agentgym/my-env-v0")
    assert env.spec is not None
    assert env.spec.kwargs == {"digits": 3, "words": ["x"]}
    assert str(env) == "<Digits<agentgym/my-env-v0>>"
    again: Any = env.spec.make().unwrapped
    assert again.words == ["x"]


def test_functions_make_environments_too() -> None:
    agentgym.register("made", factory, kwargs={"digits": 4})
    agentgym.register("any", anything)
    for name, digits in (("made", 4), ("any", 1)):
        env: Any = agentgym.make(name, digits=digits)
        assert env.digits == digits


def test_a_spec_can_be_made_directly() -> None:
    spec = EnvSpec(id="agentgym/loose-v1", entry_point=Digits, kwargs={"digits": 6}, max_turns=2)
    env: Any = agentgym.make(spec, words=[])
    assert (env.digits, env.words, env.max_turns, env.name) == (6, [], 2, "agentgym/loose-v1")
    assert (spec.name, spec.namespace, spec.version) == ("loose", "agentgym", 1)
    assert EnvSpec(id="pack/loose-v0", entry_point=Digits).name == "pack/loose"


def test_an_entry_point_that_gives_something_else_is_refused() -> None:
    agentgym.register("odd", not_an_env)
    with pytest.raises(RegistrationError, match=r"gave a object; expected an agentgym\.Env"):
        agentgym.make("odd")


def test_an_entry_point_that_cannot_be_imported_is_reported() -> None:
    agentgym.register("gone", "no_such_module:Env")
    with pytest.raises(PluginError, match="'agentgym/gone-v0': importing 'no_such_module' failed"):
        agentgym.make("gone")


@pytest.mark.parametrize(
    ("entry_point", "kwargs", "message"),
    [
        (Digits, {"digits": 1, "words": []}, None),
        (Digits, {"digist": 1}, "no setting 'digist'. Did you mean 'digits'? Its settings: digits, words"),
        (Other, {"digist": 1}, "Did you mean 'digits'?"),
        (Shout, {"volume": 1, "digits": 2, "words": []}, None),
        (Shout, {"volume": 1, "digist": 2}, "Its settings: digits, volume, words"),
        (Shout, {"digits": 2}, "needs volume: pass volume=..."),
        (factory, {"digits": 2}, None),
        (factory, {"words": []}, "Its settings: digits"),
        (not_an_env, {"x": 1}, "Its settings: none"),
        (anything, {"whatever": 1}, None),
    ],
)
def test_settings_are_compared_with_the_constructor(
    entry_point: Callable[..., Env], kwargs: dict[str, Any], message: str | None
) -> None:
    agentgym.register("my-env", entry_point)
    spec = agentgym.spec("my-env")
    if message is None:
        check_kwargs(spec, kwargs)
        return
    with pytest.raises(ConfigError) as caught:
        check_kwargs(spec, kwargs)
    assert message in str(caught.value)
    assert "environment 'my-env'" in str(caught.value)
    with pytest.raises(ConfigError):
        agentgym.make("my-env", **kwargs)


def test_a_required_setting_may_come_from_the_spec() -> None:
    agentgym.register("loud", Shout, kwargs={"volume": 11})
    env: Any = agentgym.make("loud")
    assert env.volume == 11


# -- Gymnasium ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("id", ["agentgym/my-env-v0", "agentgym:agentgym/my-env-v0"])
def test_gymnasium_makes_it_without_a_warning(id: str) -> None:
    agentgym.register("my-env", Digits, kwargs={"digits": 3})
    env: Any = gymnasium.make(id, words=["x"])
    observation, _ = env.reset(seed=1)
    assert observation in env.observation_space
    assert env.step(env.action_space.sample())[1] == 0.0
    assert env.step(observation[0]["content"])[1:4] == (1.0, True, False)
    env_checker.check_env(env.unwrapped)
    env.close()
    env.close()


def test_the_turn_limit_is_gymnasiums_time_limit() -> None:
    agentgym.register("my-env", Digits, max_turns=2)
    env: Any = gymnasium.make("agentgym/my-env-v0")
    env.reset(seed=0)
    assert [env.step("wrong")[2:4] for _ in range(2)] == [(False, False), (False, True)]
    own = agentgym.make("my-env")  # here the session owns the limit
    own.reset(seed=0)
    assert [own.step("wrong")[2:4] for _ in range(3)] == [(False, False)] * 3


def test_gymnasiums_vector_environments_work() -> None:
    agentgym.register("my-env", Digits)
    envs: Any = gymnasium.make_vec("agentgym/my-env-v0", num_envs=2)
    observations, _ = envs.reset(seed=[1, 2])
    words = [observation[0]["content"] for observation in observations]
    assert words == [agentgym.make("my-env").reset(seed=seed)[0][0]["content"] for seed in (1, 2)]
    assert list(envs.step(tuple(words))[1]) == [1.0, 1.0]
    envs.close()


@pytest.mark.parametrize("name", list(registration.SHIPPED))
def test_shipped_environments_are_in_both_registries(name: str) -> None:
    assert agentgym.spec(name).id == f"agentgym/{name}-v0"
    assert agentgym.spec(name).description
    assert gymnasium.spec(f"agentgym/{name}-v0").entry_point == agentgym.spec(name).entry_point
    assert isinstance(agentgym.make(name), Env)


# -- other processes ---------------------------------------------------------------------------------------------------


def test_a_class_becomes_an_import_path_where_one_leads_to_it() -> None:
    class Local(Digits):
        pass

    assert portable("a:B") == "a:B"
    assert portable(Env) == "agentgym.env:Env"
    assert portable(Local) is Local
    nameless: Any = lambda: Digits()  # noqa: E731 - that it has no name is the point
    assert portable(nameless) is nameless


def test_a_spec_survives_pickling() -> None:
    spec = EnvSpec(id="agentgym/x-v1", entry_point="a:B", kwargs={"k": [1]}, max_turns=3, origin="o", plugin="p")
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert (again.origin, again.plugin) == ("o", "p")
    assert isinstance(pickle.loads(pickle.dumps(agentgym.spec("calculator-math"))).load(), type)


def test_a_spec_that_no_other_process_can_make_says_what_to_do() -> None:  # F1
    class Local(Digits):
        pass

    agentgym.register("local", Local)
    made: Any = agentgym.make("local")
    assert type(made) is Local
    with pytest.raises(ConfigError) as caught:
        pickle.dumps(agentgym.spec("local"))
    assert "Local" in str(caught.value)
    assert "plugins=" in str(caught.value)


def test_an_environment_that_workers_would_not_know_is_refused_in_time(tmp_path: Path) -> None:  # F1
    registration.check_shippable(agentgym.spec("calculator-math"))
    agentgym.register("here", "my_module.envs:Env")
    with pytest.raises(ConfigError, match=r"plugins=my_module\.envs"):
        registration.check_shippable(agentgym.spec("here"))
    path = tmp_path / "mine.py"
    path.write_text("import agentgym\nagentgym.register('there', 'my_module.envs:Env')\n")
    plugins.load([str(path)])
    registration.check_shippable(agentgym.spec("there"))


SCRIPT = """
import multiprocessing, pickle, sys
import agentgym
from agentgym import plugins

def worker(shipped, what, queue):
    try:
        plugins.load(shipped)
        env = agentgym.make(what)
        queue.put([env.reset(seed=1)[0][0]["content"], env.step("x")[1]])
    except agentgym.errors.AgentGymError as error:
        queue.put([type(error).__name__, str(error)])

def ask(shipped, what):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=worker, args=(shipped, what, queue))
    process.start()
    answer = queue.get(timeout=60)
    process.join()
    return answer

if __name__ == "__main__":
    shipped = plugins.load([sys.argv[1]])
    print(ask(shipped, "spawned"))          # the list is shipped: the name is known there
    print(ask([], agentgym.spec("spawned")))  # a spec brings its plugin along
    print(ask([], "spawned"))               # neither: the error says what to list
"""


def test_spawned_processes_find_what_a_plugin_registered(tmp_path: Path) -> None:  # F1
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            import agentgym

            class Spawned(agentgym.Env):
                def reset(self, *, seed=None, options=None):
                    return ({"role": "user", "content": f"seed {seed}"},), {}

                def step(self, action):
                    return (), 1.0, True, False, {}

            agentgym.register("spawned", Spawned)
            """
        )
    )
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "mine.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == ["['seed 1', 1.0]"] * 2, done.stderr
    assert "UnknownName" in lines[2]
    assert "plugins=my_module or plugins=path/to/file.py" in lines[2]

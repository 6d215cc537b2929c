"""Composition of configurations: precedence, typed overrides, and one short message for every mistake."""

from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.config import ConfigModel, Names, all_keys, dump_config, load_config, section, setting
from agentgym.errors import ConfigError
from agentgym.evaluation_config import EvalConfig
from agentgym.settings import EnvConfig


class Optimizer(ConfigModel):
    lr: float = setting(0.1, "Learning rate", gt=0, synonyms=["learning_rate"])
    betas: tuple[float, float] = setting((0.9, 0.999), "Decay rates")


class Run(ConfigModel):
    total_steps: int | None = setting(None, "Steps of the run", ge=1)
    name: str | None = setting(None, "Name of the run")
    folder: Path = setting(Path("runs"), "Folder")
    cluster: Literal["ray", "inline"] = setting("ray", "Where workers live")
    fast: bool = setting(False, "Skip things")
    loggers: list[str] = setting(["jsonl"], "Where metrics go")
    extra: dict[str, Any] = setting({}, "Free-form")
    optimizer: Optimizer = section(Optimizer, "The optimizer")


class Method(ConfigModel):
    chosen_by: ClassVar[str | None] = "name"
    only_presets: ClassVar[bool] = True

    name: str = setting("plain", "Preset")
    strength: float = setting(1.0, "Strength")


class Root(ConfigModel):
    plugins: Names = setting([], "Plugins")
    env: EnvConfig = setting(EnvConfig(name="maze"), "The environment")
    method: Method = section(Method, "The method")
    run: Run = section(Run, "The run")


@pytest.fixture
def presets(tmp_path: Path) -> Path:
    """Presets ``plain`` and ``strong`` of section ``method``; the second also sets a key of ``run``."""
    folder = tmp_path / "presets"
    (folder / "method").mkdir(parents=True)
    (folder / "method" / "plain.yaml").write_text("")
    (folder / "method" / "strong.yaml").write_text("method:\n  strength: 5.0\nrun:\n  total_steps: 7\nother:\n  x: 1\n")
    return folder


def load(presets: Path, *overrides: str, files: tuple[Path, ...] = ()) -> Root:
    return load_config(Root, overrides=overrides, files=files, presets=presets)


def refused(presets: Path, *overrides: str, files: tuple[Path, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(presets, *overrides, files=files)
    return str(caught.value)


def test_precedence_is_defaults_preset_files_overrides(presets: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("method: strong\nrun:\n  total_steps: 20\n  name: first\n  fast: true\n")
    second.write_text("run:\n  name: second\n")
    config = load(presets, "run.fast=false", files=(first, second))
    assert config.method.strength == 5.0  # preset over default 1.0; chosen in a file
    assert config.run.total_steps == 20  # file over preset 7
    assert config.run.name == "second"  # the later file wins
    assert config.run.fast is False  # override over file
    assert config.run.cluster == "ray"  # default


def test_a_preset_may_set_other_sections_and_an_override_may_choose_it(presets: Path) -> None:
    assert load(presets, "method=strong").run.total_steps == 7
    assert load(presets, "method.name=strong", "run.total_steps=null").run.total_steps is None
    assert load(presets, "method=plain").run.total_steps is None


def test_unknown_preset_names_the_nearest(presets: Path) -> None:
    assert refused(presets, "method=stong") == (
        "method=stong: no preset of that name. Did you mean 'strong'? Known: plain, strong"
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.total_steps=12", 12),
        ("run.total_steps=1_000", 1000),
        ("run.total_steps=1e3", 1000),
        ("run.total_steps=null", None),
        ("run.total_steps=None", None),
        ("run.optimizer.lr=1e-4", 1e-4),
        ("run.optimizer.lr=2", 2.0),
        ("run.optimizer.betas=[0.5, 1]", (0.5, 1.0)),
        ("run.fast=true", True),
        ("run.loggers=[a, 'b c', \"d\"]", ["a", "b c", "d"]),
        ("run.loggers=[]", []),
        ("run.folder=some where/x", Path("some where/x")),
        ("run.name=plain text", "plain text"),
        ("run.name=a=b", "a=b"),
        ("run.name='quoted: text'", "quoted: text"),
        ("run.name='null'", "null"),
        ("run.name=null", None),
        ("run.name=007", "007"),
        ("run.name=1e10", "1e10"),
        ("run.name=true", "true"),
        ("run.name=[x", "[x"),
        ("run.extra={a: {b: 1}}", {"a": {"b": 1}}),
    ],
)
def test_override_values_become_the_type_of_the_field(presets: Path, override: str, expected: object) -> None:
    value: Any = load(presets, override)
    for part in override.partition("=")[0].split("."):
        value = getattr(value, part)
    assert value == expected
    assert type(value) is type(expected)


def test_free_form_fields_take_dotted_keys(presets: Path) -> None:
    config = load(presets, "run.extra.a.b=1", "run.extra.a.c=x")
    assert config.run.extra == {"a": {"b": 1, "c": "x"}}


def test_later_override_wins_and_null_can_be_overridden(presets: Path) -> None:
    assert load(presets, "run.name=a", "run.name=b").run.name == "b"
    assert load(presets, "run.extra.a=null", "run.extra.a.b=1").run.extra == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a.py", ["a.py"]), ("a.py,b.c", ["a.py", "b.c"]), ("[a.py, b.c]", ["a.py", "b.c"]), ("[]", [])],
)
def test_names_are_a_bare_string_or_a_list(presets: Path, text: str, expected: list[str]) -> None:
    assert load(presets, f"plugins={text}").plugins == expected


def test_unknown_keys_of_the_environment_go_to_its_constructor(presets: Path) -> None:
    config = load(presets, "env=house", "env.digits=5", "env.max_turns=3", "env.names=[a]")
    assert (config.env.name, config.env.max_turns) == ("house", 3)
    assert config.env.kwargs == {"digits": 5, "names": ["a"]}


MISTAKES = [
    # F2: every form of a mistyped key
    ("run.totl_steps=9", ["'totl_steps'", "section 'run'", "'run.total_steps'"]),
    ("+run.totl_steps=9", ["'totl_steps'", "section 'run'", "'run.total_steps'"]),
    ("++run.totl_steps=9", ["'totl_steps'", "section 'run'", "'run.total_steps'"]),
    ("+run.total_steps=9", ["+run.total_steps=9", "Write run.total_steps=9"]),
    ("~run.total_steps=9", ["Write run.total_steps=9"]),
    ("run..total_steps=9", ["empty key", "section 'run'", "'run.total_steps'"]),
    (".run.total_steps=9", ["empty key", "'run.total_steps'"]),
    ("run.total-steps=9", ["'total-steps'", "'run.total_steps'"]),
    ("run.Total_Steps=9", ["'Total_Steps'", "'run.total_steps'"]),
    ("lr=1", ["'lr'", "top level", "'run.optimizer.lr'"]),
    ("run.lr=1", ["'lr'", "section 'run'", "'run.optimizer.lr'"]),
    ("learning_rate=1", ["'learning_rate'", "'run.optimizer.lr'"]),
    ("runs.total_steps=1", ["'runs'", "top level", "'run.total_steps'"]),
    ("run.zzz=1", ["'zzz'", "section 'run'", "total_steps, name, folder"]),
    ("zzz", ["'zzz'", "expected KEY=VALUE"]),
    ("run.total_steps", ["expected KEY=VALUE", "run.total_steps=..."]),
    ("run.total_steps=", ["no value", "run.total_steps=null"]),
    ("run.total_steps.x=1", ["'run.total_steps'", "single value", "'x'"]),
    # wrong types and values
    ("run.total_steps=many", ["run.total_steps='many'", "integer", "Steps of the run"]),
    ("run.total_steps=2.5", ["run.total_steps=2.5", "integer"]),
    ("run.total_steps=true", ["run.total_steps=True", "integer"]),
    ("run.total_steps=0", ["run.total_steps=0", "greater than or equal to 1"]),
    ("run.optimizer.lr=x", ["run.optimizer.lr='x'", "number"]),
    ("run.optimizer.lr=0", ["run.optimizer.lr=0", "greater than 0"]),
    ("run.optimizer.lr=null", ["run.optimizer.lr=null", "number"]),
    ("run.fast=maybe", ["run.fast='maybe'", "boolean"]),
    ("run.cluster=inlin", ["run.cluster='inlin'", "'ray' or 'inline'", "Did you mean 'inline'?"]),
    ("run.loggers=3", ["run.loggers=3", "list"]),
    ("run.optimizer.betas=[1]", ["run.optimizer.betas.1"]),
    ("run=5", ["run=5", "run.KEY=VALUE"]),
    ("run=null", ["run=null", "run.KEY=VALUE"]),
    ("run.extra=[1", ["run.extra=[1", "not valid YAML"]),
    ("run.extra=${nope}", ["nope"]),
    ("run={totl_steps: 1}", ["'totl_steps'", "'run.total_steps'"]),
]


@pytest.mark.parametrize(("override", "parts"), MISTAKES)
def test_a_mistake_is_one_short_message(presets: Path, override: str, parts: list[str]) -> None:
    message = refused(presets, override)
    assert [part for part in parts if part not in message] == []
    assert len(message) < 300
    assert "\n" not in message


def test_two_wrong_values_are_two_lines(presets: Path) -> None:
    lines = refused(presets, "run.total_steps=x", "run.fast=x").splitlines()
    assert [line.partition("=")[0] for line in lines] == ["run.total_steps", "run.fast"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("run:\n  learning-rate: 1\n", ["bad.yaml", "'learning-rate'", "section 'run'", "'run.optimizer.lr'"]),
        ("lr: 1\n", ["bad.yaml", "'lr'", "top level", "'run.optimizer.lr'"]),
        ("run:\n  total_steps: many\n", ["run.total_steps='many'", "integer"]),
        ("run:\n  name: 7\n", ["run.name=7", "string"]),
        ("run: [1, 2\n", ["bad.yaml", "not valid YAML", "line"]),
        ("run:\n\ttotal_steps: 1\n", ["bad.yaml", "not valid YAML", "line 2"]),
        ("run:\n  name: a\n  name: b\n", ["bad.yaml", "not valid YAML"]),
        ("- a\n- b\n", ["bad.yaml", "key: value"]),
        ("just text\n", ["bad.yaml"]),
        ("1: x\n", ["bad.yaml", "key: value"]),
    ],
)
def test_a_mistake_in_a_file_names_the_file(presets: Path, tmp_path: Path, text: str, parts: list[str]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    message = refused(presets, files=(file,))
    assert [part for part in parts if part not in message] == []


def test_a_missing_file_names_its_neighbour(presets: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("")
    message = refused(presets, files=(tmp_path / "mime.yaml",))
    assert "no such file" in message
    assert "Did you mean 'mine.yaml'?" in message
    assert load(presets, files=(tmp_path / "mine.yaml",)) == load(presets)


def test_a_file_that_is_not_text_is_refused(presets: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(b"\xff\xfe\x00run")
    assert "bad.yaml" in refused(presets, files=(file,))


@given(
    steps=st.none() | st.integers(1, 10**9),
    lr=st.floats(1e-12, 1e6),
    name=st.none() | st.text(st.characters(codec="utf-8", exclude_characters="$\x85", exclude_categories=["C", "Z"])),
    extra=st.dictionaries(
        st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.none() | st.booleans() | st.integers() | st.text("ab: #'\"1e-")
    ),
)
def test_what_is_dumped_loads_as_the_same_configuration(
    tmp_path_factory: pytest.TempPathFactory, steps: int | None, lr: float, name: str | None, extra: dict[str, object]
) -> None:
    folder = tmp_path_factory.mktemp("round")
    (folder / "method").mkdir()
    (folder / "method" / "plain.yaml").write_text("run:\n  total_steps: 7\n")
    run = Run(total_steps=steps, name=name, extra=extra, optimizer=Optimizer(lr=lr))
    config = Root(run=run, env=EnvConfig.model_validate({"name": "maze", "digits": 3}))
    file = folder / "config.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    assert load(folder, files=(file,)) == config


def test_eval_samples_when_several_samples_are_asked_for() -> None:
    def temperature(*overrides: str) -> float:
        return load_config(EvalConfig, overrides=["env=maze", *overrides]).rollout.temperature

    assert temperature() == 0.0
    assert temperature("n=4") == 1.0
    assert temperature("n=4", "rollout.temperature=0.5") == 0.5
    with pytest.raises(ConfigError, match=r"n=4 samples at rollout\.temperature=0 are all the same"):
        temperature("n=4", "rollout.temperature=0")


def test_every_key_of_every_command_is_described() -> None:
    from agentgym.trainer.config import TrainConfig

    for model in (TrainConfig, EvalConfig):
        keys = all_keys(model)
        sections = {key.rpartition(".")[0] for key in keys}
        assert [key for key, field in keys.items() if not field.description and key not in sections] == []

"""`check_env` finds what is wrong, and only that."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import agentgym
from agentgym import plugins, registration
from agentgym.checks import CheckReport, check_env
from agentgym.env import Action, Env, Info, Observation
from agentgym.errors import ConfigError, SessionClosed, UnknownName
from agentgym.types import AssistantTurn, RolloutStatus, Task

StepReturn = tuple[Observation, float, bool, bool, Info]
CHECKS = ["gymnasium", "tasks", "task_id", "oracle", "any text", "seed", "instances", "async", "close"]


class Sums(Env):
    """A good environment: one turn, ten tasks a split."""

    def tasks(self, split: str) -> Sequence[Task]:
        start = 0 if split == "train" else 10
        return [Task(id=f"{split}-{i}", prompt=f"{i} + 1", data={"sum": i + 1}) for i in range(start, start + 10)]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        super().reset(seed=seed)
        options = options or {}
        tasks = self.tasks(options.get("split", "train"))
        chosen = options.get("task_id") or tasks[int(self.np_random.integers(len(tasks)))].id
        self.task = next(task for task in tasks if task.id == chosen)
        self.turns = 0
        return ({"role": "user", "content": str(self.task.prompt)},), {}

    def step(self, action: Action) -> StepReturn:
        assert self.task is not None
        self.turns += 1
        right = self.to_turn(action).content == str(self.task.data["sum"])
        return ({"role": "user", "content": "No."},) if not right else (), float(right), right, self.turns == 3, {}

    def oracle(self, task: Task) -> list[AssistantTurn]:
        return [AssistantTurn(content=str(task.data["sum"]))]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registries as they were, before and after."""
    monkeypatch.setattr(plugins, "_loaded", [])
    monkeypatch.setattr(registration._registry, "_entries", dict(registration._registry._entries))
    known = dict(gymnasium.registry)
    yield
    for id in set(gymnasium.registry) - set(known):
        del gymnasium.registry[id]


def check(cls: type[Env]) -> CheckReport:
    agentgym.register("subject", cls)
    return check_env("subject", tasks_per_split=4)


def errors(report: CheckReport) -> dict[str, str]:
    return {finding.check: finding.message for finding in report.findings if finding.level == "error"}


def test_a_good_environment_passes_every_check() -> None:
    report = check(Sums)
    assert [(finding.check, finding.level) for finding in report.findings] == [(name, "ok") for name in CHECKS]
    assert report.ok
    assert len(report.lines) == len(CHECKS) + 1
    assert report.lines[-1] == "agentgym/subject-v0: all checks passed"
    assert str(report) == "\n".join(report.lines)
    assert any("10 in train, 10 in validation" in line for line in report.lines)
    assert any("solves 8 of 8 tasks, mean reward 1" in line for line in report.lines)


def test_an_async_environment_passes_too() -> None:
    class Async(Env):
        def __init__(self) -> None:
            self.inner = Sums()

        async def areset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[Observation, Info]:
            await super().areset(seed=seed)
            result = self.inner.reset(seed=seed, options=options)
            self.task = self.inner.task
            return result

        async def astep(self, action: Action) -> StepReturn:
            await asyncio.sleep(0)
            return self.inner.step(action)

        def tasks(self, split: str) -> Sequence[Task]:
            return self.inner.tasks(split)

        def oracle(self, task: Task) -> list[AssistantTurn]:
            return self.inner.oracle(task)

    assert errors(check(Async)) == {}


def test_what_an_environment_does_not_have_is_skipped() -> None:
    class Bare(Env):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
            return (), {}

        def step(self, action: Action) -> StepReturn:
            return (), 0.0, True, False, {}

    report = check(Bare)
    assert report.ok
    assert [finding.check for finding in report.findings if finding.level == "skipped"] == [
        "tasks",
        "task_id",
        "oracle",
    ]
    alone = check_env(Bare())
    assert alone.ok
    assert [finding.check for finding in alone.findings if finding.level == "skipped"] == [
        "tasks",
        "task_id",
        "oracle",
        "instances",
        "async",
    ]
    assert alone.lines[-1].startswith("test_what_an")


def test_an_instance_made_by_name_stays_usable_and_another_is_closed() -> None:
    agentgym.register("subject", Sums)
    named, loose = agentgym.make("subject"), Sums()
    assert check_env(named).ok
    assert check_env(loose).ok
    named.reset()
    with pytest.raises(SessionClosed):
        loose.reset()


def test_what_cannot_be_checked() -> None:
    with pytest.raises(UnknownName):
        check_env("no-such-environment")
    with pytest.raises(ConfigError, match="cannot check a int"):
        check_env(3)  # type: ignore[arg-type]


# -- faults, each found by the check that is there for it --------------------------------------------------------------


class OverlappingSplits(Sums):
    def tasks(self, split: str) -> Sequence[Task]:
        start = 0 if split == "train" else 9
        return [Task(id=f"{split}-{i}", prompt=f"{i} + 1", data={"sum": i + 1}) for i in range(start, start + 10)]


class EqualIds(Sums):
    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(id="same", prompt=f"{split} {i}", data={"sum": i}) for i in range(3)]


class NoValidation(Sums):
    def tasks(self, split: str) -> Sequence[Task]:
        return super().tasks(split) if split == "train" else []


class IgnoresTaskId(Sums):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        return super().reset(seed=seed, options={"task_id": "train-3"})


class WrongOracle(Sums):
    def oracle(self, task: Task) -> list[AssistantTurn]:
        return [AssistantTurn(content="0")]


class LongOracle(Sums):
    def oracle(self, task: Task) -> list[AssistantTurn]:
        return [*super().oracle(task), AssistantTurn(content="and so on")]


class PaysForNothing(Sums):
    def truncate(self, status: RolloutStatus) -> float | None:
        return 1.0


class FallsOverGarbage(Sums):
    def step(self, action: Action) -> StepReturn:
        if "<think>" in str(action):
            raise KeyError("think")
        return super().step(action)


class NotJson(Sums):
    def step(self, action: Action) -> StepReturn:
        part = {"type": "image", "image": b"raw bytes"}
        return ({"role": "user", "content": [part]},), 0.0, False, False, {}

    oracle = Env.oracle


class Unseeded(Sums):
    counter = itertools.count()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        super().reset(seed=seed, options=options)
        return ({"role": "user", "content": str(next(self.counter))},), {}


class IdInInfo(Sums):
    def step(self, action: Action) -> StepReturn:
        *rest, info = super().step(action)
        return (*rest, {**info, "session": id(self)})  # type: ignore[return-value]


class LatencyInInfo(Sums):
    def step(self, action: Action) -> StepReturn:
        *rest, info = super().step(action)
        return (*rest, {**info, "seconds": time.perf_counter()})  # type: ignore[return-value]


class SidesDiffer(Sums):
    async def astep(self, action: Action) -> StepReturn:
        return (), 0.5, True, False, {}

    def step(self, action: Action) -> StepReturn:
        return super().step(action)


class CloseFails(Sums):
    def close(self) -> None:
        raise OSError("nothing to close")


class ReusedInfo(Sums):
    shared: Info = {}  # noqa: RUF012 - that it is shared is the fault

    def step(self, action: Action) -> StepReturn:
        *rest, _ = super().step(action)
        return (*rest, self.shared)  # type: ignore[return-value]


class OldReset(Sums):
    def reset(self, *, seed: int = 0, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:  # type: ignore[override]
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize(
    ("cls", "check_name", "message"),
    [
        (OverlappingSplits, "tasks", "validation task 'validation-9' is the train task 'train-9'"),
        (EqualIds, "tasks", "3 tasks share 1 ids"),
        (NoValidation, "tasks", "split 'validation' has no tasks"),
        (IgnoresTaskId, "task_id", "gave task 'train-3'"),
        (WrongOracle, "oracle", "did not terminate after the oracle's 1 turns"),
        (LongOracle, "oracle", "ended after 1 of the oracle's 2 turns"),
        (PaysForNothing, "oracle", "the oracle's reward is 1, that of an empty answer 1"),
        (FallsOverGarbage, "any text", "KeyError: 'think'"),
        (NotJson, "any text", "that JSON cannot hold"),
        (Unseeded, "seed", "the same seed, twice differ at reset in observation"),
        (IdInInfo, "instances", "two instances differ at step 1 in info"),
        (LatencyInInfo, "seed", "differ at step 1 in info"),
        (SidesDiffer, "async", "the sync and the async side differ at step 1 in observation"),
        (CloseFails, "close", "OSError: nothing to close"),
        (ReusedInfo, "gymnasium", "share an object"),
        (OldReset, "gymnasium", "The default seed argument in reset should be `None`"),
    ],
)
def test_faults_are_found(cls: type[Env], check_name: str, message: str) -> None:
    report = check(cls)
    assert not report.ok
    assert message in errors(report)[check_name]
    assert f"of {len(CHECKS)} checks failed" in report.lines[-1]


def test_an_error_shows_where_it_came_from() -> None:
    class Raises(Sums):
        def oracle(self, task: Task) -> list[AssistantTurn]:
            raise KeyError("nobody_knows")

    message = errors(check(Raises))["oracle"]
    assert "check 'oracle' raised KeyError: 'nobody_knows'" in message
    assert 'raise KeyError("nobody_knows")' in message


# -- what ships --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(registration.SHIPPED))
def test_shipped_environments_pass(name: str) -> None:
    report = check_env(name, tasks_per_split=5)
    assert errors(report) == {}
    assert all(finding.level == "ok" for finding in report.findings)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", list(registration.SHIPPED))
@pytest.mark.parametrize("prefix", ["agentgym/", "agentgym:agentgym/"])
def test_gymnasium_makes_and_checks_shipped_environments_without_a_warning(name: str, prefix: str) -> None:
    env: Any = gymnasium.make(f"{prefix}{name}-v0")
    env.reset(seed=0)
    env.step(env.action_space.sample())
    gymnasium.utils.env_checker.check_env(env.unwrapped)
    env.close()


def test_the_example_passes() -> None:
    example = Path(__file__).parents[2] / "examples" / "write_an_env.py"
    plugins.load([str(example)])
    report = check_env("my-env")
    assert errors(report) == {}
    assert agentgym.spec("my-env").max_turns == 4


def test_what_hangs_is_a_finding_and_ends_the_checks() -> None:
    freed = threading.Event()

    class Hangs(Sums):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
            if options is not None and "task_id" in options:
                freed.wait()
            return super().reset(seed=seed, options=options)

    agentgym.register("subject", Hangs)
    report = check_env("subject", time_limit=2.0)
    freed.set()
    assert [(finding.check, finding.level) for finding in report.findings] == [
        ("gymnasium", "ok"),
        ("tasks", "ok"),
        ("task_id", "error"),
    ]
    assert "did not end within 2 s" in report.findings[-1].message


@pytest.mark.parametrize(
    ("tasks", "part"),
    [(None, "a NoneType"), ({"a": 1}, "a dict"), (["one"], "a list with a str in it")],
)
def test_tasks_that_are_none_are_named(tasks: Any, part: str) -> None:
    class Odd(Sums):
        def tasks(self, split: str) -> Sequence[Task]:
            given: Sequence[Task] = tasks
            return given

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
            Env.reset(self, seed=seed)
            self.task, self.turns = Task(id="t", prompt="", data={"sum": 1}), 0
            return (), {}

    assert part in errors(check(Odd))["tasks"]


def test_a_traceback_is_shown_once() -> None:
    class Breaks(Sums):
        def step(self, action: Action) -> StepReturn:
            raise RuntimeError("my fault")

    messages = [text for text in errors(check(Breaks)).values() if "my fault" in text]
    assert sum("Traceback" in text for text in messages) == 1
    assert sum("the same error as in check" in text for text in messages) == len(messages) - 1 >= 1

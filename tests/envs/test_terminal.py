"""`terminal`: the jobs, and a check that only the right files pass."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check

from agentgym import make
from agentgym.checks import check_env
from agentgym.cli.smoke_command import children
from agentgym.envs.terminal import Terminal
from agentgym.envs.terminal.jobs import KINDS, Job
from agentgym.errors import ConfigError, InfraError
from agentgym.sandbox import sandbox_backends
from agentgym.session import Session, SessionManager
from agentgym.types import AssistantTurn, RolloutStatus, Task, ToolCall

PROCESS = {"sandbox": "process"}


# -- jobs --------------------------------------------------------------------------------------------------------------


def write(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def drawn(kind: str, count: int) -> list[Job]:
    return [KINDS[kind](random.Random(f"{kind}/{number}"), "here-123") for number in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracles_command_gives_exactly_the_right_files(kind: str, tmp_path: Path) -> None:
    for number, job in enumerate(drawn(kind, 8)):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder, job.before)
        done = subprocess.run(["bash", "-ec", job.command], cwd=folder, capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == ("", "")
        assert tree(folder) == job.after
        assert not set(job.gone) & set(job.after)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_done_at_the_start(kind: str) -> None:
    for job in drawn(kind, 30):
        right = all(job.before.get(path) == text for path, text in job.after.items())
        assert not right
        assert set(job.before) - set(job.after) == set(job.gone)
        assert job.text.count("here-123") >= 1


# -- tasks -------------------------------------------------------------------------------------------------------------


def test_no_prompt_of_one_split_occurs_in_the_other_for_any_two_seeds() -> None:
    prompts: dict[str, set[str]] = {"train": set(), "validation": set()}
    for seed in (0, 1, 7):
        for split, seen in prompts.items():
            tasks = Terminal(seed=seed).tasks(split)
            assert len({task.prompt for task in tasks}) == len({task.id for task in tasks}) == len(tasks)
            seen |= {str(task.prompt) for task in tasks}
    assert not prompts["train"] & prompts["validation"]
    assert Terminal(seed=1).tasks("train") == Terminal(seed=1).tasks("train") != Terminal(seed=2).tasks("train")


def test_levels_and_kinds() -> None:
    assert {len(task.data["jobs"]) for task in Terminal(level=2).tasks("train")[:50]} == {2}
    tasks = Terminal().tasks("train")
    levels = [task.data["level"] for task in tasks]
    assert [levels.count(level) / len(levels) for level in (1, 2, 3)] == pytest.approx([0.5, 0.3, 0.2], abs=0.05)
    kinds = Counter(job["kind"] for task in tasks for job in task.data["jobs"])
    assert set(kinds) == set(KINDS)
    for task in tasks:
        paths = [path for job in task.data["jobs"] for path in {*job["before"], *job["after"]}]
        assert len(paths) == len(set(paths)), task  # no job is in the way of another


@pytest.mark.parametrize("kwargs", [{"level": 4}, {"level": "hard"}, {"train_size": 0}, {"sandbox": "vm"}])
def test_wrong_settings_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(kwargs))):
        Terminal(**kwargs)


# -- the check ---------------------------------------------------------------------------------------------------------


def shell(command: str) -> AssistantTurn:
    return AssistantTurn(tool_calls=(ToolCall(name="bash", arguments={"command": command}),))


def task_of(kind: str) -> Task:
    return next(task for task in Terminal(level=1).tasks("train") if task.data["jobs"][0]["kind"] == kind)


def usable(backend: str) -> str:
    """The backend's name; skips the test where it does not work."""
    reason = sandbox_backends.get(backend)().unavailable()
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")
    return backend


async def play(
    task: Task, *turns: AssistantTurn | str, level: int = 1, sandbox: str = "process", **kwargs: Any
) -> Session:
    async with SessionManager() as manager:
        env_kwargs = {"level": level, "sandbox": sandbox}
        async with manager.open("terminal", task_id=task.id, env_kwargs=env_kwargs, **kwargs) as session:
            for turn in turns:
                await session.step(turn)
        assert manager.stats().live == 0
    return session


@pytest.mark.parametrize("backend", ["process", "namespace", pytest.param("docker", marks=pytest.mark.docker)])
async def test_the_oracle_solves_every_kind(backend: str) -> None:
    for kind in KINDS:
        task = task_of(kind)
        session = await play(task, *Terminal(level=1).oracle(task), sandbox=usable(backend))
        assert (session.outcome.reward, session.outcome.tool_errors) == (1.0, 0), kind


async def test_the_reward_is_the_share_of_the_jobs() -> None:
    task = Terminal(level=3).tasks("train")[0]
    turns = Terminal(level=3).oracle(task)
    assert (await play(task, *turns[:2], "done", level=3)).outcome.reward == pytest.approx(2 / 3)
    assert (await play(task, *turns, level=3)).outcome.reward == 1.0


async def test_without_a_call_there_is_no_sandbox_and_no_reward() -> None:
    session = await play(task_of("move"), "done")
    assert session.outcome.reward == 0.0
    assert not session.env.toolbox.context.sandbox.opened  # type: ignore[attr-defined]


async def test_a_limit_still_checks_the_files() -> None:
    task = task_of("sum")
    session = await play(task, Terminal(level=1).oracle(task)[0], max_turns=1)
    assert session.outcome.status is RolloutStatus.TRUNCATED_TURNS
    assert session.outcome.reward == 1.0


def target(kind: str) -> tuple[Task, str, str]:
    """A task, the path of the file it asks for, and its right text."""
    task = task_of(kind)
    job = task.data["jobs"][0]
    (path,) = set(job["after"]) - set(job["before"])
    return task, path, job["after"][path]


@pytest.mark.parametrize(
    ("forgery", "reward"),
    [
        ("printf '{text}' > {path}", 1.0),  # no newline at the end
        ("printf '{text}\\n\\n' > {path}", 0.0),
        ("echo '{text}' > {path}; echo '{text}' >> {path}", 0.0),
        ("seq 0 500 > {path}", 0.0),
        ("yes '{text}' | head -c 1000000 > {path}", 0.0),
        ("echo '{text}' > right.txt; ln -s $PWD/right.txt {path}", 0.0),
        ("echo '{text}' > right.txt; mkfifo {path}", 0.0),
        ("mkdir {path}", 0.0),
        ("ln -s /dev/zero {path}", 0.0),
        ("echo '{text}' > {path}; rm -f {folder}/table.csv", 0.0),  # the table belongs to the job
        ("echo '{text}' > {path}; echo x >> {folder}/table.csv", 0.0),
        ("echo '{text}' > {path}; chmod 000 {path}", None),
        ("echo reward=1.0; exit 0", 0.0),
        ("", 0.0),
    ],
)
async def test_only_the_right_file_counts(forgery: str, reward: float | None) -> None:
    task, path, text = target("sum")
    command = (
        forgery.replace("{text}", text.strip()).replace("{path}", path).replace("{folder}", path.partition("/")[0])
    )
    session = await play(task, shell(command), "done")
    assert session.outcome.status is RolloutStatus.COMPLETED
    assert session.outcome.reward in ((0.0, 1.0) if reward is None else (reward,))


async def test_a_sandbox_that_was_lost_is_a_failure_and_no_zero() -> None:
    task = task_of("sum")
    before = children()
    async with SessionManager() as manager:
        session = manager.open("terminal", task_id=task.id, env_kwargs={"level": 1, **PROCESS})
        async with session:
            await session.step(Terminal(level=1).oracle(task)[0])
            for pid in children() - before:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with pytest.raises(InfraError, match="cannot be checked"):
                await session.step("done")
    assert session.outcome.status is RolloutStatus.FAILED_INFRA
    assert session.outcome.reward is None


async def test_a_model_that_destroys_its_sandbox_is_told_and_begins_anew() -> None:
    task, path, _ = target("sum")
    right = Terminal(level=1).oracle(task)[0]
    session = await play(task, right, shell("kill -9 $PPID"), shell(f"ls {path.partition('/')[0]}"), "done")
    assert session.outcome.status is RolloutStatus.COMPLETED
    assert session.outcome.reward == 0.0
    said = [str(message["content"]) for message in session.conversation if message["role"] == "tool"]
    assert "lost" in said[1]
    assert said[2].split() == ["table.csv"]


async def test_copying_is_not_moving() -> None:
    task = task_of("move")
    command = task.data["jobs"][0]["command"].replace("mv ", "cp ")
    assert (await play(task, shell(command), "done")).outcome.reward == 0.0


async def test_files_and_folder_stay_from_call_to_call() -> None:
    task, path, text = target("sum")
    folder, _, name = path.partition("/")
    session = await play(task, shell(f"cd {folder}"), shell(f"echo {text.strip()} > {name}"), shell("ls"), "done")
    assert session.outcome.reward == 1.0
    assert str(session.conversation[-2]["content"]).split() == ["table.csv", "total.txt"]


async def test_the_same_calls_give_the_same_text() -> None:
    calls = [shell("ls -R"), shell("cat nope; echo $?"), shell("nope"), shell("cat *-*/* | sort | head -3"), shell("(")]
    texts = [[m["content"] for m in (await play(task_of("find"), *calls)).conversation] for _ in range(2)]
    assert texts[0] == texts[1]
    assert "/tmp" not in str(texts)


@pytest.mark.filterwarnings("error")
def test_passes_the_checks_of_gymnasium_and_agentgym() -> None:
    env = make("terminal", **PROCESS)
    gymnasium_check(env)
    report = check_env(env, tasks_per_split=3)
    env.close()
    assert [finding for finding in report.findings if finding.level != "ok"] == []

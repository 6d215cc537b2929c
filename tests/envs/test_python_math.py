"""`python-math`: the problems and their answers, the user who asks part after part, the state of the session."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check

from agentgym import make
from agentgym.checks import check_env
from agentgym.envs.python_math import PythonMath
from agentgym.envs.python_math.problems import CHANGES, QUESTIONS, SOURCES, split_of
from agentgym.errors import ConfigError
from agentgym.sandbox import sandbox_backends
from agentgym.session import Session, SessionManager
from agentgym.types import AssistantTurn, RolloutStatus, Task, ToolCall

PROCESS = {"sandbox": "process"}


# -- problems ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_oracles_code_prints_the_answers(split: str) -> None:
    for task in PythonMath(level=3).tasks(split)[:100]:
        namespace: dict[str, Any] = {}
        for part in task.data["parts"]:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(part["code"], namespace)
            assert printed.getvalue() == part["answer"] + "\n", task


def test_every_rule_names_its_operands_in_words_and_in_code() -> None:
    for rule in (*SOURCES, *CHANGES, *QUESTIONS):
        fields = set(re.findall(r"\{(\w+)\}", rule.text))
        assert fields == set(re.findall(r"\{(\w+)\}", rule.code)) == set(rule.operands), rule


def test_every_rule_is_drawn() -> None:
    text = "\n".join(part["text"] for task in PythonMath(level=3).tasks("train")[:400] for part in task.data["parts"])
    for rule in (*SOURCES, *CHANGES, *QUESTIONS):
        assert re.search(re.sub(r"\\{\w+\\}", "[0-9]+", re.escape(rule.text)), text), rule.text


def test_answers_cannot_be_guessed_from_the_problem() -> None:
    answers = [part["answer"] for task in PythonMath().tasks("train") for part in task.data["parts"]]
    most_frequent = max(answers.count(answer) for answer in set(answers[:500]))
    assert most_frequent < len(answers) / 50
    assert sum(abs(int(answer)) < 20 for answer in answers) < len(answers) / 100


def test_no_list_of_one_split_occurs_in_the_other_for_any_two_seeds() -> None:
    prompts: dict[str, set[str]] = {"train": set(), "validation": set()}
    for seed in (0, 1, 7):
        for split, seen in prompts.items():
            tasks = PythonMath(seed=seed, train_size=200, validation_size=200).tasks(split)
            assert len({task.prompt for task in tasks}) == 200
            seen |= {str(task.prompt).partition(".")[0] for task in tasks}
    assert not prompts["train"] & prompts["validation"]
    assert split_of({"s": 1, "p": 2}) == split_of({"p": 2, "s": 1})
    assert PythonMath(seed=1).tasks("train")[:50] == PythonMath(seed=1, train_size=50).tasks("train")
    assert PythonMath(seed=1).tasks("train")[0] != PythonMath(seed=2).tasks("train")[0]


def test_levels() -> None:
    assert {len(task.data["parts"]) for task in PythonMath(level=2).tasks("train")[:50]} == {2}
    levels = [task.data["level"] for task in PythonMath().tasks("train")[:1000]]
    assert [levels.count(level) / 1000 for level in (1, 2, 3)] == pytest.approx([0.4, 0.3, 0.3], abs=0.06)


@pytest.mark.parametrize(
    "kwargs", [{"level": 4}, {"level": "hard"}, {"train_size": 0}, {"sandbox": "docker-compose"}, {"sandbox": {"x": 1}}]
)
def test_wrong_settings_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(kwargs))):
        PythonMath(**kwargs)


# -- the conversation --------------------------------------------------------------------------------------------------


def code(text: str) -> AssistantTurn:
    return AssistantTurn(tool_calls=(ToolCall(name="python", arguments={"code": text}),))


def first_task() -> Task:
    return PythonMath(level=3).tasks("train")[0]


async def play(*turns: AssistantTurn | str, level: int = 3, **kwargs: Any) -> Session:
    async with SessionManager() as manager:
        async with manager.open(
            "python-math", task_id="train-000000", env_kwargs={"level": level, **PROCESS}, **kwargs
        ) as session:
            for turn in turns:
                await session.step(turn)
        assert manager.stats().live == 0
    return session


async def test_each_part_is_asked_when_the_one_before_is_answered_right_or_wrong() -> None:
    parts = first_task().data["parts"]
    answers = [f"#### {part['answer']}" for part in parts]
    session = await play(answers[0], "no idea", answers[2])
    users = [message["content"] for message in session.conversation if message["role"] == "user"]
    assert users == [*(part["text"] for part in parts), "Done."]
    assert session.outcome.reward == pytest.approx(2 / 3)
    assert list(session.outcome.turn_scores) == [1.0, 0.0, 1.0]
    assert session.outcome.status is RolloutStatus.COMPLETED


@pytest.mark.parametrize(
    "answer",
    [
        *("", "#### ", "{0}", "#### {0} or 7", "#### {0}\n#### 7", "#### {0}.5", "#### -{0}1", "#### 1e999"),
        *("#### ٣", "#### " + "9" * 100_000, "#### " + " ".join(map(str, range(5000))), "#### inf", "#### {0}/2"),
    ],
)
async def test_only_the_exact_number_is_right(answer: str) -> None:
    right = PythonMath(level=1).tasks("train")[0].data["parts"][0]["answer"]
    assert (await play(answer.format(right), level=1)).outcome.reward == 0.0
    assert (await play(f"#### {int(right):,}", level=1)).outcome.reward == 1.0


async def test_a_limit_scores_what_was_answered() -> None:
    answers = [f"#### {part['answer']}" for part in first_task().data["parts"]]
    session = await play(*answers[:2], max_turns=2)
    assert session.outcome.status is RolloutStatus.TRUNCATED_TURNS
    assert session.outcome.reward == pytest.approx(2 / 3)
    cut = AssistantTurn(content=answers[1], finish_reason="length")
    session = await play(answers[0], cut)
    assert session.outcome.reward == pytest.approx(2 / 3)


# -- the sandbox -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["process", "namespace", pytest.param("docker", marks=pytest.mark.docker)])
async def test_the_oracle_solves_every_level_with_state_between_its_calls(backend: str) -> None:
    reason = sandbox_backends.get(backend)().unavailable()
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")
    async with SessionManager() as manager:
        for level in (1, 2, 3):
            for task in PythonMath(level=level).tasks("train")[:3]:
                env_kwargs = {"level": level, "sandbox": backend}
                async with manager.open("python-math", task_id=task.id, env_kwargs=env_kwargs) as session:
                    for turn in session.env.oracle(task):
                        await session.step(turn)
                assert session.outcome.reward == 1.0
                assert session.outcome.tool_calls == level
                assert session.outcome.tool_errors == 0
    tools = [message["content"] for message in session.conversation if message["role"] == "tool"]
    assert [str(text).strip() for text in tools] == [part["answer"] for part in task.data["parts"]]


async def test_variables_stay_within_a_session_and_only_there() -> None:  # D8
    session = await play(code("x = 41"), code("print(x + 1)"))
    assert [m["content"] for m in session.conversation if m["role"] == "tool"][1].strip() == "42"
    session = await play(code("print(x)"))
    assert "NameError" in str(session.conversation[-1]["content"])


async def test_the_same_calls_give_the_same_text() -> None:
    calls = [code("1 / 0"), code("def f():\n    g()\nf()"), code("print('a', end='')"), code("x ="), code("")]
    texts = [[m["content"] for m in (await play(*calls)).conversation] for _ in range(2)]
    assert texts[0] == texts[1]
    assert "/tmp" not in str(texts)


@pytest.mark.filterwarnings("error")
def test_passes_the_checks_of_gymnasium_and_agentgym() -> None:
    env = make("python-math", **PROCESS)
    gymnasium_check(env)
    report = check_env(env, tasks_per_split=3)
    env.close()
    assert [finding for finding in report.findings if finding.level != "ok"] == []

"""`twenty-questions`: the table, the user who knows it, the oracle who wins."""

from __future__ import annotations

from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym import make
from agentgym.envs.twenty_questions import (
    QUESTIONS,
    THINGS,
    TwentyQuestions,
    properties_in,
    properties_of,
    read_guess,
)
from agentgym.errors import ConfigError
from agentgym.session import Session, SessionManager
from agentgym.types import RolloutStatus, Task

ALL_TASKS = [task for split in ("train", "validation") for task in TwentyQuestions().tasks(split)]


async def play(manager: SessionManager, turns: list[Any], **kwargs: Any) -> Session:
    async with manager.open("twenty-questions", max_user_turns=20, **kwargs) as session:
        for turn in turns:
            await session.step(turn)
    return session


def test_no_two_things_are_alike_and_every_property_tells_some_apart() -> None:
    assert len({properties_of(thing) for thing in THINGS}) == len(THINGS)
    for key in QUESTIONS:
        having = sum(key in properties_of(thing) for thing in THINGS)
        assert 0 < having < len(THINGS), key
    assert set().union(*map(properties_of, THINGS)) == set(QUESTIONS)


def test_the_user_understands_every_question_of_the_prompt() -> None:
    for key, (question, *phrases) in QUESTIONS.items():
        assert properties_in(question) == [key]
        for phrase in phrases:
            assert key in properties_in(f"Well, is that thing {phrase.upper()} perhaps?")


@pytest.mark.parametrize("task", ALL_TASKS, ids=lambda task: task.id)
async def test_the_oracle_wins(task: Task) -> None:
    turns = TwentyQuestions().oracle(task)
    assert len(turns) <= 20
    async with SessionManager() as manager:
        split = "train" if any(t.id == task.id for t in TwentyQuestions().tasks("train")) else "validation"
        session = await play(manager, list(turns), options={"split": split}, task_id=task.id)
    outcome = session.outcome
    assert outcome.status is RolloutStatus.COMPLETED
    assert outcome.reward == 1.0
    assert len(outcome.turn_scores) == len(turns) - 1
    assert min(outcome.turn_scores) > 0
    assert outcome.metrics["questions/answered"] == len(turns) - 1


def test_splits_are_disjoint_and_come_from_the_seed() -> None:
    assert len(ALL_TASKS) == len(THINGS) == len({task.id for task in ALL_TASKS})
    first, same, other = TwentyQuestions(seed=1), TwentyQuestions(seed=1), TwentyQuestions(seed=2)
    assert first.tasks("validation") == same.tasks("validation")
    assert first.tasks("validation") != other.tasks("validation")
    for env in (first, other):
        train, validation = ({task.id for task in env.tasks(split)} for split in ("train", "validation"))
        assert not train & validation
        assert len(train) == 57
        assert len(validation) == 19
    with pytest.raises(ConfigError, match="expected 'train' or 'validation'"):
        first.tasks("test")


async def test_each_answer_is_scored_by_what_it_rules_out() -> None:
    alive = sum("alive" in properties_of(thing) for thing in THINGS)
    async with (
        SessionManager() as manager,
        manager.open("twenty-questions", task_id="dog", options={"split": split_of("dog")}) as session,
    ):
        replies = []
        for question in (
            "Is it alive?",
            "is it ALIVE, yes or no",
            "Isn't it an animal?",
            "Is it sweet, or is it round?",
            "¿Qué es? 🎯",
            "",
            "Guess: a cat",
        ):
            result = await session.step(question)
            replies.append((result.observation[0]["content"], result.info.get("turn_score")))
    assert replies == [
        ("Yes.", 1 - alive / len(THINGS)),
        ("Yes.", 0.0),
        ("Please ask without 'not'.", 0.0),
        ("That is more than one question. Ask about one thing at a time.", 0.0),
        ("I do not understand. Ask one of the questions I listed, or write a line 'Guess: NAME'.", 0.0),
        ("I do not understand. Ask one of the questions I listed, or write a line 'Guess: NAME'.", 0.0),
        ("No, it was the dog.", None),
    ]
    assert session.outcome.reward == 0.0
    assert session.outcome.status is RolloutStatus.COMPLETED
    assert session.outcome.metrics == {"questions/answered": 2.0, "questions/not_understood": 4.0}


def split_of(thing: str) -> str:
    return "train" if any(task.id == thing for task in TwentyQuestions().tasks("train")) else "validation"


async def test_after_twenty_answers_the_episode_is_truncated() -> None:
    async with SessionManager() as manager:
        session = await play(manager, ["Is it alive?"] * 20, seed=1)
    assert session.outcome.status is RolloutStatus.TRUNCATED_TURNS
    assert session.outcome.num_user_turns == 20
    assert session.outcome.reward == 0.0


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("Guess: piano", "piano"),
        ("I know it!\n**Guess:** The Rolling Pin.", "rolling pin"),
        ("guess:a dog", "dog"),
        ("Guess: cat\nGuess: dog", "dog"),
        ("Guess:", ""),
        ("I guess it is a dog", None),
        ("my Guess: dog", None),
        ("", None),
    ],
)
def test_a_guess_is_a_line_of_its_own(text: str, guess: str | None) -> None:
    assert read_guess(text) == guess


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200) | st.sampled_from(["Guess: " + "." * 20000, "\n" * 20000, "guess" * 5000]))
def test_any_text_gets_a_normal_answer(text: str) -> None:
    env = TwentyQuestions()
    env.reset(seed=1)
    observation, reward, terminated, truncated, _ = env.step(text)
    env.close()
    assert not truncated
    assert reward in (0.0, 1.0)
    assert [message["role"] for message in observation] in (["user"], ["tool"])
    assert terminated == (read_guess(text) is not None)


@pytest.mark.filterwarnings("error")
def test_gymnasiums_checker_has_nothing_to_say() -> None:
    env = make("twenty-questions")
    check_env(env)
    env.close()

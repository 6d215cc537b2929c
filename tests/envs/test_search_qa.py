"""`search-qa`: the world, its questions, their answers, the search."""

from __future__ import annotations

from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym import make
from agentgym.checks import check_env
from agentgym.envs.search_qa import SearchQA
from agentgym.envs.search_qa.questions import FACTS, LINKS, is_right
from agentgym.envs.search_qa.world import COUNTS, make_world
from agentgym.errors import ConfigError
from agentgym.session import SessionManager
from agentgym.types import AssistantTurn, ToolCall

# -- the world ---------------------------------------------------------------------------------------------------------


def test_every_article_states_every_fact_and_every_link() -> None:
    for split in ("train", "validation"):
        world = make_world(0, split)
        assert len(world) == sum(COUNTS.values())
        for name, entity in world.items():
            assert entity.name == name
            for value in (name, *entity.facts.values(), *entity.links.values()):
                assert value in entity.article, entity
            assert set(entity.links.values()) <= set(world)


def test_everything_in_the_world_can_be_asked_for() -> None:
    for entity in make_world(0, "train").values():
        assert {(entity.kind, fact) for fact in entity.facts} <= set(FACTS)
        assert set(entity.links) <= set(LINKS)


def test_teachers_are_older_and_works_are_made_in_a_life() -> None:
    world = make_world(3, "train")
    for entity in world.values():
        if "teacher" in entity.links:
            assert 20 <= int(entity.facts["born"]) - int(world[entity.links["teacher"]].facts["born"]) <= 50
        for maker in ("architect", "founder", "author"):
            if maker in entity.links:
                assert 22 <= int(entity.facts["year"]) - int(world[entity.links[maker]].facts["born"]) <= 60


def test_no_name_of_one_split_occurs_in_the_other_for_any_two_seeds() -> None:
    names = {split: set().union(*(make_world(seed, split) for seed in range(3))) for split in ("train", "validation")}
    assert not names["train"] & names["validation"]
    assert set(make_world(0, "train")) != set(make_world(1, "train"))


# -- questions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_answer_is_in_the_articles_that_the_oracle_finds(split: str) -> None:
    env, world = SearchQA(), make_world(0, split)
    tasks = env.tasks(split)
    assert len({task.prompt for task in tasks}) == len(tasks) == env.sizes[split]
    for task in tasks:
        path, answer = task.data["path"], task.data["answer"]
        assert len(path) == task.data["level"]
        assert path[0] in task.prompt
        for name, following in zip(path, [*path[1:], answer], strict=True):
            assert following in (*world[name].facts.values(), *world[name].links.values())
        assert not any(name in task.prompt for name in (*path[1:], answer)), task


def test_search_finds_the_article_of_a_name_first() -> None:
    env = SearchQA(split="validation", topk=1)
    env.reset(seed=0)
    for name, entity in make_world(0, "validation").items():
        (message,), *_ = env.step(AssistantTurn(tool_calls=(ToolCall(name="search", arguments={"query": name}),)))
        assert message["content"] == entity.article
    env.close()


def test_the_search_knows_the_world_of_the_task() -> None:
    """A split that is chosen at the reset has its own encyclopedia."""
    env = SearchQA(split="train")
    env.reset(options={"split": "validation", "task_id": "validation-000000"})
    name = env.task.data["path"][0]
    (message,), *_ = env.step(AssistantTurn(tool_calls=(ToolCall(name="search", arguments={"query": name}),)))
    assert make_world(0, "validation")[name].article in message["content"]
    env.close()


@pytest.mark.parametrize("query", ["", "zzz", "?!", "the", "\x00" * 10, "٣ 東京", "x" * 1_000_000])
def test_a_query_without_a_match_is_answered(query: str) -> None:
    env = SearchQA()
    env.reset(seed=0)
    (message,), *_ = env.step(AssistantTurn(tool_calls=(ToolCall(name="search", arguments={"query": query}),)))
    assert message["content"] == "Nothing found."
    env.close()


def test_levels_and_sizes() -> None:
    assert {task.data["level"] for task in SearchQA(level=3).tasks("train")} == {3}
    levels = [task.data["level"] for task in SearchQA().tasks("train")]
    assert [levels.count(level) / len(levels) for level in (1, 2, 3)] == pytest.approx([0.3, 0.4, 0.3], abs=0.06)
    assert SearchQA(seed=5).tasks("train") == SearchQA(seed=5).tasks("train") != SearchQA(seed=6).tasks("train")
    with pytest.raises(ConfigError, match="train_size=5000: the world has about"):
        SearchQA(level=1, train_size=5000).tasks("train")
    with pytest.raises(ConfigError, match="expected 'train' or 'validation'"):
        SearchQA().tasks("test")


@pytest.mark.parametrize("kwargs", [{"level": 4}, {"level": "hard"}, {"topk": 0}, {"train_size": 0}])
def test_wrong_settings_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(kwargs))):
        SearchQA(**kwargs)


# -- scores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected", "right"),
    [
        ("#### Heron Bridge", "Heron Bridge", True),
        ("I found it.\n#### the heron  BRIDGE.", "Heron Bridge", True),
        ("#### **Heron Bridge**", "Heron Bridge", True),
        ("\\boxed{Heron Bridge}", "Heron Bridge", True),
        ("#### x\n#### Heron Bridge", "Heron Bridge", True),
        ("#### Heron Bridge\n#### x", "Heron Bridge", False),
        ("Heron Bridge", "Heron Bridge", False),
        ("#### Heron Bridge or Otter Mill", "Heron Bridge", False),
        ("#### Heron Bridge, Otter Mill", "Heron Bridge", False),
        ("#### Heron", "Heron Bridge", False),
        ("#### Неron Bridge", "Heron Bridge", False),  # Cyrillic
        ("####", "Heron Bridge", False),
        ("#### the", "Heron Bridge", False),
        ("", "Heron Bridge", False),
        ("#### " + "Heron Bridge " * 50_000, "Heron Bridge", False),
        ("#### 1377", "1377", True),
        ("#### 1,377 pages", "1377", True),
        ("#### 1376 or 1377", "1377", False),
        ("#### ١٣٧٧", "1377", False),
        ("#### 1e999", "1377", False),
        ("#### 1377.5", "1377", False),
    ],
)
def test_answers_are_compared_exactly(text: str, expected: str, right: bool) -> None:
    assert is_right(text, expected) is right


def test_no_answer_of_the_world_is_taken_for_another_one() -> None:
    world = make_world(0, "train")
    answers = {value for entity in world.values() for value in (entity.name, *entity.facts.values())}
    assert sum(is_right(f"#### {answer}", "Gild") for answer in answers) == 1


# -- the environment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2, 3])
async def test_the_oracle_solves_every_level(level: int) -> None:
    async with SessionManager() as manager:
        for task in SearchQA(level=level).tasks("train")[:5]:
            async with manager.open("search-qa", task_id=task.id, env_kwargs={"level": level}) as session:
                turns = session.env.oracle(task)
                assert len(turns) == level + 1
                for turn in turns:
                    await session.step(turn)
            assert session.outcome.reward == 1.0
            assert session.outcome.tool_calls == level


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=200))
def test_any_text_gets_a_normal_answer(text: str) -> None:
    env = SearchQA()
    env.reset(seed=1)
    assert env.step(text)[1] == 0.0
    env.close()


@pytest.mark.filterwarnings("error")
def test_passes_the_checks_of_gymnasium_and_agentgym() -> None:
    env = make("search-qa")
    gymnasium_check(env)
    env.close()
    assert [finding for finding in check_env("search-qa").findings if finding.level != "ok"] == []

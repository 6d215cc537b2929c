"""The questions: a chain of links from a named entity to another one, and what is asked about that."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agentgym.envs.calculator_math.answers import final_answer, read_number
from agentgym.envs.search_qa.world import Entity

LINKS = {
    "mayor": "the mayor of {}",
    "birthplace": "the birthplace of {}",
    "teacher": "the teacher of {}",
    "architect": "the architect of {}",
    "town": "the town where {} stands",
    "founder": "the founder of {}",
    "seat": "the seat of {}",
    "author": "the author of {}",
    "about": "the town that {} is about",
}
"""How an entity is described through another one."""

FACTS = {
    ("town", "founded"): "In which year was {} founded?",
    ("town", "river"): "On which river does {} lie?",
    ("town", "population"): "How many inhabitants does {} have?",
    ("person", "born"): "In which year was {} born?",
    ("person", "trade"): "What was the trade of {}?",
    ("person", "dish"): "Which dish did {} like best?",
    ("building", "year"): "In which year was {} finished?",
    ("building", "material"): "What is {} made of?",
    ("guild", "year"): "In which year was {} founded?",
    ("guild", "product"): "What does {} make?",
    ("book", "year"): "In which year did {} appear?",
    ("book", "pages"): "How many pages does {} have?",
}
"""How a fact is asked for."""

MAX_ANSWER = 100
"""Characters of an answer; a longer one is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question.

    Example:
        ``Question(text="In which year was the author of Heron Voyage born?", path=("Heron Voyage", "Kelana Marholt"),
        answer="1377")``
    """

    text: str
    path: tuple[str, ...]
    """The entities whose articles have to be found, in order."""
    answer: str


def draw(rng: random.Random, world: Mapping[str, Entity], level: int) -> Question:
    """A question whose answer takes ``level`` articles."""
    names = list(world)
    while True:
        entity = world[rng.choice(names)]
        path, text = [entity.name], entity.name
        while len(path) < level:
            steps = [(link, name) for link, name in entity.links.items() if name not in path]
            if not steps:
                break
            link, name = rng.choice(steps)
            text = LINKS[link].format(text)
            entity = world[name]
            path.append(name)
        asked = list(_asked(entity, text, path))
        if len(path) == level and asked:
            sentence, answer = rng.choice(asked)
            return Question(text=sentence, path=tuple(path), answer=answer)


def _asked(entity: Entity, text: str, path: list[str]) -> Iterator[tuple[str, str]]:
    """Questions about an entity that ``text`` describes, and their answers."""
    for fact, value in entity.facts.items():
        yield FACTS[entity.kind, fact].format(text), value
    for link, name in entity.links.items():
        if name not in path:
            yield f"What is the name of {LINKS[link].format(text)}?", name


def is_right(text: str, expected: str) -> bool:
    """Whether the last ``#### ANSWER`` in ``text`` is ``expected``, but for case, punctuation and a leading article."""
    answer = final_answer(text)
    if answer is None:
        return False
    if expected.isdecimal():
        return read_number(answer) == int(expected)
    return _plain(answer) == _plain(expected)


def _plain(answer: str) -> str:
    if len(answer) > MAX_ANSWER:
        return ""
    words = unicodedata.normalize("NFC", answer).casefold().strip(" \t\r.,;:!?*_`'\"()[]").split()
    return " ".join(words[1:] if words[:1] in (["the"], ["a"], ["an"]) else words)

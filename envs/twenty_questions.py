"""`twenty-questions`: find out which thing the user thinks of by asking yes-or-no questions.

The user is rule-based: it knows a table of things and their properties, and answers a question that names exactly one
property, like ``Can it fly?``. Each answer is scored by the part of the things still possible that it rules out. The
episode ends with the line ``Guess: NAME``: reward 1.0 if it is right, else 0.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from agentgym.errors import ConfigError
from agentgym.interaction import Interaction, Reply
from agentgym.messages import text_of
from agentgym.tool_env import ToolEnv
from agentgym.types import AssistantTurn, Message, Task

QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "alive": ("Is it alive?", "alive", "living", "a living thing"),
    "animal": ("Is it an animal?", "an animal"),
    "mammal": ("Is it a mammal?", "a mammal"),
    "flies": ("Can it fly?", "fly", "flies"),
    "swims": ("Does it live in water?", "in water", "in the water", "swim", "swims"),
    "pet": ("Is it kept by people?", "kept by people", "a pet", "a farm animal"),
    "big": ("Is it bigger than a person?", "bigger than a person", "larger than a person"),
    "small": ("Does it fit in a hand?", "fit in a hand", "fits in a hand", "fit in your hand"),
    "edible": ("Can you eat it?", "eat it", "edible", "food"),
    "sweet": ("Is it sweet?", "sweet"),
    "round": ("Is it round?", "round"),
    "green": ("Is it green?", "green"),
    "metal": ("Is it made of metal?", "metal"),
    "wood": ("Is it made of wood?", "wood", "wooden"),
    "moves": ("Does it move people?", "move people", "a vehicle"),
    "electric": ("Does it need electricity?", "electricity", "electric"),
    "music": ("Does it make music?", "music", "a musical instrument"),
    "kitchen": ("Is it found in a kitchen?", "kitchen"),
    "worn": ("Do you wear it?", "wear it", "worn"),
    "sharp": ("Is it sharp?", "sharp"),
}
"""Properties: the question as the oracle asks it, and the phrases by which the user recognises it."""

THINGS: Mapping[str, str] = {
    "dog": "alive animal mammal pet",
    "cat": "alive animal mammal pet sharp",
    "horse": "alive animal mammal pet big moves",
    "cow": "alive animal mammal pet big edible",
    "pig": "alive animal mammal pet edible",
    "sheep": "alive animal mammal pet edible worn",
    "hamster": "alive animal mammal pet small",
    "elephant": "alive animal mammal big",
    "tiger": "alive animal mammal big sharp",
    "fox": "alive animal mammal",
    "mouse": "alive animal mammal small",
    "hedgehog": "alive animal mammal small round sharp",
    "bat": "alive animal mammal flies small",
    "whale": "alive animal mammal swims big",
    "seal": "alive animal mammal swims",
    "eagle": "alive animal flies sharp",
    "parrot": "alive animal flies pet green",
    "sparrow": "alive animal flies small",
    "duck": "alive animal flies swims pet edible",
    "chicken": "alive animal pet edible",
    "canary": "alive animal flies pet small music",
    "bee": "alive animal flies pet small sharp",
    "shark": "alive animal swims big sharp",
    "salmon": "alive animal swims edible",
    "goldfish": "alive animal swims pet small",
    "crocodile": "alive animal swims big green sharp",
    "frog": "alive animal swims small green",
    "crab": "alive animal swims small edible sharp",
    "lizard": "alive animal small green",
    "snail": "alive animal small round",
    "oak": "alive big wood",
    "pine": "alive big wood green sharp",
    "grass": "alive small green",
    "cactus": "alive green sharp",
    "rose": "alive small sharp",
    "lettuce": "small edible green kitchen",
    "apple": "small edible sweet round",
    "banana": "small edible sweet",
    "pea": "small edible sweet round green",
    "tomato": "small edible round kitchen",
    "cucumber": "edible green kitchen",
    "pumpkin": "edible round",
    "bread": "edible kitchen",
    "chocolate": "small edible sweet kitchen",
    "cake": "edible sweet round kitchen",
    "car": "big metal moves",
    "train": "big metal moves electric",
    "aeroplane": "flies big metal moves",
    "bicycle": "metal moves",
    "scooter": "metal moves electric",
    "rowing boat": "swims big wood moves",
    "submarine": "swims big metal moves",
    "piano": "big wood music",
    "violin": "wood music",
    "flute": "small metal music",
    "trumpet": "metal music",
    "radio": "electric music",
    "refrigerator": "big metal electric kitchen",
    "toaster": "metal electric kitchen",
    "blender": "metal electric kitchen sharp",
    "knife": "small metal kitchen sharp",
    "spoon": "small metal kitchen",
    "plate": "round kitchen",
    "table": "big wood kitchen",
    "rolling pin": "wood round kitchen",
    "pencil": "small wood sharp",
    "needle": "small metal sharp",
    "coin": "small metal round",
    "ring": "small metal round worn",
    "watch": "small metal round electric worn",
    "hat": "round worn",
    "shoe": "worn",
    "clogs": "wood worn",
    "lamp": "electric",
    "telephone": "small electric",
    "ball": "round",
}
"""Things and their properties; no two things have the same ones."""

_NEGATION = re.compile(r"\b(?:not|never|without|\w+n['’]t)\b")
_GUESS = re.compile(r"^[^\w\n]*guess[^\w\n:]*:(?P<name>[^\n]*)", re.IGNORECASE | re.MULTILINE)
_ARTICLE = re.compile(r"^(?:a|an|the)\s+")
_PHRASES = {
    key: re.compile(r"\b(?:" + "|".join(map(re.escape, phrases)) + r")\b", re.IGNORECASE)
    for key, (_, *phrases) in QUESTIONS.items()
}

_RULES = (
    "I am thinking of one of these things: {things}.\n"
    "Find out which one it is: ask me one yes-or-no question at a time. I understand these: {questions}\n"
    "As soon as you know, write a line 'Guess: NAME'. You have one guess."
)


class Guesser(Interaction):
    """The user who thinks of a thing."""

    async def start(self, task: Task, **kwargs: Any) -> None:
        self.secret = str(task.data["thing"])
        self.possible = set(THINGS)

    async def respond(self, messages: Sequence[Message]) -> Reply:
        text = text_of(messages[-1])
        guess = read_guess(text)
        if guess is not None:
            right = guess == self.secret
            return Reply(True, f"Yes, it is the {self.secret}!" if right else f"No, it was the {self.secret}.")
        asked = properties_in(text)
        if len(asked) != 1 or _NEGATION.search(text.lower()):
            return Reply(False, _explain(asked), 0.0, {"questions/not_understood": 1.0})
        answer = asked[0] in properties_of(self.secret)
        left = {thing for thing in self.possible if (asked[0] in properties_of(thing)) == answer}
        score = 1.0 - len(left) / len(self.possible)
        self.possible = left
        return Reply(False, "Yes." if answer else "No.", score, {"questions/answered": 1.0})


class TwentyQuestions(ToolEnv):
    """Twenty questions against a rule-based user.

    Three quarters of the things are training tasks, the others validation; ``seed`` decides which.
    """

    interaction = Guesser
    max_user_turns = 20

    def tasks(self, split: str) -> list[Task]:
        if split not in ("train", "validation"):
            raise ConfigError(f"split {split!r}: expected 'train' or 'validation'")
        things = [list(THINGS)[i] for i in np.random.default_rng(self.seed).permutation(len(THINGS))]
        edge = len(things) * 3 // 4
        prompt = _RULES.format(
            things=", ".join(sorted(THINGS)), questions=" ".join(question for question, *_ in QUESTIONS.values())
        )
        chosen = things[:edge] if split == "train" else things[edge:]
        return [Task(id=thing.replace(" ", "-"), prompt=prompt, data={"thing": thing}) for thing in chosen]

    def score(self, task: Task, answer: str) -> float:
        return float(read_guess(answer) == task.data["thing"])

    def oracle(self, task: Task) -> list[AssistantTurn]:
        """Always ask what splits the things that are left most evenly."""
        secret = task.data["thing"]
        possible = list(THINGS)
        turns = []
        while len(possible) > 1:
            asked = min(QUESTIONS, key=lambda key: abs(2 * _count(key, possible) - len(possible)))
            answer = asked in properties_of(secret)
            possible = [thing for thing in possible if (asked in properties_of(thing)) == answer]
            turns.append(AssistantTurn(content=QUESTIONS[asked][0]))
        return [*turns, AssistantTurn(content=f"Guess: {possible[0]}")]


def properties_of(thing: str) -> frozenset[str]:
    """Names of the properties that a thing has."""
    return frozenset(THINGS[thing].split())


def properties_in(text: str) -> list[str]:
    """The properties that a question names."""
    return [key for key, phrases in _PHRASES.items() if phrases.search(text)]


def read_guess(text: str) -> str | None:
    """The name in the last ``Guess: NAME`` line, in lower case; None without such a line."""
    guesses = [match["name"] for match in _GUESS.finditer(text)]
    return _ARTICLE.sub("", guesses[-1].strip(" \t.!?*_`'\"").lower()) if guesses else None


def _count(key: str, things: Iterable[str]) -> int:
    return sum(key in properties_of(thing) for thing in things)


def _explain(asked: Sequence[str]) -> str:
    if len(asked) > 1:
        return "That is more than one question. Ask about one thing at a time."
    if asked:
        return "Please ask without 'not'."
    return "I do not understand. Ask one of the questions I listed, or write a line 'Guess: NAME'."

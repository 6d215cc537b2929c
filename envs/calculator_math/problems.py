"""The problems: plans (what has to be computed) and their wordings, drawn from a seed.

A plan's steps are calculator calls in order; step ``r1`` may use operands of the text and results of earlier steps.
A problem belongs to one split only, whatever the seed: the operands alone decide it (see `split_of`).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add, floordiv, mul, sub

Step = tuple[str, ...]
"""``("*", "a", "b")``: an operator and the names of its operands; ``r1``, ``r2`` are the results of earlier steps."""

OPERATIONS = {"+": add, "-": sub, "*": mul, "/": floordiv}
LEVEL_WEIGHTS = {1: 0.8, 2: 0.15, 3: 0.05}
"""Shares of the levels in the default mix."""
STORY_SHARES = {1: 0.9, 2: 0.25, 3: 0.0}
"""Shares of word problems in the default mix, by level; the others name the operations."""

NAMES = ("Ana", "Ben", "Chloe", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jack", "Kofi", "Lena")
THINGS = ("apples", "books", "bricks", "cards", "coins", "cups", "eggs", "lamps", "nails", "pens", "seeds", "tiles")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One shape of computation and the ways to ask for it.

    Example:
        ``Plan(name="product", steps=(("*", "a", "b"),), digits={"a": (2, 2), "b": (3, 3)},
    """

    name: str
    steps: tuple[Step, ...]
    digits: Mapping[str, tuple[int, int]]
    """Fewest and most digits of each operand."""
    expressions: tuple[str, ...]
    """Wordings that name the operations. Fields: the operands."""
    stories: tuple[str, ...]
    """Wordings as word problems. Fields: the operands, ``{who}``, ``{other}`` (two names) and ``{things}``."""
    multiples: Mapping[str, str] = field(default_factory=dict)
    """``{"a": "b"}``: the drawn ``a`` is multiplied by ``b``, so that a division has no remainder."""

    @property
    def level(self) -> int:
        """The number of calculator calls."""
        return len(self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A drawn problem.

    Example:
        ``Problem(text="Multiply 24 by 31.", expressions=("24*31",), answer=744, plan="product", operands=(24, 31))``
    """

    text: str
    expressions: tuple[str, ...]
    """The calculator calls that solve it, in order; the last one gives the answer."""
    answer: int
    plan: str
    operands: tuple[int, ...]


PLANS: tuple[Plan, ...] = (
    Plan(
        name="product",
        steps=(("*", "a", "b"),),
        digits={"a": (2, 3), "b": (2, 3)},
        expressions=(
            "What is {a} times {b}?",
            "Multiply {a} by {b}.",
            "Calculate {a} * {b}.",
            "Find the product of {a} and {b}.",
        ),
        stories=(
            "A hall has {a} rows of {b} seats. How many seats is that?",
            "{who} packs {a} boxes with {b} {things} in each. How many {things} is that?",
            "One crate holds {a} {things}. How many {things} are in {b} crates?",
            "{who} saves {a} coins every week for {b} weeks. How many coins is that?",
            "A machine makes {a} {things} an hour. How many {things} does it make in {b} hours?",
            "A field is {a} meters long and {b} meters wide. What is its area?",
            "{who} reads {a} pages a day. How many pages is that in {b} days?",
        ),
    ),
    Plan(
        name="sum",
        steps=(("+", "a", "b"),),
        digits={"a": (3, 3), "b": (3, 3)},
        expressions=(
            "What is {a} plus {b}?",
            "Add {a} and {b}.",
            "Calculate {a} + {b}.",
            "Find the sum of {a} and {b}.",
        ),
        stories=(
            "{who} has {a} {things} and {other} has {b}. How many {things} do they have together?",
            "A shop sold {a} {things} in May and {b} in June. How many {things} did it sell in all?",
        ),
    ),
    Plan(
        name="difference",
        steps=(("-", "a", "b"),),
        digits={"a": (3, 4), "b": (2, 3)},
        expressions=(
            "What is {a} minus {b}?",
            "Calculate {a} - {b}.",
            "How much more is {a} than {b}?",
        ),
        stories=("{who} had {a} {things} and gave away {b}. How many {things} are left?",),
    ),
    Plan(
        name="quotient",
        steps=(("/", "a", "b"),),
        digits={"a": (2, 2), "b": (2, 2)},
        multiples={"a": "b"},
        expressions=(
            "What is {a} divided by {b}?",
            "Divide {a} by {b}.",
            "Calculate {a} / {b}.",
        ),
        stories=(
            "{who} shares {a} {things} equally among {b} people. How many {things} does each get?",
            "{who} puts {a} {things} in boxes of {b}. How many boxes are needed?",
        ),
    ),
    Plan(
        name="product_plus",
        steps=(("*", "a", "b"), ("+", "r1", "c")),
        digits={"a": (2, 2), "b": (2, 3), "c": (2, 3)},
        expressions=(
            "What is {a} * {b} + {c}?",
            "Multiply {a} by {b}, then add {c}.",
            "Add the product of {a} and {b} to {c}.",
        ),
        stories=(
            "{who} has {a} boxes of {b} {things} and {c} more {things}. How many {things} is that?",
            "A theater has {a} rows of {b} seats and {c} extra seats. How many seats does it have?",
            "{who} earns {a} coins a day for {b} days and gets a bonus of {c}. How many coins is that?",
        ),
    ),
    Plan(
        name="product_minus",
        steps=(("*", "a", "b"), ("-", "r1", "c")),
        digits={"a": (2, 2), "b": (2, 3), "c": (3, 3)},
        expressions=(
            "What is {a} * {b} - {c}?",
            "Multiply {a} by {b}, then subtract {c}.",
            "From the product of {a} and {b} take away {c}.",
        ),
        stories=("{who} sells {a} {things} at {b} coins each and pays {c} coins for the stand. What is the balance?",),
    ),
    Plan(
        name="sum_times",
        steps=(("+", "a", "b"), ("*", "r1", "c")),
        digits={"a": (2, 3), "b": (2, 3), "c": (2, 2)},
        expressions=(
            "What is ({a} + {b}) * {c}?",
            "Add {a} and {b}, then multiply by {c}.",
        ),
        stories=(
            "Each day {who} makes {a} {things} and {other} makes {b}. How many {things} do they make in {c} days?",
            "A set has {a} red and {b} blue {things}. How many {things} are in {c} sets?",
        ),
    ),
    Plan(
        name="quotient_times",
        steps=(("/", "a", "b"), ("*", "r1", "c")),
        digits={"a": (2, 2), "b": (2, 2), "c": (2, 3)},
        multiples={"a": "b"},
        expressions=(
            "What is {a} / {b} * {c}?",
            "Divide {a} by {b}, then multiply by {c}.",
        ),
        stories=("{who} pays {a} coins for {b} {things}. How many coins do {c} {things} cost?",),
    ),
    Plan(
        name="product_plus_times",
        steps=(("*", "a", "b"), ("+", "r1", "c"), ("*", "r2", "d")),
        digits={"a": (2, 2), "b": (2, 2), "c": (2, 3), "d": (2, 2)},
        expressions=(
            "What is ({a} * {b} + {c}) * {d}?",
            "Multiply {a} by {b}, add {c}, then multiply by {d}.",
        ),
        stories=(
            "Each day {who} packs {a} boxes of {b} {things} and {c} single {things}. "
            "How many {things} is that in {d} days?",
        ),
    ),
    Plan(
        name="product_minus_times",
        steps=(("*", "a", "b"), ("-", "r1", "c"), ("*", "r2", "d")),
        digits={"a": (2, 2), "b": (3, 3), "c": (2, 3), "d": (2, 2)},
        expressions=(
            "What is ({a} * {b} - {c}) * {d}?",
            "Multiply {a} by {b}, subtract {c}, then multiply by {d}.",
        ),
        stories=(
            "Each day {who} packs {a} boxes of {b} {things} and sells {c}. How many {things} are left after {d} days?",
        ),
    ),
    Plan(
        name="sum_times_minus",
        steps=(("+", "a", "b"), ("*", "r1", "c"), ("-", "r2", "d")),
        digits={"a": (2, 3), "b": (2, 3), "c": (2, 2), "d": (3, 3)},
        expressions=(
            "What is ({a} + {b}) * {c} - {d}?",
            "Add {a} and {b}, multiply by {c}, then subtract {d}.",
        ),
        stories=(
            "A set has {a} red and {b} blue {things}. {who} buys {c} sets and loses {d}. How many {things} are left?",
        ),
    ),
)


def draw(rng: random.Random, split: str, levels: Mapping[int, float], story_shares: Mapping[int, float]) -> Problem:
    """Draw a problem of a split.

    Level by weight, then a plan (those with more wordings more often), word problem or not, a wording, and operands
    until they fit the split.
    """
    (level,) = rng.choices(list(levels), weights=list(levels.values()))
    plans = [plan for plan in PLANS if plan.level == level]
    (plan,) = rng.choices(plans, weights=[len(plan.expressions) + len(plan.stories) for plan in plans])
    wording = rng.choice(plan.stories if rng.random() < story_shares[level] else plan.expressions)
    operands = _draw_operands(rng, plan)
    while split_of(list(operands.values())) != split:
        operands = _draw_operands(rng, plan)
    who, other = rng.sample(NAMES, 2)
    text = wording.format(**operands, who=who, other=other, things=rng.choice(THINGS))
    expressions, answer = solve(plan, operands)
    return Problem(text=text, expressions=expressions, answer=answer, plan=plan.name, operands=tuple(operands.values()))


def split_of(operands: Sequence[int]) -> str:
    """The split that a problem with these operands belongs to: one set of operands in eight is for validation.

    It depends on the operands alone, neither on their order, on the wording nor on a seed. So no problem of one
    split has the text (or even the numbers) of a problem of the other.
    """
    key = ",".join(str(operand) for operand in sorted(operands))
    return "validation" if zlib.crc32(key.encode()) % 8 == 0 else "train"


def solve(plan: Plan, operands: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """The calculator expressions of a plan with operands filled in, and the result of the last one."""
    values = dict(operands)
    expressions = []
    for number, (operator, *names) in enumerate(plan.steps, start=1):
        inputs = [values[name] for name in names]
        expressions.append(operator.join(str(value) for value in inputs))
        values[f"r{number}"] = reduce(OPERATIONS[operator], inputs)
    return tuple(expressions), values[f"r{len(plan.steps)}"]


def _draw_operands(rng: random.Random, plan: Plan) -> dict[str, int]:
    operands = {name: _number(rng, *digits) for name, digits in plan.digits.items()}
    for name, factor in plan.multiples.items():
        operands[name] *= operands[factor]
    return operands


def _number(rng: random.Random, fewest: int, most: int) -> int:
    """A number of the given digits that is not round: no factor of ten, and at least 12."""
    digits = rng.randint(fewest, most)
    while True:
        number = rng.randrange(max(12, 10 ** (digits - 1)), 10**digits)
        if number % 10:
            return number

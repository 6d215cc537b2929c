"""The problems: where a list of numbers comes from, how it changes from part to part, what is asked about it."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt
from typing import Any

Numbers = list[int]

MAX_LENGTH = 400
"""Terms of the first list."""
MIN_LENGTH = 8
"""A change may not leave fewer terms."""
HARD_TO_GUESS = 20
"""Answers are at least so large, where the list has such an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A source, a change or a question, in words, as a function, and as the Python that a perfect player runs.

    Example:
        ``Rule(text="Replace every term x by x * x % {m}.", code="a = [x * x % {m} for x in a]",
        compute=lambda a, m: [x * x % m for x in a], operands={"m": (101, 997)})``
    """

    text: str
    code: str
    compute: Callable[..., Any]
    """Of the list (a source has none) and the operands by name."""
    operands: Mapping[str, tuple[int, int]]
    """Smallest and largest value of each operand."""

    def draw(self, rng: random.Random) -> dict[str, int]:
        """Values for the operands."""
        return {name: rng.randint(*limits) for name, limits in self.operands.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One question.

    Example:
        ``Part(text="Let a be ... What is the sum of all terms?", code="a = [...]\\nprint(sum(a))", answer=4711)``
    """

    text: str
    code: str
    answer: int


def _recurrence(s: int, p: int, q: int, m: int, n: int) -> Numbers:
    a = [s]
    while len(a) < n:
        a.append((a[-1] * p + q) % m)
    return a


def _primes(lo: int, n: int) -> Numbers:
    marked = {multiple for d in range(2, isqrt(lo + n) + 1) for multiple in range(-(-lo // d) * d, lo + n, d)}
    return [x for x in range(lo, lo + n) if x not in marked]  # lo is above the square root of lo + n


def _partial_sums(a: Numbers, m: int) -> Numbers:
    total, sums = 0, []
    for x in a:
        total = (total + x) % m
        sums.append(total)
    return sums


SOURCES = (
    Rule(
        text="Let a[0] = {s} and a[i+1] = (a[i] * {p} + {q}) % {m}. The list a has {n} terms.",
        code="a = [{s}]\nwhile len(a) < {n}:\n    a.append((a[-1] * {p} + {q}) % {m})",
        compute=_recurrence,
        operands={"s": (2, 99), "p": (11, 99), "q": (11, 999), "m": (1001, 9999), "n": (40, MAX_LENGTH)},
    ),
    Rule(
        text="Let a[i] = (i * i * {p} + i * {q}) % {m} for i from 1 to {n}.",
        code="a = [(i * i * {p} + i * {q}) % {m} for i in range(1, {n} + 1)]",
        compute=lambda p, q, m, n: [(i * i * p + i * q) % m for i in range(1, n + 1)],
        operands={"p": (11, 99), "q": (11, 999), "m": (1001, 9999), "n": (40, MAX_LENGTH)},
    ),
    Rule(
        text="Let a be the list of the decimal digits of {p} ** {q}, first digit first.",
        code="a = [int(x) for x in str({p} ** {q})]",
        compute=lambda p, q: [int(x) for x in str(p**q)],
        operands={"p": (103, 997), "q": (21, 99)},
    ),
    Rule(
        text="Let a be the list of the primes p with {lo} <= p < {lo} + {n}, in increasing order.",
        code="a = [p for p in range({lo}, {lo} + {n}) if all(p % d for d in range(2, int(p ** 0.5) + 1))]",
        compute=_primes,
        operands={"lo": (103, 99_999), "n": (301, 999)},
    ),
)

CHANGES = (
    Rule(
        text="Keep only the terms that leave the remainder {r} when divided by {k}.",
        code="a = [x for x in a if x % {k} == {r}]",
        compute=lambda a, k, r: [x for x in a if x % k == r],
        operands={"k": (2, 5), "r": (0, 4)},
    ),
    Rule(
        text="Replace every term x by x * x % {m}.",
        code="a = [x * x % {m} for x in a]",
        compute=lambda a, m: [x * x % m for x in a],
        operands={"m": (101, 997)},
    ),
    Rule(
        text="Replace every term by the sum of all terms up to and including it, modulo {m}.",
        code="t = 0\nfor i in range(len(a)):\n    t = (t + a[i]) % {m}\n    a[i] = t",
        compute=_partial_sums,
        operands={"m": (101, 997)},
    ),
    Rule(
        text="Replace a by the list of the differences a[i+1] - a[i].",
        code="a = [y - x for x, y in zip(a, a[1:])]",
        compute=lambda a: [y - x for x, y in pairwise(a)],
        operands={},
    ),
    Rule(
        text="Sort a in increasing order, then keep a[0], a[{k}], a[2 * {k}] and so on.",
        code="a = sorted(a)[::{k}]",
        compute=lambda a, k: sorted(a)[::k],
        operands={"k": (2, 4)},
    ),
    Rule(
        text="Drop the first {k} terms and reverse the rest.",
        code="a = a[{k}:][::-1]",
        compute=lambda a, k: a[k:][::-1],
        operands={"k": (3, 15)},
    ),
)

QUESTIONS = (
    Rule(text="What is the sum of all terms?", code="print(sum(a))", compute=sum, operands={}),
    Rule(
        text="How many different values are in a?",
        code="print(len(set(a)))",
        compute=lambda a: len(set(a)),
        operands={},
    ),
    Rule(
        text="What is the largest term minus the smallest?",
        code="print(max(a) - min(a))",
        compute=lambda a: max(a) - min(a),
        operands={},
    ),
    Rule(
        text="How many terms are greater than the term before?",
        code="print(sum(y > x for x, y in zip(a, a[1:])))",
        compute=lambda a: sum(y > x for x, y in pairwise(a)),
        operands={},
    ),
    Rule(
        text="What is the sum of all products a[i] * a[i+1]?",
        code="print(sum(x * y for x, y in zip(a, a[1:])))",
        compute=lambda a: sum(x * y for x, y in pairwise(a)),
        operands={},
    ),
    Rule(
        text="What is the sum of the {k} largest terms?",
        code="print(sum(sorted(a)[-{k}:]))",
        compute=lambda a, k: sum(sorted(a)[-k:]),
        operands={"k": (3, 7)},
    ),
)


def draw(rng: random.Random, split: str, num_parts: int) -> tuple[Part, ...]:
    """Draw a problem of a split: parts, each of which goes on from the list that the one before left."""
    source = rng.choice(SOURCES)
    operands = source.draw(rng)
    while split_of(operands) != split:
        operands = source.draw(rng)
    a = source.compute(**operands)
    parts = [_ask(rng, a, source, operands)]
    while len(parts) < num_parts:
        change = rng.choice(CHANGES)
        operands = change.draw(rng)
        changed = change.compute(a, **operands)
        if len(changed) >= MIN_LENGTH and changed != a:
            a = changed
            parts.append(_ask(rng, a, change, operands))
    return tuple(parts)


def split_of(operands: Mapping[str, int]) -> str:
    """The split of a problem whose list comes from these operands: one set of operands in eight is for validation.

    It depends on them alone, neither on the rest of the problem nor on a seed.
    """
    key = ",".join(f"{name}={value}" for name, value in sorted(operands.items()))
    return "validation" if zlib.crc32(key.encode()) % 8 == 0 else "train"


def _ask(rng: random.Random, a: Numbers, rule: Rule, operands: Mapping[str, int]) -> Part:
    """A question about ``a``, which ``rule`` made; the sum, if there is none whose answer is hard to guess."""
    for question in (*rng.sample(QUESTIONS, len(QUESTIONS)), QUESTIONS[0]):
        more = question.draw(rng)
        answer = question.compute(a, **more)
        if abs(answer) >= HARD_TO_GUESS and answer not in (len(a), len(a) - 1, more.get("k", 1) * max(a)):
            break
    return Part(
        text=f"{rule.text.format(**operands)} {question.text.format(**more)}",
        code=f"{rule.code.format(**operands)}\n{question.code.format(**more)}",
        answer=answer,
    )

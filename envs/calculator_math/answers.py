"""Final answers: where a text gives one, and which number it is. Exact: nothing here is a float."""

from __future__ import annotations

import math
import re
from fractions import Fraction

MAX_LENGTH = 200
"""Characters of an answer; a longer one is no number."""

_MARKER = re.compile(r"####+|\\boxed\s*\{")
_FRACTION = re.compile(r"\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}")
_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\{([^{}]*)\}")
_SPACING = re.compile(r"\\(?:left|right|displaystyle)|\\[,;:! ]|\\[()\[\]]|[~`]")
_CURRENCY = r"(?:[$€£¥₹]|(?:USD|EUR|GBP|JPY|CHF)\s)"
_NUMBER = re.compile(
    rf"(?P<before>[+-]?)\s*{_CURRENCY}?\s*(?P<sign>[+-]?)\s*"
    r"(?P<whole>[0-9]{1,3}(?:(?P<group>[, '_])[0-9]{3})(?:(?P=group)[0-9]{3})*(?![0-9])|[0-9]+|(?=\.[0-9]))"
    r"(?P<decimals>\.[0-9]*)?(?P<exponent>[eE][+-]?[0-9]{1,3}(?![0-9]))?"
    r"(?:\s*/\s*(?P<below>[0-9]+))?"
    r"(?P<unit>.*)",
    re.DOTALL,
)
_POWER = re.compile(r"\^\{?[23]\}?|[²³]")
_NO_UNIT = re.compile(r"[0-9+*/^=<>]|\b(?:hundred|thousand|million|billion|trillion|or|and|to)s?\b", re.IGNORECASE)


def final_answer(text: str) -> str | None:
    """What stands after the last ``####`` up to the end of the line, or in the last ``\\boxed{}``; None without one."""
    for marker in reversed(list(_MARKER.finditer(text))):
        rest = text[marker.end() :]
        answer = _braced(rest) if marker[0].endswith("{") else rest.lstrip().partition("\n")[0]
        if answer is not None:
            return answer.strip()
    return None


def read_number(text: str) -> Fraction | None:
    """The number that a final answer gives, None if it gives none.

    Read are signs, decimals, exponents, fractions in lowest terms, thousands separators (groups of three after a comma,
    a space, an apostrophe or an underscore), LaTeX and Markdown around the number. Currency and percent signs and units
    after the number are left out: ``25 %`` is 25. After ``12 * 3 = 36`` the part behind the last ``=`` counts. Anything
    that leaves the value open (``3 or 4``, ``1.2.3``, ``1,23``, ``12 * 3``, ``2 million``) gives no number.

    Example:
        >>> read_number("-$1,234.50")
        Fraction(-2469, 2)
    """
    if len(text) > MAX_LENGTH:
        return None
    match = _NUMBER.fullmatch(_plain(text))
    if match is None or (match["before"] and match["sign"]) or _NO_UNIT.search(_POWER.sub("", match["unit"])):
        return None
    digits = re.sub(r"[, '_]", "", match["whole"]) or "0"
    value = Fraction(f"{digits}{match['decimals'] or ''}{match['exponent'] or ''}")
    if match["below"] is not None:
        below = int(match["below"])
        if match["decimals"] or match["exponent"] or below < 2 or math.gcd(int(digits), below) != 1:
            return None
        value /= below
    return -value if "-" in (match["before"], match["sign"]) else value


def is_right(text: str, expected: str) -> bool:
    """Whether the final answer in ``text`` is exactly the number ``expected``."""
    answer = final_answer(text)
    return answer is not None and read_number(answer) == Fraction(expected)


def _braced(text: str) -> str | None:
    """The text up to the brace that closes one before it; None if none does."""
    depth = 1
    for position, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:position]
    return None


def _plain(text: str) -> str:
    """The answer without LaTeX, Markdown and what stands before the last equals sign."""
    text = text.translate({0x2212: "-", 0x2013: "-", 0xA0: " ", 0x202F: " ", 0x2009: " ", 0x2019: "'"})
    text = _FRACTION.sub(r"\1/\2", text)
    text = _SPACING.sub("", _WRAPPED.sub(r"\1", text))
    text = text.replace("{,}", ",").replace("\\$", "$").replace("\\%", "%")
    text = text.rpartition("=")[2].strip().strip("*_").strip()
    if text.startswith("$") and text.endswith("$") and len(text) > 1:
        text = text[1:-1]  # math mode, not a currency
    return text.removesuffix(".").strip()

"""``calculator``: exact arithmetic on a restricted expression, bounded in time and in the size of results.

Values are integers, fractions and floats. Everything is exact as long as it can be; a root or power that is not
rational, and a fraction whose parts get longer than 2,000 bits, continue as a float.

The result is written

* as an integer, without an exponent or a decimal point, if it is one (``10/4*2`` is ``5``),
* else exactly, if that takes at most 40 characters (``1/8`` is ``0.125``),
* else as Python writes the nearest float, about 16 significant digits (``2/3`` is ``0.6666666666666666``).

Commas group thousands (``1,234 + 1``) outside of calls and separate arguments inside of them; ``max(1,234)``, which
could mean either, is refused. ``×``, ``÷`` and ``−`` are read as ``*``, ``/`` and ``-``.
"""

from __future__ import annotations

import ast
import decimal
import math
import operator
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, cast

from agentgym.errors import ToolError
from agentgym.tool import function_tool

MAX_LENGTH = 2_000
"""Characters of an expression."""
MAX_DEPTH = 50
"""Levels of parentheses, calls, signs and powers; a long sum counts as one."""
MAX_BITS = 10_000
"""Size of integers, about 3,000 digits."""
MAX_FRACTION_BITS = 2_000
"""Size of numerator and denominator of a fraction; beyond it the value becomes a float."""
MAX_FACTORIAL = 1_000
MAX_DECIMAL = 40
"""Characters of a decimal that is written exactly."""
MAX_EXPONENT = 300
"""Of a number in exponent notation, such as ``1e300``."""

Number = int | Fraction | float

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)(?![\w.])"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<op>\*\*|//|[-+*/%(),]))",
    re.ASCII,
)
_THOUSANDS = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]*)?", re.ASCII)
_EITHER = re.compile(r"(?<![0-9.])[1-9][0-9]{0,2},[0-9]{3}(?![0-9])", re.ASCII)
_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "·": "*"})
_EXACT = decimal.Context(prec=MAX_DECIMAL, traps=[decimal.Inexact, decimal.Overflow])


@function_tool(inline=True)
def calculator(expression: str) -> str:
    """Evaluates arithmetic exactly.

    Args:
        expression: e.g. (17+4)*3, 2**10, round(7/3, 2)
    """
    return format_number(evaluate(expression))


def evaluate(expression: str) -> Number:
    """Value of the expression; integral values are ints.

    Raises:
        ToolError: the expression cannot be read, has no value, or is too large; the text says why.
    """
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression has {len(expression)} characters, at most {MAX_LENGTH} are allowed")
    source = _normalise(expression.translate(_SIGNS))
    if not source:
        raise ToolError("the expression is empty")
    try:
        tree = ast.parse(source, mode="eval")
    except SyntaxError as error:
        raise ToolError(f"cannot read {_short(expression)!r}: {error.msg}") from error
    except (RecursionError, MemoryError) as error:
        raise ToolError("the expression is nested too deeply") from error
    try:
        return _value(tree.body, source, 0)
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except OverflowError as error:
        raise ToolError("the result is too large for a decimal number") from error


def format_number(value: Number) -> str:
    """The text of a result; see the module's text. Raises `ToolError` for a fraction beyond the range of floats."""
    if not isinstance(value, Fraction):
        return str(value)
    try:
        text = format(_EXACT.divide(decimal.Decimal(value.numerator), decimal.Decimal(value.denominator)), "f")
        return text if len(text) <= MAX_DECIMAL else str(float(value))
    except decimal.Inexact:
        pass
    try:
        return str(float(value))
    except OverflowError as error:
        raise ToolError("the result is too large for a decimal number") from error


def _normalise(expression: str) -> str:
    """The expression token by token, with grouped thousands joined; refuses every other character."""
    words: list[str] = []
    calls: list[bool] = []  # per open parenthesis: does it open a call?
    tokens = list(_tokens(expression))
    position = 0
    while position < len(tokens):
        kind, text, _ = tokens[position]
        if kind == "number":
            end = _run_of_numbers(tokens, position)
            run = "".join(token[1] for token in tokens[position:end])
            words.append(_read_run(run, in_call=bool(calls) and calls[-1]))
            position = end
            continue
        if text == "(":
            calls.append(position > 0 and tokens[position - 1][0] == "name")
        elif text == ")" and calls:
            calls.pop()
        elif text == "," and not (calls and calls[-1]):
            raise ToolError("a comma separates arguments of a function or groups thousands, as in 1,234")
        words.append(text)
        position += 1
    return " ".join(words)


def _tokens(expression: str) -> Iterator[tuple[str, str, int]]:
    """Kind, text and start of every token."""
    expression = expression.rstrip()
    position = 0
    while position < len(expression):
        match = _TOKEN.match(expression, position)
        if match is None:
            rest = expression[position:].lstrip()
            hint = " Write ** for powers." if rest[0] == "^" else ""
            raise ToolError(f"unexpected {rest[:20]!r}; expected {_ALLOWED}.{hint}")
        kind = str(match.lastgroup)
        yield kind, match[kind], match.start(kind)
        position = match.end()


def _run_of_numbers(tokens: list[tuple[str, str, int]], start: int) -> int:
    """End of the tokens ``1,234,567`` that follow each other without a space."""
    end = start + 1
    while (
        end + 1 < len(tokens)
        and tokens[end][1] == ","
        and tokens[end + 1][0] == "number"
        and tokens[end][2] == tokens[end - 1][2] + len(tokens[end - 1][1])
        and tokens[end + 1][2] == tokens[end][2] + 1
    ):
        end += 2
    return end


def _read_run(run: str, *, in_call: bool) -> str:
    """One number, or arguments of a call. Raises `ToolError` where it could be both or is neither."""
    if "," not in run:
        return run.lstrip("0") or "0" if run.isdigit() else run
    if in_call:
        if _EITHER.search(run):
            spaced = run.replace(",", ", ")
            raise ToolError(
                f"{_short(run)!r} inside of a function may be one number or several; "
                f"for several write {_short(spaced)!r}"
            )
        return run
    if not _THOUSANDS.fullmatch(run):
        raise ToolError(
            f"{_short(run)!r} is not a number; decimals have a point (1.5), thousands groups of three (1,234)"
        )
    return run.replace(",", "")


def _value(node: ast.expr, source: str, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise ToolError(f"the expression is nested too deeply, at most {MAX_DEPTH} levels are allowed")
    match node:
        case ast.BinOp():
            return _chain(node, source, depth)
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, source, depth + 1)
        case ast.UnaryOp(op=ast.UAdd()):
            return _value(node.operand, source, depth + 1)
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return _constant(source[node.col_offset : node.end_col_offset])
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            return _call(name, [_value(argument, source, depth + 1) for argument in node.args])
        case ast.Name(id=name):
            raise ToolError(f"unknown name {_short(name)!r}; expected {_ALLOWED}")
    raise ToolError(f"{_short(source[node.col_offset : node.end_col_offset])!r} is not allowed; expected {_ALLOWED}")


def _chain(node: ast.BinOp, source: str, depth: int) -> Number:
    """A binary operation; operations on its left side are taken in a loop, so that long sums are not deep."""
    chain = [node]
    while isinstance(chain[-1].left, ast.BinOp):
        chain.append(chain[-1].left)
    value = _value(chain[-1].left, source, depth + 1)
    for step in reversed(chain):
        operation = _OPERATORS.get(type(step.op))
        if operation is None:
            raise ToolError(f"this operator is not allowed; expected {_ALLOWED}")
        value = _checked(operation(value, _value(step.right, source, depth + 1)))
    return value


def _constant(text: str) -> Number:
    mantissa, _, exponent = text.lower().partition("e")
    if exponent and abs(int(exponent)) > MAX_EXPONENT:
        raise ToolError(f"the exponent of {_short(text)!r} is too large, at most {MAX_EXPONENT} is allowed")
    return _checked(Fraction(text) if exponent or "." in mantissa else int(text))


def _call(name: str, arguments: list[Number]) -> Number:
    if name not in _FUNCTIONS:
        raise ToolError(f"unknown function {_short(name)!r}; expected one of {', '.join(_FUNCTIONS)}")
    function, least, most = _FUNCTIONS[name]
    if not least <= len(arguments) <= most:
        expected = str(least) if most == least else f"{least} or more" if most > 2 else f"{least} or {most}"
        raise ToolError(f"{name} takes {expected} argument(s), got {len(arguments)}")
    return _checked(function(*arguments))


def _checked(value: Any) -> Number:
    """The value in its simplest type. Raises `ToolError` if it is not a real number or too large."""
    if isinstance(value, complex):
        raise ToolError("a power of a negative number with a fractional exponent is not a real number")
    if isinstance(value, Fraction):
        value = _checked_fraction(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("the result is too large for a decimal number")
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolError("the result is too large: more than 3,000 digits")
    number: Number = value
    return number


def _checked_fraction(value: Fraction) -> Number:
    numerator, denominator = value.as_integer_ratio()
    if denominator == 1:
        return numerator
    if max(numerator.bit_length(), denominator.bit_length()) > MAX_FRACTION_BITS:
        return numerator / denominator
    return value


def _power(base: Number, exponent: Number) -> Number:
    if not isinstance(exponent, int):
        root = _root(base) if exponent == Fraction(1, 2) and base >= 0 else None
        return float(base) ** float(exponent) if root is None else root
    if isinstance(base, float):
        return base**exponent
    size = max(part.bit_length() for part in base.as_integer_ratio())
    if size > 1 and (size - 1) * abs(exponent) > MAX_BITS:
        if isinstance(base, int) and exponent > 0:
            raise ToolError("the result is too large: more than 3,000 digits")
        return float(base) ** exponent
    return Fraction(base) ** exponent


def _root(value: Number) -> Number | None:
    """The square root if it is rational."""
    if isinstance(value, float):
        return None
    numerator, denominator = value.as_integer_ratio()
    roots = math.isqrt(numerator), math.isqrt(denominator)
    return Fraction(*roots) if (roots[0] ** 2, roots[1] ** 2) == (numerator, denominator) else None


def _sqrt(value: Number) -> Number:
    if value < 0:
        raise ToolError("the square root of a negative number is not a real number")
    root = _root(value)
    return root if root is not None else math.sqrt(value)


def _round(value: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > MAX_EXPONENT:
        raise ToolError(f"round takes a whole number of digits up to {MAX_EXPONENT}, got {_short(str(digits))}")
    return cast("Number", round(value, digits))


def _factorial(value: Number) -> int:
    if not isinstance(value, int) or not 0 <= value <= MAX_FACTORIAL:
        raise ToolError(f"factorial takes a whole number from 0 to {MAX_FACTORIAL}, got {_short(str(value))}")
    return math.factorial(value)


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


def _on_integers(function: Callable[..., int]) -> Callable[..., int]:
    def checked(*values: Number) -> int:
        if not all(isinstance(value, int) for value in values):
            raise ToolError(f"{function.__name__} takes whole numbers")
        return function(*values)

    return checked


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a / b if isinstance(a, float) or isinstance(b, float) else Fraction(a) / Fraction(b),
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "abs": (abs, 1, 1),
    "round": (_round, 1, 2),
    "floor": (math.floor, 1, 1),
    "ceil": (math.ceil, 1, 1),
    "min": (min, 1, MAX_LENGTH),
    "max": (max, 1, MAX_LENGTH),
    "sqrt": (_sqrt, 1, 1),
    "gcd": (_on_integers(math.gcd), 1, MAX_LENGTH),
    "lcm": (_on_integers(math.lcm), 1, MAX_LENGTH),
    "factorial": (_factorial, 1, 1),
}
_ALLOWED = f"numbers, + - * / // % ** ( ) and the functions {', '.join(_FUNCTIONS)}"

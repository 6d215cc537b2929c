from __future__ import annotations

import json
import math
import time
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from agentgym.errors import ToolError
from agentgym.tools import Toolbox
from agentgym.tools.calculator import MAX_BITS, MAX_LENGTH, calculator, evaluate
from agentgym.types import ToolCall


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("6*7", "42"),
        ("123456789*987654321", "121932631112635269"),
        ("2 + 3 * 4", "14"),
        ("(2+3)*4", "20"),
        ("-7//2", "-4"),
        ("-7%3", "2"),
        ("7.5//2", "3"),
        ("2**10", "1024"),
        ("-2**2", "-4"),
        ("2**3**2", "512"),
        ("--5", "5"),
        ("1-(-2)", "3"),
        ("10/4*2", "5"),
        ("84/2", "42"),
        ("7/2", "3.5"),
        ("1/8", "0.125"),
        ("0.1+0.2", "0.3"),
        ("1e-7", "0.0000001"),
        ("1e5", "100000"),
        ("1e16+1", "10000000000000001"),
        ("2/3", "0.6666666666666666"),
        ("123456789012345678/4", "30864197253086419.5"),
        ("(10**20+1)/3", "3.333333333333333e+19"),
        ("2**-2", "0.25"),
        ("4**0.5", "2"),
        ("2**0.5", "1.4142135623730951"),
        ("sqrt(16/9)", "1.3333333333333333"),
        ("sqrt(10**40)", "100000000000000000000"),
        ("round(7/3, 2)", "2.33"),
        ("round(2.5)", "2"),
        ("round(12345, -2)", "12300"),
        ("floor(-2.5)+ceil(2.1)", "0"),
        ("max(1, 2.5)-min(3, 2)", "0.5"),
        ("abs(-3)+gcd(12, 18)+lcm(4, 6)", "21"),
        ("factorial(20)", "2432902008176640000"),
        ("0**0", "1"),
        ("007+08", "15"),
        ("1_000+5.", "1005"),
        ("2×3÷4−1", "0.5"),
        ("\n1 +\n2\t", "3"),
        ("1/10**400", "0.0"),
        ("1.5**1000", "1.2338405969061735e+176"),
        ("+".join(["1"] * 1000), "1000"),
    ],
)
def test_values(expression: str, text: str) -> None:
    assert calculator(expression) == text


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("1,234 + 1", "1235"),
        ("12,345,678.5*2", "24691357"),
        ("(1,234)", "1234"),
        ("abs((1,234))", "1234"),
        ("max(1, 234)", "234"),
        ("max(1000,200)", "1000"),
        ("max(0.5,100)", "100"),
        ("round(3.14159,2)", "3.14"),
        ("max(1,2,3)", "3"),
    ],
)
def test_commas_that_have_one_meaning(expression: str, text: str) -> None:
    assert calculator(expression) == text


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("max(1,234)", "may be one number or several; for several write '1, 234'"),
        ("round(1,234)", "may be one number or several"),
        ("max(5,1,234,567)", "may be one number or several"),
        ("12,34", "is not a number"),
        ("1,234,5", "is not a number"),
        ("0,123", "is not a number"),
        ("1,000e3", "is not a number"),
        ("1, 234", "a comma separates arguments"),
        ("3,", "a comma separates arguments"),
        ("(1, 2)", "a comma separates arguments"),
    ],
)
def test_commas_that_could_mean_two_things_are_refused(expression: str, words: str) -> None:
    with pytest.raises(ToolError, match=words):
        calculator(expression)


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("1/0", "division by zero"),
        ("7 % 0", "division by zero"),
        ("0.0//0", "division by zero"),
        ("0**-1", "division by zero"),
        ("1 +", "cannot read '1 \\+': invalid syntax"),
        ("((1)", "never closed"),
        ("1 2", "cannot read"),
        ("2^3", r"unexpected '\^3'.*Write \*\* for powers"),
        ("x + 1", "unknown name 'x'"),
        ("True", "'True' is not allowed"),
        ("None", "'None' is not allowed"),
        ("sin(1)", "unknown function 'sin'; expected one of abs, round"),
        ("abs", "unknown name 'abs'"),
        ("abs(1)(2)", "not allowed"),
        ("abs.__class__", "unexpected"),
        ("().__class__", "unexpected"),
        ("__import__('os')", "unexpected"),
        ("'a'*9", "unexpected"),
        ("[1]", "unexpected"),
        ("lambda: 1", "unexpected"),
        ("1 if 1 else 2", "is not allowed"),
        ("1 or 2", "is not allowed"),
        ("not 1", "is not allowed"),
        ("1 < 2", "unexpected"),
        ("1 << 3", "unexpected"),
        ("1 | 3", "unexpected"),
        ("~1", "unexpected"),
        ("1j", "unexpected"),
        ("0x10", "unexpected"),
        ("1.2.3", "unexpected"),
        ("1or 2", "unexpected"),
        ("max(*1)", "not allowed"),
        ("max(a=1)", "unexpected"),
        ("a := 1", "unexpected"),
        ("f'{1}'", "unexpected"),
        ("1\x002", "unexpected"),
        ("２+３", "unexpected"),
        ("min()", "min takes 1 or more"),
        ("abs(1, 2)", r"abs takes 1 argument\(s\), got 2"),
        ("round(1, 2, 3)", "round takes 1 or 2"),
        ("round(1, 0.5)", "round takes a whole number of digits"),
        ("gcd(1.5)", "gcd takes whole numbers"),
        ("factorial(0.5)", "factorial takes a whole number"),
        ("factorial(-1)", "factorial takes a whole number"),
        ("sqrt(-1)", "not a real number"),
        ("(-8)**(1/3)", "not a real number"),
    ],
)
def test_what_has_no_value_is_refused_with_the_reason(expression: str, words: str) -> None:
    with pytest.raises(ToolError, match=words):
        calculator(expression)


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("9**9**9", "too large"),
        ("10**10**10", "too large"),
        ("2**(10**9)", "too large"),
        ("(10**3000)**1000", "too large"),
        ("factorial(999)*factorial(999)", "too large"),
        ("factorial(10**9)", "from 0 to 1000"),
        ("factorial(10**2000)", "from 0 to 1000, got 1000"),
        ("factorial(factorial(100))", "from 0 to 1000"),
        ("1e400", "exponent of '1e400' is too large"),
        ("1e999999999", "too large"),
        ("1.5**(10**9)", "too large for a decimal number"),
        ("sqrt(2)**9999", "too large for a decimal number"),
        ("10**400/3", "too large for a decimal number"),
        ("10**2000*sqrt(2)", "too large for a decimal number"),
        ("round(1.5, 10**9)", "round takes a whole number of digits up to 300"),
        ("9" * (MAX_LENGTH + 1), "characters"),
        ("1+" * 5_000_000 + "1", "characters"),
        ("(" * 900 + "1" + ")" * 900, "cannot read"),
        ("(" * 900, "cannot read"),
        ("-" * 1000 + "1", "nested too deeply"),
        ("2**" * 600 + "1", "nested too deeply"),
        ("abs(" * 60 + "1" + ")" * 60, "nested too deeply"),
        ("*".join(["factorial(999)"] * 100), "too large"),
    ],
)
def test_what_would_take_too_long_is_refused_at_once(expression: str, words: str) -> None:
    start = time.perf_counter()
    with pytest.raises(ToolError, match=words) as caught:
        calculator(expression)
    assert time.perf_counter() - start < 1.0
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "expression",
    [
        "+".join(f"1/{n}" for n in range(101, 400)),
        "*".join(["(1/997)"] * 220),
        "*".join(f"{n}/{n + 1}" for n in range(7, 200)),
        "gcd(" + ", ".join(["factorial(1000)"] * 110) + ")",
        "+".join(["factorial(1000)"] * 120),
        "(1+1e-9)**(10**9)",
        "-".join(["10**3000"] * 200),
        "+".join(["sqrt(10**3000)"] * 130),
    ],
)
def test_the_most_expensive_expressions_end_in_time(expression: str) -> None:
    assert len(expression) <= MAX_LENGTH
    start = time.perf_counter()
    calculator(expression)
    assert time.perf_counter() - start < 1.0


def test_schema_is_short() -> None:
    schema = calculator.tool_schema
    assert schema["function"]["name"] == "calculator"
    assert schema["function"]["parameters"]["required"] == ["expression"]
    assert len(json.dumps(schema).split()) < 60
    assert len(json.dumps(schema)) < 300


async def test_in_a_toolbox() -> None:
    toolbox = Toolbox([calculator])
    calls = [
        ToolCall(name="calculator", arguments={"expression": "17*23"}),
        ToolCall(name="calculator", arguments={"expression": "1/0"}),
        ToolCall(name="calculator", arguments={"expr": "1"}),  # A14
        ToolCall(name="calculator", arguments={"expression": 3}),
    ]
    results = await toolbox.execute(calls)
    assert [(result.response.text, result.error) for result in results[:2]] == [
        ("391", False),
        ("division by zero", True),
    ]
    assert "missing required parameter 'expression' (string); unknown parameter 'expr'" in (
        results[2].response.text or ""
    )
    assert "parameter 'expression' must be string, got number 3" in (results[3].response.text or "")


# -- fuzz -------------------------------------------------------------------------------------------------------------

Pair = tuple[str, str]
"""An expression for the calculator, and the same for Python with every number an exact fraction."""


def each(template: str, *pairs: Pair) -> Pair:
    """The template filled in with the calculator's and with Python's spelling; ``F`` is for Python alone."""
    ours = template.replace("F(", "(").format(*(pair[0] for pair in pairs))
    return ours, template.format(*(pair[1] for pair in pairs))


numbers = (st.integers(0, 10**6).map(str) | st.decimals(0, 1000, places=2).map(str)).map(lambda n: (n, f"F('{n}')"))
templates = [
    "{} + {}",
    "{} - {}",
    "{} * {}",
    "{} / {}",
    "{} // {}",
    "{} % {}",
    "({}) - ({})",
    "max({}, {})",
    "min({}, {})",
]
expressions: st.SearchStrategy[Pair] = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.builds(each, st.sampled_from(templates), inner, inner),
        st.builds(
            each, st.sampled_from(["({})", "-{}", "abs({})", "F({})**2", "F({})**3", "F({})**-2", "F({})**0"]), inner
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(expressions)
def test_agrees_with_python_on_exact_fractions(pair: Pair) -> None:
    expression, python = pair
    try:
        names = {"__builtins__": {}, "abs": abs, "max": max, "min": min, "F": Fraction}
        expected = Fraction(eval(python, names))
    except ZeroDivisionError:
        with pytest.raises(ToolError, match="division by zero"):
            evaluate(expression)
        return
    assume(max(expected.numerator.bit_length(), expected.denominator.bit_length()) < 2_000)
    value = evaluate(expression)
    if isinstance(value, float):  # an intermediate fraction was too long to stay exact
        assert math.isclose(value, expected, rel_tol=1e-6)
    else:
        assert value == expected


@settings(max_examples=300, deadline=None)
@given(st.recursive(st.integers(0, 10**9).map(str), lambda inner: st.one_of(
    st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(lambda parts: "(" + "".join(parts) + ")"),
    inner.map(lambda text: f"-{text}"),
), max_leaves=12))  # fmt: skip
def test_agrees_with_eval_on_integers(expression: str) -> None:
    try:
        expected = eval(expression, {"__builtins__": {}})
    except ZeroDivisionError:
        with pytest.raises(ToolError, match="division by zero"):
            evaluate(expression)
        return
    assert calculator(expression) == str(expected)


ALPHABET = "0123456789.,_eE+-*/%()^ \n×÷−=<>[]{}'\"\\:#abcfgimnoqrstuxyz\x00٣½é"
PIECES = [
    "**", "//", "(", ")", ",", "1e", "1e308", "9" * 50, "factorial(", "sqrt(", "round(", "max(", "lambda:", "if", "or",
    "10**", "0.", "1_0", "__class__", "in", "not ", "1,234", "gcd(", "\u202e", "\ud800",
]  # fmt: skip


@settings(max_examples=600, deadline=2000)
@given(
    st.one_of(
        st.text(alphabet=ALPHABET, max_size=80),
        st.text(max_size=60),
        st.lists(st.sampled_from(PIECES) | st.text(alphabet="0123456789+-*/%(),. ", max_size=4), max_size=25).map(
            "".join
        ),
    )
)
def test_any_text_has_a_value_or_a_tool_error(expression: str) -> None:
    try:
        text = calculator(expression)
    except ToolError as error:
        text = str(error)
        if not 0 < len(text) < 400:
            raise
        return
    assert len(text) <= MAX_BITS // 3
    assert math.isfinite(float(text)) or len(text) > 300

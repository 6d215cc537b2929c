from __future__ import annotations

import re
from fractions import Fraction

import pytest

import agentgym
from agentgym.checks import check_env
from agentgym.envs.calculator_math import CalculatorMath
from agentgym.envs.calculator_math.answers import final_answer, is_right, read_number
from agentgym.envs.calculator_math.problems import PLANS, solve, split_of
from agentgym.errors import ConfigError
from agentgym.tools.calculator import evaluate
from agentgym.types import AssistantTurn, Task, ToolCall

# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        ("-42", "-42"),
        ("+42", "42"),
        ("- 42", "-42"),
        ("−42", "-42"),
        ("1,234,567", "1234567"),
        ("1 234 567", "1234567"),
        ("1_234", "1234"),
        ("1{,}234", "1234"),
        ("12345", "12345"),
        ("3.50", "7/2"),
        (".5", "1/2"),
        ("42.", "42"),
        ("42.000", "42"),
        ("007", "7"),
        ("-0", "0"),
        ("$1,234.50", "2469/2"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("\\$5", "5"),
        ("5 €", "5"),
        ("USD 5", "5"),
        ("25%", "25"),
        ("25 \\%", "25"),
        ("$42$", "42"),
        ("\\(42\\)", "42"),
        ("**42**", "42"),
        ("42 apples", "42"),
        ("88253 \\text{ m}^2", "88253"),
        ("88253 m²", "88253"),
        ("12km", "12"),
        ("12 * 3 = 36", "36"),
        ("1.5e3", "1500"),
        ("3/4", "3/4"),
        ("-\\frac{3}{4}", "-3/4"),
        (
            "0.1000000000000000055511151231257827",
            "1000000000000000055511151231257827/10000000000000000000000000000000000",
        ),
    ],
)
def test_number_is_read(text: str, number: str) -> None:
    assert read_number(text) == Fraction(number)


@pytest.mark.parametrize(
    "text",
    [
        *("", "-", "none", "x", "NaN", "inf", "0x1F", "1e9999", "٤٢", "9" * 5000),
        *("--5", "+-5", "-$-5", "1.2.3", "1,23", "1,2345", "12,345,6"),
        *("12 * 3", "84/2", "6/4", "5/0", "3 or 4", "3 and 4", "<42", "42 (not 43)", "2 million"),
    ],
)
def test_what_is_no_single_number_is_not_read(text: str) -> None:
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 42", "42"),
        ("It is 41.\n#### 42", "42"),
        ("####42\n", "42"),
        ("####\n42", "42"),
        ("#### 41\n#### 42", "42"),
        ("#### 41 \\boxed{42}", "42"),
        ("\\boxed{41}\n#### 42", "42"),
        ("#### 41\nso \\boxed{42} it is", "42"),
        ("\\boxed{\\frac{3}{4}}", "\\frac{3}{4}"),
        ("\\boxed{42", None),
        ("42", None),
        ("### 42", None),
        ("", None),
    ],
)
def test_last_final_answer_counts(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("#### 7,440", True),
        ("#### 7440.0", True),
        ("\\boxed{7440}", True),
        ("#### 74400", False),
        ("#### -7440", False),
        ("#### 7440.0000000000000000000001", False),
        ("#### 7440\n#### 1", False),
        ("7440", False),
    ],
)
def test_answer_is_compared_exactly(text: str, right: bool) -> None:
    assert is_right(text, "7440") is right


# -- problems ----------------------------------------------------------------------------------------------------------


def test_no_text_and_no_operands_of_one_split_occur_in_the_other_for_any_two_seeds() -> None:
    seen: dict[str, set[str]] = {"train": set(), "validation": set()}
    for seed in (0, 1, 7):
        for split in seen:
            tasks = CalculatorMath(seed=seed, train_size=400, validation_size=400).tasks(split)
            for task in tasks:
                seen[split].add(str(task.prompt))
                numbers = [int(number) for number in re.findall("[0-9]+", str(task.prompt))]
                assert split_of(numbers) == split, task
    assert not seen["train"] & seen["validation"]
    assert len(seen["train"]) > 1100  # varied: hardly a text twice


def test_expressions_give_the_answer_with_the_real_calculator() -> None:
    for task in CalculatorMath().tasks("train")[:300]:
        assert str(evaluate(task.data["expressions"][-1])) == task.data["answer"], task
        assert len(task.data["expressions"]) == task.data["level"]


def test_every_wording_names_every_operand() -> None:
    for plan in PLANS:
        operands = {
            name: 10 ** (digits[1] - 1) + 3 + number for number, (name, digits) in enumerate(plan.digits.items())
        }
        for wording in plan.expressions + plan.stories:
            text = wording.format(**operands, who="Ana", other="Ben", things="pens")
            assert sorted(map(int, re.findall("[0-9]+", text))) == sorted(operands.values()), wording


def test_a_plan_uses_results_of_earlier_steps() -> None:
    plan = next(plan for plan in PLANS if plan.name == "product_minus_times")
    assert solve(plan, {"a": 12, "b": 200, "c": 50, "d": 3}) == (("12*200", "2400-50", "2350*3"), 7050)


def test_tasks_depend_on_seed_and_number_only() -> None:
    backwards = [CalculatorMath(seed=5, train_size=50).tasks("train")[number] for number in reversed(range(50))]
    assert [task.id for task in backwards[::-1]][:2] == ["train-000000", "train-000001"]
    assert list(CalculatorMath(seed=5, train_size=9_999).tasks("train")[:50]) == backwards[::-1]
    assert CalculatorMath(seed=6).tasks("train")[0].prompt != CalculatorMath(seed=5).tasks("train")[0].prompt


def test_default_sizes_and_levels() -> None:
    env = CalculatorMath()
    assert len(env.tasks("train")) == 10_000
    tasks = env.tasks("validation")
    assert len(tasks) == 256
    shares = [sum(task.data["level"] == level for task in tasks) / len(tasks) for level in (1, 2, 3)]
    assert shares == pytest.approx([0.8, 0.15, 0.05], abs=0.08)
    assert {task.data["level"] for task in CalculatorMath(level=2).tasks("train")[:50]} == {2}


def test_the_kind_decides_whether_a_problem_names_its_operations() -> None:
    named = {wording.format_map(Blank()) for plan in PLANS for wording in plan.expressions}

    def share(kind: str) -> float:
        prompts = [str(task.prompt) for task in CalculatorMath(kind=kind).tasks("train")[:200]]
        return sum(re.sub(r"[0-9]+", "#", prompt) in named for prompt in prompts) / 200

    assert (share("expression"), share("story")) == (1.0, 0.0)
    assert 0.15 < share("mix") < 0.35


class Blank(dict[str, str]):
    """Fills every field with ``#``."""

    def __missing__(self, key: str) -> str:
        return "#"


def test_tasks_are_a_sequence() -> None:
    tasks = CalculatorMath(train_size=3).tasks("train")
    assert tasks[-1] is tasks[2]
    assert [task.id for task in tasks] == ["train-000000", "train-000001", "train-000002"]
    with pytest.raises(IndexError):
        tasks[3]


@pytest.mark.parametrize(
    "kwargs", [{"level": 4}, {"level": "hard"}, {"kind": "poem"}, {"train_size": 0}, {"validation_size": -1}]
)
def test_wrong_settings_are_refused(kwargs: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(kwargs.values())))):
        CalculatorMath(**kwargs)


# -- the environment ---------------------------------------------------------------------------------------------------


def play(env: CalculatorMath, task: Task, turns: list[AssistantTurn]) -> float:
    env.reset(options={"task_id": task.id})
    rewards = []
    for turn in turns:
        _, reward, terminated, _, _ = env.step(turn)
        rewards.append(reward)
    assert terminated
    return sum(rewards)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_oracle_solves_every_level(level: int) -> None:
    env = CalculatorMath(level=level)
    for task in env.tasks("train")[:20]:
        turns = env.oracle(task)
        assert len(turns) == level + 1
        assert play(env, task, turns) == 1.0
    env.close()


def test_first_prompt_and_tool_answer() -> None:
    env = CalculatorMath(level=1)
    task = env.tasks("train")[0]
    first, _ = env.reset(options={"task_id": "train-000000"})
    assert [message["role"] for message in first] == ["system", "user"]
    assert first[1]["content"] == task.prompt
    (answer,), reward, terminated, _, info = env.step(env.oracle(task)[0])
    assert (answer["role"], answer["content"], reward, terminated) == ("tool", task.data["answer"], 0.0, False)
    assert info["tool_calls"] == 1
    env.close()


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_wrong_answer_and_none_score_nothing(split: str) -> None:
    env = CalculatorMath(split=split)
    task = env.tasks(split)[0]
    assert play(env, task, [AssistantTurn(content=f"#### {task.data['answer']}1")]) == 0.0
    assert play(env, task, [AssistantTurn(content="I do not know.")]) == 0.0
    env.close()


def test_without_tools_a_call_is_answered_and_the_answer_still_scored() -> None:
    env = CalculatorMath(use_tools=False)
    task = env.tasks("train")[0]
    env.reset(options={"task_id": task.id})
    assert env.tools == ()
    call = ToolCall(name="calculator", arguments={"expression": task.data["expressions"][0]})
    (refusal,), _, terminated, _, info = env.step(AssistantTurn(tool_calls=(call,)))
    assert not terminated
    assert info["tool_errors"] == 1
    assert task.data["answer"] not in str(refusal["content"])
    assert env.step(f"#### {task.data['answer']}")[1:3] == (1.0, True)
    env.close()


def test_passes_the_checks_of_gymnasium_and_agentgym() -> None:
    report = check_env("calculator-math")
    assert [finding for finding in report.findings if finding.level == "error"] == []


def test_is_made_by_name_with_its_settings() -> None:
    env = agentgym.make("calculator-math", level=3, seed=11, use_tools=False)
    assert env.tasks("validation")[0].data["level"] == 3
    env.close()

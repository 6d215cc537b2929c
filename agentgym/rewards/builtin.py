"""Scorers for the answers of well-known data sets, by ``data_source``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from agentgym.errors import ConfigError, did_you_mean

Scorer = Callable[[str, Any], float]

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
_MARKED = re.compile(r"####\s*(-?\$?\d[\d,]*(?:\.\d+)?)")


def score_gsm8k(solution: str, ground_truth: Any) -> float:
    """1.0 if the last number after ``####`` equals the truth; 0.0 otherwise, also where there is none."""
    found = _MARKED.findall(solution)
    return float(bool(found) and _number(found[-1]) == _number(str(ground_truth)))


def score_exact(solution: str, ground_truth: Any) -> float:
    """1.0 if the text, without outer white space, is the truth."""
    return float(solution.strip() == str(ground_truth).strip())


BUILTIN: dict[str, Scorer] = {"openai/gsm8k": score_gsm8k, "gsm8k": score_gsm8k, "exact": score_exact}


def find_scorer(data_source: str, *, where: str) -> Scorer:
    """The scorer of a data source. Raises `ConfigError` where none is built in."""
    if data_source not in BUILTIN:
        raise ConfigError(
            f"{where}: no built-in scorer for data_source {data_source!r}.{did_you_mean(data_source, BUILTIN)} Set "
            f"reward.path to a file with compute_score(data_source, solution_str, ground_truth, extra_info=None). "
            f"Built in: {', '.join(BUILTIN)}"
        )
    return BUILTIN[data_source]


def score_builtin(data_source: str, solution: str, ground_truth: Any) -> float:
    """The score by the built-in scorer of the data source."""
    return find_scorer(data_source, where="scoring")(solution, ground_truth)


def write_answer(data_source: str, ground_truth: Any) -> str:
    """An answer that the built-in scorer of the data source takes for right."""
    marked = find_scorer(data_source, where="oracle") is score_gsm8k
    return f"#### {ground_truth}" if marked else str(ground_truth)


def _number(text: str) -> float | None:
    match = _NUMBER.search(text)
    return float(match[0].replace(",", "").replace("$", "")) if match else None

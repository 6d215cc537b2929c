"""A data file, a tool and a reward function: all that training on data of one's own takes.

    python examples/train_on_a_file.py                            # writes data/sums/train.parquet and val.parquet
    agentgym train env=dataset data.train_files=data/sums/train.parquet data.val_files=data/sums/val.parquet \\
        tools=examples/train_on_a_file.py reward=examples/train_on_a_file.py
"""

from __future__ import annotations

from typing import Any

from agentgym import function_tool
from agentgym.data import write_rows


@function_tool
def add(a: int, b: int) -> int:
    """Add two whole numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a + b


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> dict[str, float]:
    """1 for the right number at the end, and a little for a short answer."""
    words = solution_str.split()
    right = float(bool(words) and words[-1].strip(".") == ground_truth)
    return {"score": right, "right": right, "length": float(len(words))}


def rows(split: str, numbers: range) -> list[dict[str, Any]]:
    return [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"How much is {a} plus {b}? Use the tool, end with the number."}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"split": split, "index": a * 100 + b, "tool_selection": ["add"]},
        }
        for a in numbers
        for b in range(10, 20)
    ]


if __name__ == "__main__":
    write_rows("data/sums/train.parquet", rows("train", range(10, 40)))
    write_rows("data/sums/val.parquet", rows("val", range(40, 45)))

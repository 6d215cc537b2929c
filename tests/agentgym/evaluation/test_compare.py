"""Two evaluations side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentgym.errors import ConfigError
from agentgym.evaluation.compare import compare
from agentgym.evaluation.results import Results
from agentgym.rollout import Rollout
from agentgym.types import Outcome, RolloutStatus


def written(folder: Path, rewards: dict[str, list[float | None]], config: str = "") -> Path:
    with Results(folder) as results:
        for task_id, values in rewards.items():
            for sample, reward in enumerate(values):
                status = RolloutStatus.FAILED_ENV if reward is None else RolloutStatus.COMPLETED
                outcome = Outcome(status=status, reward=reward)
                results.add(Rollout(env_id="e", task_id=task_id, group=task_id, sample=sample, outcome=outcome))
    if config:
        (folder / "config.yaml").write_text(config)
    return folder


def test_the_difference_is_paired_by_task(tmp_path: Path) -> None:
    base: dict[str, list[float | None]] = {f"t{i:02d}": [float(i % 2)] * 2 for i in range(20)}
    first = written(tmp_path / "a", {**base, "gone": [1.0], "broken": [1.0]})
    changes: dict[str, list[float | None]] = {"t00": [1.0, 0.0], "t01": [0.0, None], "t02": [1.0, 1.0]}
    second = written(tmp_path / "b", {**base, **changes, "new": [1.0], "broken": [None]})
    found = compare(first, second)
    assert found.difference.mean == pytest.approx((0.5 - 1 + 1) / 20)
    assert found.difference.low < 0 < found.difference.high
    assert (found.only_first, found.only_second) == (2, 1)  # a task that could not be scored is no loss
    assert [(t.task_id, t.difference) for t in found.changed] == [("t01", -1.0), ("t00", 0.5), ("t02", 1.0)]
    text = "\n".join(found.lines())
    assert "20 in both: 2 better, 1 worse, 17 equal" in text
    assert "not beyond chance" in text
    assert "t01" in text
    assert "t03" not in text


def test_a_clear_difference_is_said_to_be_one(tmp_path: Path) -> None:
    first = written(tmp_path / "a", {f"t{i}": [0.0] for i in range(12)})
    second = written(tmp_path / "b", {f"t{i}": [float(i > 2)] for i in range(12)})
    found = compare(first, second)
    assert found.difference.low > 0
    lines = found.lines(limit=4)
    assert any("+0.750" in line and ", beyond chance" in line for line in lines)
    assert lines[-1] == "  ... and 5 more (--all lists them)"


def test_unequal_settings_are_warned_of(tmp_path: Path) -> None:
    first = written(tmp_path / "a", {"t": [1.0]}, "env: {name: x, level: 1}\nsplit: train\n")
    second = written(tmp_path / "b", {"t": [1.0]}, "env: {name: x, level: 2}\nsplit: train\n")
    (warning,) = compare(first, second).warnings
    assert "env differs" in warning
    assert "'level': 2" in warning


def test_nothing_in_common_is_an_error(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a", {"t": [1.0]}), written(tmp_path / "b", {"u": [1.0]})
    with pytest.raises(ConfigError, match="no scored task in common"):
        compare(first, second)

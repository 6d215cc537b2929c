"""``agentgym score``: recorded rollouts scored again, or replayed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentgym.config import load_config
from agentgym.console import Console


def score_command(path: Path, overrides: Sequence[str], *, replay: bool) -> int:
    """Score or replay the rollouts in ``path`` and print what came out.

    Returns:
        The exit code: 0, or 1 where nothing could be scored, or where a replay differs.
    """
    from agentgym.evaluation.records import read_records, settings_beside
    from agentgym.evaluation.replay import replay as replay_records
    from agentgym.evaluation.rescore import SECTIONS, ScoreConfig, rescore

    console = Console()
    base = settings_beside(path, SECTIONS)
    config = load_config(ScoreConfig, overrides=overrides, base=base)
    records = read_records(path)
    if replay:
        report = replay_records(config, records)
        for line in report.lines():
            console.line(line)
        return 1 if report.different or not report.replayed else 0
    rescored = rescore(config, records)
    for line in rescored.lines():
        console.line(line)
    if config.output is not None:
        console.line(f"\n{config.output} has them with their new rewards; agentgym compare {path} {config.output}")
    return 1 if rescored.mean is None else 0

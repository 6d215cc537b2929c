"""``agentgym eval`` and ``agentgym config eval``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentgym.config import dump_config, load_config
from agentgym.console import Console
from agentgym.evaluation_config import EvalConfig


def eval_command(overrides: Sequence[str], files: Sequence[Path]) -> int:
    """Compose and check the configuration, evaluate, print the report. Returns the exit code."""
    from agentgym.trainer.preflight import check_evaluation

    config = load_config(EvalConfig, overrides=overrides, files=files)
    check_evaluation(config)
    from agentgym.evaluation import evaluate  # after the checks: it is slow to import

    console = Console()
    report = evaluate(config, console)
    for line in report.lines():
        console.line(line)
    return 0 if report.scored > 0 else 1


def show_eval_config(overrides: Sequence[str], files: Sequence[Path]) -> None:
    """Print the composed configuration, with its names checked."""
    from agentgym.trainer.preflight import check_names

    config = load_config(EvalConfig, overrides=overrides, files=files)
    check_names(config.plugins, config.env, config.rollout)
    Console().line(dump_config(config).rstrip())

"""``agentgym eval`` and ``agentgym config eval``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentgym.config import Layer, dump_config, load_config, read_yaml
from agentgym.console import Console
from agentgym.evaluation_config import EvalConfig

SAMPLING = frozenset({"engine", "temperature", "top_p", "top_k", "n"})
"""Settings of a training run's rollouts that its evaluation does not take over."""


def eval_command(overrides: Sequence[str], files: Sequence[Path]) -> int:
    """Compose and check the configuration, evaluate, print the report. Returns the exit code."""
    from agentgym.trainer.preflight import check_evaluation

    config = load_eval_config(overrides, files)
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

    config = load_eval_config(overrides, files)
    check_names(config.plugins, config.env, config.rollout)
    Console().line(dump_config(config).rstrip())


def load_eval_config(overrides: Sequence[str], files: Sequence[Path]) -> EvalConfig:
    """The configuration; the model of a run is evaluated as it was trained, where nothing else is said."""
    run = _chosen(overrides, "model", "path")
    base = [] if run is None else settings_of_run(Path(run), env=_chosen(overrides, "env", "name"))
    return load_config(EvalConfig, overrides=overrides, files=files, base=base)


def settings_of_run(run: Path, *, env: str | None) -> list[Layer]:
    """Environment, parser, lengths and the like of a training run; nothing if ``run`` is not the folder of one.

    Args:
        run: a run folder.
        env: the environment that was asked for; another one than the run's has arguments of its own.
    """
    file = run / "config.yaml"
    if not file.is_file():
        return []
    trained = read_yaml(file)
    data: dict[str, Any] = {key: trained[key] for key in ("plugins", "env", "rollout") if key in trained}
    if env is not None and env != data["env"]["name"]:
        del data["env"]
    data["rollout"] = {key: value for key, value in data["rollout"].items() if key not in SAMPLING}
    data["model"] = {"dtype": trained["model"]["dtype"]}
    return [Layer(str(file), data)]


def _chosen(overrides: Sequence[str], section: str, field: str) -> str | None:
    """What the overrides choose for a section, e.g. ``model=...`` or ``model.path=...``."""
    pairs = [text.partition("=") for text in overrides]
    values = [value for key, _, value in pairs if key in (section, f"{section}.{field}")]
    return values[-1] if values else None

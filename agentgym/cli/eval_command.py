"""``agentgym eval`` and ``agentgym config eval``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentgym.cli.signals import sigterm_interrupts
from agentgym.config import Layer, dump_config, load_config, read_yaml
from agentgym.console import Console
from agentgym.data.config import FilesConfig
from agentgym.errors import ConfigError
from agentgym.evaluation_config import EvalConfig

EVALS = Path("evals")
"""Folder of the evaluations that do not name one."""

SAMPLING = frozenset({"engine", "temperature", "top_p", "top_k", "n"})
"""Settings of a training run's rollouts that its evaluation does not take over."""


def eval_command(overrides: Sequence[str], files: Sequence[Path], *, resume: bool = False) -> int:
    """Compose and check the configuration, evaluate, print the report.

    Returns:
        The exit code: 0, or 1 where nothing could be scored.
    """
    from agentgym.trainer.preflight import check_evaluation

    config = load_eval_config(overrides, files, resume=resume)
    check_evaluation(config)
    from agentgym.evaluation import evaluate  # after the checks: it is slow to import

    folder = config.output if config.output is not None else default_folder(config, resume=resume)
    console = Console()
    with sigterm_interrupts():
        report = evaluate(config.model_copy(update={"output": folder}), console, resume=resume)
    for line in report.lines():
        console.line(line)
    console.line(f"\n{folder}/report.html shows it with plots; agentgym compare {folder} OTHER puts two side by side")
    if report.errors:
        console.line(f"agentgym eval --resume output={folder} plays what failed again")
    return 0 if report.scored > 0 else 1


def default_folder(config: EvalConfig, *, resume: bool) -> Path:
    """``evals/ENV-POLICY``; with a number behind it where that exists, unless it is resumed."""
    policy = config.agent if config.agent is not None else config.model.path
    name = re.sub(r"[^\w.-]+", "-", f"{config.env.name}-{policy.rstrip('/').removesuffix('.py')}").strip("-.")
    folder, number = EVALS / name, 1
    while folder.exists() and not resume:
        number += 1
        folder = EVALS / f"{name}-{number}"
    return folder


def show_eval_config(overrides: Sequence[str], files: Sequence[Path]) -> None:
    """Print the composed configuration, with its names checked."""
    from agentgym.trainer.preflight import check_names

    config = load_eval_config(overrides, files)
    check_names(config.plugins, config.env, config.rollout)
    Console().line(dump_config(config).rstrip())


def load_eval_config(overrides: Sequence[str], files: Sequence[Path], *, resume: bool = False) -> EvalConfig:
    """The configuration; the model of a run is evaluated as it was trained, where nothing else is said.

    With ``resume`` the settings are those of the evaluation in ``output=FOLDER`` (also given as plain ``FOLDER``),
    where nothing else is said.
    """
    if resume:
        overrides = [f"output={text}" if "=" not in text and Path(text).is_dir() else text for text in overrides]
        output = _chosen(overrides, "output", "")
        if output is not None:
            file = Path(output) / "config.yaml"
            if not file.is_file():
                raise ConfigError(f"--resume output={output}: no evaluation there; expected {file}")
            return load_config(EvalConfig, overrides=overrides, files=files, base=[Layer(str(file), read_yaml(file))])
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
    shared = ("plugins", "env", "rollout", "data", "tools", "reward")
    data: dict[str, Any] = {key: trained[key] for key in shared if key in trained}
    if env is not None and env != data["env"]["name"]:
        for key in ("env", "data", "tools", "reward"):
            data.pop(key, None)
    if "data" in data:
        data["data"] = {key: value for key, value in data["data"].items() if key in FilesConfig.model_fields}
    data["rollout"] = {key: value for key, value in data["rollout"].items() if key not in SAMPLING}
    data["model"] = {"dtype": trained["model"]["dtype"]}
    return [Layer(str(file), data)]


def _chosen(overrides: Sequence[str], section: str, field: str) -> str | None:
    """What the overrides choose for a section, e.g. ``model=...`` or ``model.path=...``."""
    pairs = [text.partition("=") for text in overrides]
    values = [value for key, _, value in pairs if key in (section, f"{section}.{field}")]
    return values[-1] if values else None

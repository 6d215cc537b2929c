"""``agentgym train`` and ``agentgym config train``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentgym.config import dump_config, load_config
from agentgym.console import Console
from agentgym.errors import ConfigError, did_you_mean


def train_command(overrides: Sequence[str], files: Sequence[Path], *, resume: str | None, dry_run: bool) -> int:
    """Compose and check the configuration, then train. Returns the exit code."""
    from agentgym.trainer.config import TrainConfig
    from agentgym.trainer.preflight import check_run

    if resume is not None:
        run_dir = find_run(resume)
        files = [run_dir / "config.yaml", *files]
        overrides = [*overrides, f"trainer.resume={run_dir}"]
    config = load_config(TrainConfig, overrides=overrides, files=files)
    check = check_run(config)
    console = Console()
    if dry_run:
        for line in check.lines(config):
            console.line(line)
        console.line("Everything checked; nothing was started (--dry-run).")
        return 0
    from agentgym.trainer.main import run

    return run(config, console)


def show_train_config(overrides: Sequence[str], files: Sequence[Path]) -> None:
    """Print the composed configuration, with its names checked."""
    from agentgym.trainer.config import TrainConfig
    from agentgym.trainer.preflight import check_algorithm, check_names

    config = load_config(TrainConfig, overrides=overrides, files=files)
    check_names(config.plugins, config.env, config.rollout)
    check_algorithm(config)
    Console().line(dump_config(config).rstrip())


def find_run(name: str) -> Path:
    """The folder of a run, given as a path or by its name below ``runs``. Raises `ConfigError` if it is none."""
    candidates = [Path(name), Path("runs") / name]
    for folder in candidates:
        if (folder / "config.yaml").is_file():
            return folder
    parent = candidates[0].parent if candidates[0].parent != Path() else Path("runs")
    runs = [str(config.parent) for config in sorted(parent.glob("*/config.yaml"))]
    near = did_you_mean(name, runs) or did_you_mean(str(candidates[1]), runs)
    raise ConfigError(f"--resume {name}: no run there (no config.yaml).{near} Runs: {', '.join(runs[-5:]) or 'none'}")

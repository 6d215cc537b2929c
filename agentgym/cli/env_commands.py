"""``agentgym envs`` and ``agentgym check``."""

from __future__ import annotations

from collections.abc import Sequence

from agentgym.config import ConfigModel, Names, load_config, setting
from agentgym.console import Console
from agentgym.settings import EnvConfig


class PluginsConfig(ConfigModel):
    """Settings of commands about all environments."""

    plugins: Names = setting([], "Modules or Python files that register environments")


class OneEnvConfig(PluginsConfig):
    """Settings of commands about one environment."""

    env: EnvConfig = setting(..., "the environment")


def envs_command(overrides: Sequence[str]) -> int:
    """Print a table of all registered environments."""
    from agentgym import plugins, registration
    from agentgym.cli.bench_command import table

    plugins.load(load_config(PluginsConfig, overrides=overrides).plugins)
    rows = [{"name": name, "what": registration.spec(name).description} for name in registration.list_envs()]
    console = Console()
    for line in table(rows):
        console.line(line)
    console.line("\nTry one: agentgym play NAME")
    return 0


def load_env_choice(overrides: Sequence[str]) -> EnvConfig:
    """The chosen environment, its plugins imported, its name and arguments checked."""
    from agentgym import plugins
    from agentgym.trainer.preflight import check_env_choice

    config = load_config(OneEnvConfig, overrides=overrides)
    plugins.load(config.plugins)
    check_env_choice(config.env)
    return config.env


def check_command(overrides: Sequence[str]) -> int:
    """Print the report of `agentgym.checks.check_env`. Returns 1 if something is wrong."""
    from agentgym.checks import check_env
    from agentgym.trainer.preflight import make_env

    choice = load_env_choice(overrides)
    env = make_env(choice)
    try:
        report = check_env(env)
    finally:
        env.close()  # its sandboxes, too
    console = Console()
    for line in report.lines:
        console.line(line)
    return 0 if report.ok else 1

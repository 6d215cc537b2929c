"""Settings of the reward, for training and evaluation alike."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from agentgym.config import ConfigModel, setting
from agentgym.errors import ConfigError, did_you_mean
from agentgym.objects import absolute, load_object
from agentgym.rewards.base import RewardManager, reward_managers
from agentgym.rewards.functions import ScoreFunction
from agentgym.rewards.scorer import Decode, Scorer


class RewardConfig(ConfigModel):
    """``reward=FILE.py``: replaces the environment's own terminal score."""

    chosen_by: ClassVar[str | None] = "path"

    path: str | None = setting(
        None,
        "`file.py`, `file.py:name` or `module:name` of a compute_score function; null: the environment scores",
        synonyms=["function", "custom_reward_function", "reward_fn"],
    )
    name: str = setting("compute_score", "Name of the function, where the path has none", synonyms=["function_name"])
    kwargs: dict[str, Any] = setting({}, "Further keyword arguments of that function", synonyms=["reward_kwargs"])
    manager: str = setting(
        "naive",
        "naive, batch, parallel, composite, dapo, remote, model, or a registered name or `file.py:Class` of your own",
        synonyms=["reward_manager"],
    )
    options: dict[str, Any] = setting({}, "Arguments of the manager, e.g. reward.options.timeout=5")
    timeout: float = setting(300.0, "Seconds that the scoring of one rollout, or of one group, may take", gt=0.0)

    @property
    def active(self) -> bool:
        """Whether anything but the environment scores."""
        return self.path is not None or self.manager != "naive"

    def shipped(self) -> RewardConfig:
        """The same with absolute paths, for processes that live elsewhere."""
        path = None if self.path is None else absolute(self.path)
        return self.model_copy(update={"path": path, "manager": absolute(self.manager), "options": _ship(self.options)})


def _ship(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the absolute paths of files of code and of model folders."""
    return {name: _ship_value(value, key=name) for name, value in options.items()}


def _ship_value(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return _ship(value)
    if isinstance(value, list):
        return [_ship_value(part, key) for part in value]
    if key == "model" and isinstance(value, str) and Path(value).is_dir():
        return str(Path(value).resolve())
    return absolute(value) if key == "path" and isinstance(value, str) else value


def make_reward_manager(config: RewardConfig, *, max_response_length: int | None = None) -> RewardManager | None:
    """The manager as configured; None where the environment scores.

    Args:
        config: the settings.
        max_response_length: tokens of the longest response, for managers that ask for it with this argument.

    Raises:
        ConfigError: an unknown manager, function or option, or a function that cannot be called as needed.
    """
    if not config.active:
        return None
    manager: Any = (
        load_object(config.manager, what="reward.manager")
        if ":" in config.manager
        else reward_managers.get(config.manager)
    )
    if not (isinstance(manager, type) and issubclass(manager, RewardManager)):
        raise ConfigError(f"reward.manager={config.manager} is {manager!r}, expected a subclass of RewardManager")
    parameters = list(inspect.signature(manager).parameters.values())[1:]
    accepted = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    options = dict(config.options)
    for name in options:
        if name not in accepted and len(accepted) == len(parameters):
            own = [known for known in accepted if known != "max_response_length"]
            raise ConfigError(
                f"reward.options.{name}: manager {config.manager!r} has no such option.{did_you_mean(name, own)} "
                f"Its options: {', '.join(own) or 'none'}"
            )
    if "max_response_length" in accepted:
        options.setdefault("max_response_length", max_response_length)
    for parameter in parameters:
        needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if needed and parameter.name not in options:
            raise ConfigError(f"reward.manager={config.manager} needs reward.options.{parameter.name}")
    made: RewardManager = manager(ScoreFunction(config.path, config.name, config.kwargs), **options)
    return made


def make_scorer(config: RewardConfig, *, max_response_length: int, decode: Decode | None = None) -> Scorer | None:
    """A scorer with the configured manager; None where the environment scores."""
    manager = make_reward_manager(config, max_response_length=max_response_length)
    return None if manager is None else Scorer(manager, decode=decode, timeout=config.timeout)

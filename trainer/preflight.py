"""What can be checked of a run before anything starts: names, the environment, the model's folder, sizes.

Loads neither torch nor transformers. The environment is made and closed again.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import json
import os
import re
import socket
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agentgym import plugins, registration
from agentgym.agents import BUILT_IN, load_agent, needs_endpoint
from agentgym.errors import ConfigError, EnvError, RegistrationError, UnknownName, boundary, did_you_mean
from agentgym.evaluation.endpoint import base_url
from agentgym.loops import ExternalLoop, agent_loops
from agentgym.loops.base import find_agent_loop
from agentgym.rewards.config import RewardConfig, make_reward_manager
from agentgym.settings import EnvConfig, ModelConfig, RolloutConfig
from agentgym.tokens import get_parser
from agentgym.tool_env import ToolEnv
from agentgym.trainer.algorithms.registry import ADVANTAGES, POLICY_LOSSES
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.data import load_curriculum
from agentgym.trainer.loggers import check_loggers
from agentgym.trainer.model_files import TOKENIZER_FILES, check_tokenizer_files, check_weight_files
from agentgym.trainer.model_path import resolve_model_path
from agentgym.trainer.models import shipped_models
from agentgym.trainer.rollout.vllm_support import check_vllm
from agentgym.trainer.tracking import GREEDY, STEP, recorded_steps
from agentgym.types import SPLITS

if TYPE_CHECKING:
    from agentgym.env import Env
    from agentgym.evaluation_config import EvalConfig
    from agentgym.types import Task

MODEL_FILES = ("config.json", "tokenizer_config.json", "chat_template.jinja", *TOKENIZER_FILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheck:
    """What a checked run amounts to."""

    train_tasks: int
    """After ``data.train_size``."""
    val_tasks: int
    """After ``data.val_size``."""
    steps: int
    model: str
    """The folder or hub id that is loaded."""

    def lines(self, config: TrainConfig) -> list[str]:
        """For a person, one fact a line."""
        rollouts = f"{config.data.batch_size} prompts x {config.rollout.n} samples"
        return [
            f"environment  {config.env.name}: {self.train_tasks} training and {self.val_tasks} validation tasks",
            f"model        {config.model.path}: {self.model}",
            f"algorithm    {config.algo.name}: advantage {config.algo.advantage}, loss {config.algo.policy_loss}",
            f"steps        {self.steps}, each of {rollouts}",
        ]


def check_run(config: TrainConfig) -> RunCheck:
    """Check everything about a training run that needs no model.

    Raises:
        ConfigError: an unknown name, a wrong argument of the environment, tasks that are missing or too few for a
            batch, a model folder without what it takes.
    """
    check_names(config.plugins, config.env, config.rollout)
    members = config.env.members()
    if config.trainer.cluster == "ray":
        for member in members:
            registration.check_shippable(registration.spec(member.name))
    check_algorithm(config)
    load_curriculum(config.data.curriculum)
    check_reward(config.reward, config.rollout)
    model = check_model(config.model, config.rollout)
    check_run_dir(config.trainer.run_dir)
    check_loggers(config.trainer.loggers)
    train_tasks = val_tasks = total = 0
    for member in members:
        train, val = check_tasks(member, SPLITS, scored_by_env=not config.reward.active)
        total += len(train)
        train_tasks += len(train[: config.data.train_size])
        val_tasks += len(val[: config.data.val_size])
    if config.trainer.replay is not None:
        check_replay(config.trainer.replay, config.num_steps(train_tasks), baselines=config.algo.needs_baselines)
    check_batch(config, train_tasks, total=total)
    return RunCheck(
        train_tasks=train_tasks,
        val_tasks=val_tasks,
        steps=config.num_steps(train_tasks),
        model=model,
    )


def check_evaluation(config: EvalConfig) -> None:
    """The same for an evaluation. Raises `ConfigError`."""
    check_names(config.plugins, config.env, config.rollout)
    if len(config.env.members()) > 1:
        raise ConfigError(
            f"env={config.env.name}: an evaluation takes one environment at a time: env={config.env.names[0]}"
        )
    check_reward(config.reward, config.rollout)
    agent = None if config.agent in (None, *BUILT_IN) else load_agent(str(config.agent))
    if config.endpoint.url is None and (config.agent is None or (agent is not None and needs_endpoint(agent))):
        check_model(config.model, config.rollout)
    if config.endpoint.url is not None:
        check_host(config.endpoint.url)
    [tasks] = check_tasks(config.env, [config.split], scored_by_env=not config.reward.active)
    env = make_env(config.env)
    try:
        if config.agent == "oracle":
            with boundary(f"oracle of environment {config.env.name!r}", task_id=tasks[0].id):
                env.oracle(tasks[0])
    finally:
        env.close()


def check_host(url: str) -> None:
    """Raise `ConfigError` if nobody knows the host of an endpoint: it would be asked again for minutes."""
    if urllib.request.getproxies():
        return  # a proxy may know hosts that this machine does not
    host = urlsplit(base_url(url)).hostname or ""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"endpoint={url}: no machine of the name {host!r} is known ({error}): check the address"
        ) from None


def check_names(plugin_list: Sequence[str], env: EnvConfig, rollout: RolloutConfig) -> None:
    """Import the plugins, then look up the environment, its arguments, the agent loop and the parser."""
    plugins.load(list(plugin_list))
    for member in env.members():
        check_env_choice(member)
    chosen = rollout.agent_loop if isinstance(rollout.agent_loop, str) else rollout.agent_loop.get("name")
    if isinstance(chosen, str) and chosen not in agent_loops:
        raise _unknown("rollout.agent_loop", chosen, agent_loops.names())
    try:
        loop, arguments = find_agent_loop(rollout.agent_loop)
        inspect.signature(loop).bind(generator=None, renderer=None, parser=None, **arguments)
    except (TypeError, ConfigError, RegistrationError) as error:
        raise ConfigError(f"rollout.agent_loop={rollout.agent_loop}: {error}") from None
    if issubclass(loop, ExternalLoop) and not needs_endpoint(load_agent(str(arguments["agent"]))):
        raise ConfigError(f"rollout.agent_loop.agent={arguments['agent']}: expected a function of (session, endpoint)")
    try:
        get_parser(rollout.parser)
    except UnknownName as error:
        raise ConfigError(f"rollout.parser={rollout.parser}: {error}") from None


def check_engine(rollout: RolloutConfig) -> None:
    """The engine's package is installed in a version that fits, and the engine does what is asked of it."""
    if rollout.engine != "vllm":
        return
    check_vllm()
    if rollout.deterministic:
        raise ConfigError(
            "rollout.deterministic=true: vLLM's tokens depend a little on what else is in the batch; leave it out, or "
            "use rollout=torch"
        )


def check_env_choice(env: EnvConfig) -> None:
    """The environment is registered and its constructor takes the given arguments."""
    spec = registration.spec(env.name)
    try:
        registration.check_kwargs(spec, env.kwargs)
    except ConfigError as error:
        own = [name for name in EnvConfig.model_fields if name != "name"]
        for name in env.kwargs:
            for near in difflib.get_close_matches(name, own, n=1, cutoff=0.8):
                raise ConfigError(f"env.{name}: no such key. Did you mean env.{near}? {error}") from None
        raise


def check_algorithm(config: TrainConfig) -> None:
    """Advantage and loss exist."""
    algo = config.algo
    if algo.advantage not in ADVANTAGES:
        raise _unknown("algo.advantage", algo.advantage, ADVANTAGES.names())
    if algo.policy_loss not in POLICY_LOSSES:
        raise _unknown("algo.policy_loss", algo.policy_loss, POLICY_LOSSES.names())


def check_reward(reward: RewardConfig, rollout: RolloutConfig) -> None:
    """The reward manager can be made: function, options and arguments are what they must be."""
    make_reward_manager(reward, max_response_length=rollout.max_response_length)


def check_tasks(env: EnvConfig, splits: Sequence[str], *, scored_by_env: bool) -> list[Sequence[Task]]:
    """The tasks of the splits, checked; also that the environment can score them where nobody else does."""
    made = make_env(env)
    try:
        found = [split_tasks(made, env.name, split) for split in splits]
        if scored_by_env and isinstance(made, ToolEnv):
            for task in itertools.chain.from_iterable(found):
                made.check_scoring(task)
    finally:
        made.close()
    return found


def check_replay(run: str, steps: int, *, baselines: bool) -> None:
    """A recorded run holds the rollouts of the first ``steps`` steps (and their greedy ones)."""
    folder = Path(run)
    recorded = recorded_steps(folder)
    if not recorded:
        raise ConfigError(
            f"trainer.replay={run}: no run with rollouts there; expected {folder / 'rollouts' / STEP.format(1)}.jsonl"
        )
    missing = min(set(range(1, steps + 1)) - set(recorded), default=None)
    if missing is not None:
        remedy = f"; set trainer.total_steps to at most {missing - 1}" if missing > 1 else ""
        raise ConfigError(
            f"trainer.replay={run}: {steps} steps are to be replayed, but the rollouts of step {missing} are missing "
            f"({len(recorded)} steps are recorded, the last is {recorded[-1]}){remedy}"
        )
    if baselines and not (folder / "rollouts" / f"{GREEDY.format(1)}.jsonl").is_file():
        raise ConfigError(
            f"trainer.replay={run}: that run played no greedy rollouts, which algo.advantage=remax compares with"
        )


def make_env(env: EnvConfig) -> Env:
    """The environment; a constructor that refuses its arguments is a `ConfigError`."""
    given = " ".join([f"env={env.name}", *(f"env.{key}={value}" for key, value in env.kwargs.items())])
    try:
        with boundary(f"making environment {env.name!r}"):
            return registration.make(env.name, **env.kwargs)
    except EnvError as error:
        if error.error_type not in ("TypeError", "ValueError"):
            raise
        reason = error.__cause__ if error.__cause__ is not None else error
        raise ConfigError(f"{given}: the environment refuses these arguments: {reason}") from None


def split_tasks(env: Env, name: str, split: str) -> Sequence[Task]:
    """The tasks of a split; none at all, or two with one id, is a `ConfigError`."""
    try:
        with boundary(f"tasks({split!r}) of environment {name!r}"):
            tasks = env.tasks(split)
    except EnvError as error:
        if split in SPLITS:
            raise
        raise ConfigError(f"split={split}: {error}. Every environment has {' and '.join(SPLITS)}") from None
    if not tasks:
        raise ConfigError(f"environment {name!r} has no tasks in its split {split!r}")
    ids = [task.id for task in tasks]
    if len(set(ids)) < len(ids):
        twice = Counter(ids).most_common(1)[0][0]
        raise ConfigError(f"environment {name!r}: two tasks of its split {split!r} have the id {twice!r}")
    for task in tasks:
        if isinstance(env, ToolEnv):
            env.check_task(task)
        if task.agent_name is not None and task.agent_name not in agent_loops:
            raise _unknown(
                f"task {task.id!r} of environment {name!r}: agent_name", task.agent_name, agent_loops.names()
            )
    return tasks


def check_batch(config: TrainConfig, train_tasks: int, *, total: int) -> None:
    """A batch larger than the training data would never be full: zero steps."""
    batch = config.data.batch_size
    if batch > train_tasks:
        limit = f" (data.train_size={config.data.train_size} of {total})" if train_tasks < total else ""
        raise ConfigError(
            f"data.batch_size={batch} is larger than the {train_tasks} training tasks of {config.env.name!r}{limit}: "
            f"lower data.batch_size to {train_tasks} or less"
        )


def check_run_dir(run_dir: Path) -> None:
    """Runs can be written below ``trainer.run_dir``, which need not exist."""
    existing = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"trainer.run_dir={str(run_dir)!r}: {existing} is a file; name a folder for the runs")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"trainer.run_dir={str(run_dir)!r}: {existing} cannot be written to; name another folder")


def check_model(model: ModelConfig, rollout: RolloutConfig) -> str:
    """The engine can run, and the model's folder has what it takes.

    That is a configuration, a tokenizer with a chat template, and room for a whole rollout.

    Returns:
        The folder or hub id that is loaded.
    """
    check_engine(rollout)
    where = resolve_model_path(model.path)
    folder = Path(where)
    if not folder.is_dir():
        folder = _hub_files(model)
    config = _read_json(folder / "config.json", f"model={model.path}")
    check_tokenizer_files(folder, what=f"model={model.path}")
    if not _has_chat_template(folder):
        raise ConfigError(
            f"model={model.path}: its tokenizer has no chat template; put chat_template.jinja into {folder}, "
            f"or choose an instruct model"
        )
    if Path(where).is_dir():  # of a hub id only the small files are here
        check_weight_files(folder, what=f"model={model.path}")
    room = config.get("max_position_embeddings")
    longest = rollout.max_prompt_length + rollout.max_response_length
    if isinstance(room, int) and longest > room:
        raise ConfigError(
            f"rollout.max_prompt_length + rollout.max_response_length = {longest} tokens, but model {model.path!r} "
            f"has room for {room} (max_position_embeddings): lower one of them"
        )
    return where


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(_read_json(settings, str(folder)).get("chat_template"))


def _read_json(path: Path, what: str) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what}: {path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{what}: {path} holds a {type(data).__name__}, expected an object")
    return data


def _hub_files(model: ModelConfig) -> Path:
    """The small files of a hub id, fetched into the hub's cache; `ConfigError` for anything that is none."""
    path = Path(model.path)
    siblings = [str(entry) for entry in path.parent.glob("*") if entry.is_dir()] if path.parent.is_dir() else []
    near = did_you_mean(model.path, [*shipped_models(), *siblings])
    expected = f"expected {', '.join(shipped_models())}, a model folder, a run folder or a hub id.{near}"
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", model.path) is None or (siblings and str(path.parent) != "."):
        raise ConfigError(f"model={model.path}: no such folder; {expected}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model.path, revision=model.revision, allow_patterns=list(MODEL_FILES)))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ConfigError(
            f"model={model.path}: no such folder, and not found on the hub ({reason}); {expected}"
        ) from None


def _unknown(key: str, value: str, names: Sequence[str]) -> ConfigError:
    return ConfigError(f"{key}={value}: no such name.{did_you_mean(value, names)} Known: {', '.join(names)}")

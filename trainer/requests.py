"""What the trainer asks the rollout workers to play. Seeds follow from run, step, task and sample alone."""

from __future__ import annotations

from collections.abc import Sequence

from agentgym.loops.base import LoopSampling, derive_seed
from agentgym.runner import RolloutRequest
from agentgym.settings import EnvConfig, RolloutConfig
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.data import Draw
from agentgym.trainer.tasks import TaskRef


def loop_sampling(settings: RolloutConfig, *, seed: int | None, greedy: bool = False) -> LoopSampling:
    """The sampling of one rollout as configured; ``greedy`` overrides the temperature."""
    return LoopSampling(
        max_prompt_length=settings.max_prompt_length,
        max_response_length=settings.max_response_length,
        max_turn_tokens=settings.max_turn_tokens,
        temperature=0.0 if greedy else settings.temperature,
        top_p=1.0 if greedy else settings.top_p,
        top_k=0 if greedy else settings.top_k,
        seed=seed,
    )


def request(
    env: EnvConfig,
    settings: RolloutConfig,
    *,
    key: str,
    task_id: str,
    group: str,
    sample: int,
    split: str,
    env_seed: int,
    sampling: LoopSampling,
) -> RolloutRequest:
    """One request as configured."""
    return RolloutRequest(
        key=key,
        env_id=env.name,
        env_kwargs=env.kwargs,
        task_id=task_id,
        group=group,
        sample=sample,
        split=split,
        seed=env_seed,
        sampling=sampling,
        agent_loop=settings.agent_loop,
        max_turns=env.max_turns,
        max_user_turns=env.max_user_turns,
    )


def training_requests(config: TrainConfig, draws: Sequence[Draw], step: int) -> list[RolloutRequest]:
    """``rollout.n`` samples of each draw, ordered by (draw, sample)."""
    seed = config.trainer.seed
    envs = {member.name: member for member in config.env.members()}
    return [
        _of_draw(
            config,
            envs[draw.env],
            draw,
            step,
            sample,
            loop_sampling(config.rollout, seed=derive_seed(seed, "sample", draw.group, sample)),
        )
        for draw in draws
        for sample in range(config.rollout.n)
    ]


def baseline_requests(config: TrainConfig, draws: Sequence[Draw], step: int) -> list[RolloutRequest]:
    """Each draw once more, greedily: the episode whose score is the baseline of its samples."""
    envs = {member.name: member for member in config.env.members()}
    greedy = loop_sampling(config.rollout, seed=None, greedy=True)
    return [_of_draw(config, envs[draw.env], draw, step, config.rollout.n, greedy) for draw in draws]


def _of_draw(
    config: TrainConfig, env: EnvConfig, draw: Draw, step: int, sample: int, sampling: LoopSampling
) -> RolloutRequest:
    return request(
        env,
        config.rollout,
        key=f"{step}/{draw.env}/{draw.group}/{sample}",
        task_id=draw.task_id,
        group=draw.group,
        sample=sample,
        split="train",
        # One environment seed for the whole group: its samples answer the same prompt.
        env_seed=derive_seed(config.trainer.seed, "env", draw.group) % 2**31,
        sampling=sampling,
    )


def validation_requests(config: TrainConfig, tasks: Sequence[TaskRef], step: int) -> list[RolloutRequest]:
    """Each validation task once, greedily; the same environment seeds at every validation."""
    envs = {member.name: member for member in config.env.members()}
    return [
        request(
            envs[task.env],
            config.rollout,
            key=f"{step}/validation/{task.env}/{task.task_id}",
            task_id=task.task_id,
            group=task.task_id if len(envs) == 1 else f"{task.env}/{task.task_id}",
            sample=0,
            split="validation",
            env_seed=derive_seed("validation", task.task_id) % 2**31,
            sampling=loop_sampling(config.rollout, seed=None, greedy=True),
        )
        for task in tasks
    ]

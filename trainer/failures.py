"""When failed rollouts end a run. A failure is never a reward of 0; too many of them are never training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentgym.errors import ConfigError, EnvError, InfraError
from agentgym.rollout import Rollout
from agentgym.types import RolloutStatus


def check_prompts(rollouts: Sequence[Rollout], max_prompt_length: int) -> None:
    """Raise `ConfigError` where no prompt of a step fits: nothing was asked of the model, so nothing can be learned."""
    if rollouts and all(r.outcome.num_turns == 0 and r.status is RolloutStatus.TRUNCATED_TOKENS for r in rollouts):
        shown = rollouts[0]
        length = len(shown.segments[0].prompt_ids) if shown.segments else 0
        raise ConfigError(
            f"no prompt fits rollout.max_prompt_length={max_prompt_length}: task {shown.task_id} has {length} tokens; "
            f"raise it to at least that"
        )


def check_failures(rollouts: Sequence[Rollout], max_failure_rate: float, *, first_step: bool) -> None:
    """Raise where the failures of one step must stop the run.

    Args:
        rollouts: of one step.
        max_failure_rate: share of them that may fail.
        first_step: a fault of the environment's code stops the first step at once: the user is still there to mend it.

    Raises:
        EnvError: with task and traceback of the first fault of the environment.
        InfraError: too many were lost to the infrastructure.
    """
    failed = [r for r in rollouts if r.status.failed]
    if not failed:
        return
    by_env = [r for r in failed if r.status is RolloutStatus.FAILED_ENV]
    too_many = len(failed) > max_failure_rate * len(rollouts)
    if not too_many and not (first_step and by_env):
        return
    kinds = ", ".join(f"{n} x {kind}" for kind, n in Counter(r.outcome.error_type for r in failed).most_common())
    shown = (by_env or failed)[0]
    message = (
        f"{len(failed)} of {len(rollouts)} rollouts failed ({kinds}); the limit is trainer.max_failure_rate="
        f"{max_failure_rate}{' and, in the first step, no fault of the environment' if first_step and by_env else ''}. "
        f"First: task {shown.task_id}: {shown.outcome.error}"
    )
    if by_env:
        raise EnvError(message, task_id=shown.task_id, error_type=shown.outcome.error_type or "EnvError")
    raise InfraError(message)

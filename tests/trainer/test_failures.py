"""When failed rollouts stop a run."""

from __future__ import annotations

import pytest
from factories import rollout

from agentgym.errors import EnvError, InfraError
from agentgym.rollout import Rollout
from agentgym.trainer.failures import check_failures
from agentgym.types import RolloutStatus


def mixed(good: int, env: int = 0, infra: int = 0) -> list[Rollout]:
    broken = {"error_type": "KeyError", "error": "step raised KeyError: 'x'\nTraceback ..."}
    lost = {"error_type": "InfraError", "error": "sandbox lost"}
    return (
        [rollout(1.0) for _ in range(good)]
        + [rollout(None, status=RolloutStatus.FAILED_ENV, **broken) for _ in range(env)]  # type: ignore[arg-type]
        + [rollout(None, status=RolloutStatus.FAILED_INFRA, **lost) for _ in range(infra)]  # type: ignore[arg-type]
    )


def test_a_fault_of_the_environment_stops_the_first_step_with_its_traceback() -> None:
    with pytest.raises(EnvError, match=r"(?s)1 of 64 .*KeyError.*task task-g.*Traceback") as caught:
        check_failures(mixed(63, env=1), 0.2, first_step=True)
    assert caught.value.task_id == "task-g"


def test_later_the_rate_decides() -> None:
    check_failures(mixed(63, env=1), 0.2, first_step=False)
    check_failures(mixed(8, infra=2), 0.2, first_step=False)
    with pytest.raises(InfraError, match="3 of 10"):
        check_failures(mixed(7, infra=3), 0.2, first_step=False)
    with pytest.raises(EnvError, match=r"4 of 10 .*2 x KeyError, 2 x InfraError"):
        check_failures(mixed(6, env=2, infra=2), 0.2, first_step=False)


def test_lost_infrastructure_does_not_stop_the_first_step_below_the_rate() -> None:
    check_failures(mixed(9, infra=1), 0.2, first_step=True)

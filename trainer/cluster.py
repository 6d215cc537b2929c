"""Where workers live: Ray actors, or this process (``trainer.cluster=inline``). Both give the same futures.

Who waits for whom: the driver submits to every worker of a group, then waits for all futures at once. The first worker
that raises ends the wait: its error (with its traceback) is raised in the driver, which shuts the cluster down, so no
rank stays behind in a collective. A wait that takes longer than its timeout names the group and the method.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from agentgym.errors import AgentGymError, InfraError
from agentgym.trainer.threads import openmp_environment

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""How often a wait looks for a request to stop."""

Result = Future[Any]


class Interrupted(AgentGymError):
    """A wait was given up because the run is asked to stop."""


class Worker(ABC):
    """A handle on one worker object, wherever it lives."""

    @abstractmethod
    def submit(self, method: str, *args: Any) -> Result:
        """Call a method; async methods of one worker run concurrently, others one after the other."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What the workers of a group take.

    Example:
        ``Needs(ranks=2, cpus=1.0, gpus=0.5, room=2)``: two places of two CPUs and one GPU, half of each place taken.
    """

    ranks: int
    """Workers, each in a place of its own."""
    cpus: float
    """Of each worker."""
    gpus: float = 0.0
    """Of each worker; parts of one may be shared."""
    room: int = 1
    """How many workers the place of each rank has room for."""


class Cluster(ABC):
    """Starts workers and ends them."""

    gpus: int = 0
    """GPUs that workers can ask for."""

    @abstractmethod
    def spawn(
        self, worker_class: type, args: tuple[Any, ...], needs: Needs, beside: Sequence[Worker] = ()
    ) -> list[Worker]:
        """Start workers as ``worker_class(rank, *args)``; blocks until they are placed.

        Args:
            needs: how many, and what each takes.
            beside: the workers of another `spawn`, whose places with room these take, rank by rank.
        """

    @abstractmethod
    def release(self, workers: Sequence[Worker]) -> None:
        """End the workers of one `spawn` at once and free their place."""

    @abstractmethod
    def share(self, value: Any) -> Any:
        """Put a large argument where all workers reach it; pass the result to `Worker.submit`."""

    @abstractmethod
    def close(self) -> None:
        """End all workers. Idempotent."""


def wait(
    results: Sequence[Result],
    *,
    what: str,
    timeout: float | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[Any]:
    """Values of all futures, in order.

    Raises:
        InfraError: it took longer than ``timeout`` seconds, or a worker process died.
        Interrupted: ``stop`` became true first.
        Exception: the first error of a worker, as it was raised there.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    pending = set(results)
    while pending:
        done, pending = concurrent.futures.wait(
            pending, timeout=POLL_SECONDS, return_when=concurrent.futures.FIRST_EXCEPTION
        )
        for result in done:
            error = result.exception()
            if error is not None:
                raise _original(error, what)
        if pending and stop is not None and stop():
            raise Interrupted(f"{what} was interrupted")
        if pending and deadline is not None and time.monotonic() > deadline:
            raise InfraError(
                f"{what} did not end within {timeout:.0f} s ({len(pending)} of {len(results)} workers still busy); "
                f"raise trainer.step_timeout if the work is really that long"
            )
    return [result.result() for result in results]


def _original(error: BaseException, what: str) -> BaseException:
    """The error a worker raised, without Ray's wrapping; a dead worker becomes an `InfraError`."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, AgentGymError):
        cause.add_note(f"raised in a worker during {what}:\n{error}")
        return cause
    if type(error).__name__ in ("ActorDiedError", "ActorUnavailableError", "WorkerCrashedError", "RayActorError"):
        return InfraError(f"a worker process died during {what}: {error}")
    return error


class InlineWorker(Worker):
    """A worker object in this process. Async methods run on an event loop in a thread of their own."""

    def __init__(self, worker_class: type, rank: int, args: tuple[Any, ...]) -> None:
        self._object = worker_class(rank, *args)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, method: str, *args: Any) -> Result:
        function = getattr(self._object, method)
        if inspect.iscoroutinefunction(function):
            return asyncio.run_coroutine_threadsafe(function(*args), self._event_loop())
        result: Result = Future()
        try:
            result.set_result(function(*args))
        except BaseException as error:  # noqa: BLE001 - handed on to whoever waits
            result.set_exception(error)
        return result

    def kill(self) -> None:
        close = getattr(self._object, "close", None)
        if close is not None and not inspect.iscoroutinefunction(close):
            close()
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = None

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="agentgym-inline", daemon=True)
            self._thread.start()
        return self._loop


class InlineCluster(Cluster):
    """Everything in this process: easy to debug, one rank per group."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []

    def spawn(
        self, worker_class: type, args: tuple[Any, ...], needs: Needs, beside: Sequence[Worker] = ()
    ) -> list[Worker]:
        if needs.ranks != 1:
            raise AgentGymError(f"trainer.cluster=inline runs one worker, not {needs.ranks}; use trainer.cluster=ray")
        workers: list[Worker] = [InlineWorker(worker_class, 0, args)]
        self._workers.extend(workers)
        return workers

    def release(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            worker.kill()
            self._workers.remove(worker)

    def share(self, value: Any) -> Any:
        return value

    def close(self) -> None:
        self.release(list(self._workers))


class RayWorker(Worker):
    """A Ray actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def submit(self, method: str, *args: Any) -> Result:
        result: Result = getattr(self.actor, method).remote(*args).future()
        return result

    def kill(self) -> None:
        import ray

        with contextlib.suppress(ValueError):  # already gone
            ray.kill(self.actor)


class RayCluster(Cluster):
    """Ray actors in placement groups; connects to ``RAY_ADDRESS`` or starts Ray on this machine.

    Args:
        cpus: logical CPUs to declare when Ray is started here: at least what all groups ask for, so that no bundle
            waits for ever on a small machine.
        threads: OpenMP threads of each worker (Ray's own default is 1).
        plugins: shipped to every worker through its environment.
    """

    def __init__(self, *, cpus: int, threads: int, plugins: Sequence[str]) -> None:
        import ray

        self._places: list[tuple[list[Worker], Any]] = []
        """Workers and their placement group."""
        self._started = not ray.is_initialized()
        if self._started:
            self._start(cpus, threads, plugins)
        self.gpus = int(ray.cluster_resources().get("GPU", 0))

    def _start(self, cpus: int, threads: int, plugins: Sequence[str]) -> None:
        import ray

        # The working directory is importable in workers as it is for the command line.
        path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {
            **openmp_environment(threads),
            "AGENTGYM_PLUGINS": ",".join(plugins),
            "PYTHONPATH": path,
        }
        remote = os.environ.get("RAY_ADDRESS")
        local: dict[str, Any] = {} if remote else {"num_cpus": cpus, "include_dashboard": False}
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Ray would run workers at a low priority, behind whatever else the machine does.
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(
            address=remote,
            logging_level=logging.ERROR,
            log_to_driver=False,
            runtime_env={"env_vars": environment},
            **local,
        )

    def spawn(
        self, worker_class: type, args: tuple[Any, ...], needs: Needs, beside: Sequence[Worker] = ()
    ) -> list[Worker]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if beside:
            (group,) = [group for workers, group in self._places if workers is beside]
        else:
            group = _reserve(needs)
        actor_class = ray.remote(worker_class)
        workers: list[Worker] = []
        for rank in range(needs.ranks):
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=rank, placement_group_capture_child_tasks=False
            )
            made = actor_class.options(num_cpus=needs.cpus, num_gpus=needs.gpus, scheduling_strategy=strategy)
            actor = made.remote(rank, *args)
            workers.append(RayWorker(actor))
        self._places.append((workers, group))
        return workers

    def release(self, workers: Sequence[Worker]) -> None:
        from ray.util.placement_group import remove_placement_group

        for worker in workers:
            worker.kill()
        for place in [place for place in self._places if place[0] is workers]:
            self._places.remove(place)
            if all(group is not place[1] for _, group in self._places):
                remove_placement_group(place[1])

    def share(self, value: Any) -> Any:
        import ray

        return ray.put(value)

    def close(self) -> None:
        import ray

        if not ray.is_initialized():
            return
        for workers, _ in list(self._places):
            self.release(workers)
        if self._started:
            ray.shutdown()


def _reserve(needs: Needs) -> Any:
    """A placement group with a bundle for each rank. Raises `InfraError` where there is no room for them."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    bundle = {"CPU": needs.cpus * needs.room} | ({"GPU": needs.gpus * needs.room} if needs.gpus else {})
    group = placement_group([bundle] * needs.ranks, strategy="PACK")
    ready, _ = ray.wait([group.ready()], timeout=120)
    if not ready:
        remove_placement_group(group)
        raise InfraError(
            f"no place for {needs.ranks} x {bundle} within 120 s; the cluster has {ray.cluster_resources()}, "
            f"of which {ray.available_resources()} are free"
        )
    return group

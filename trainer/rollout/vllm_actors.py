"""vLLM engines in Ray actors, and handles on them for the router."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from agentgym.errors import AgentGymError, InfraError
from agentgym.generation import Generation, SamplingParams
from agentgym.trainer.rollout.vllm_engine import VllmEngine
from agentgym.trainer.rollout.vllm_setup import EngineOptions

CLOSE_SECONDS = 20.0
"""How long an engine may take to stop before it is killed."""


class VllmActor:
    """A `VllmEngine` in a process of its own; requests have names, so that they can be aborted."""

    def __init__(self, options: EngineOptions) -> None:
        self._engine = VllmEngine(options)
        self._requests: dict[int, asyncio.Task[Generation]] = {}

    async def ready(self) -> list[int]:
        """Start; returns the ids of the processes that hold the model."""
        await self._engine.ready()
        return self._engine.worker_pids

    async def generate(
        self, number: int, prompt_ids: Sequence[int], sampling: SamplingParams, session_id: str
    ) -> Generation | None:
        """One turn under a number; None if it was aborted."""
        task = asyncio.create_task(self._engine.generate(prompt_ids, sampling, session_id))
        self._requests[number] = task
        try:
            return await task
        except asyncio.CancelledError:
            return None
        finally:
            del self._requests[number]

    async def abort(self, number: int) -> None:
        """Abort the request of that number, if it is still there."""
        if number in self._requests:
            self._requests[number].cancel()

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> int | None:
        """See `VllmEngine.update_weights`; returns the checksum of what vLLM took."""
        await self._engine.update_weights(weights, version)
        return self._engine.checksum

    async def rest(self) -> None:
        """See `VllmEngine.rest`."""
        await self._engine.rest()

    async def transfer(self, method: str, arguments: Mapping[str, Any]) -> None:
        """See `VllmEngine.transfer`; the trainer's rank 0 calls it."""
        await self._engine.transfer(method, arguments)

    async def took(self, version: int) -> None:
        """See `VllmEngine.took`."""
        await self._engine.took(version)

    async def ping(self) -> None:
        """See `VllmEngine.ping`."""
        await self._engine.ping()

    async def running(self) -> int:
        """Requests that vLLM works on."""
        return self._engine.running()

    async def aclose(self) -> None:
        """Stop vLLM."""
        await self._engine.aclose()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a trainer process computes."""

    node: str
    """Ray's id of the machine."""
    device: str
    """The GPU, as ``CUDA_VISIBLE_DEVICES`` names it."""


class RayEngines:
    """Makes the engines of a router as Ray actors. New weights go into Ray's object store once for all of them.

    Args:
        options: of each engine.
        gpus: GPUs that each asks Ray for; 0 on the CPU, and where it uses those of the trainer.
        places: of each engine, the trainer's places whose GPUs it uses, all on one machine; empty: wherever Ray says.
    """

    def __init__(self, options: EngineOptions, *, gpus: float, places: Sequence[Sequence[Place]] = ()) -> None:
        self.options = options
        self.gpus = gpus
        self.places = places
        self._shared: tuple[Mapping[str, Tensor], Any] | None = None

    def __call__(self, number: int) -> RayEngine:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options, where = self.options, {}
        if self.places:
            mine = self.places[number]
            options = replace(options, devices=[place.device for place in mine])
            where = {"scheduling_strategy": NodeAffinitySchedulingStrategy(mine[0].node, soft=False)}
        actor_class: Any = ray.remote(VllmActor)
        # An engine must be gone before its place is given to the next one, so none is restarted by Ray.
        made = actor_class.options(num_cpus=1, num_gpus=self.gpus, max_restarts=0, **where)
        return RayEngine(made.remote(options), self)

    def share(self, weights: Mapping[str, Tensor]) -> Any:
        """A reference to the weights, the same for the same object."""
        import ray

        if self._shared is None or self._shared[0] is not weights:
            self._shared = (weights, ray.put(weights))
        return self._shared[1]


class RayEngine:
    """A handle on a `VllmActor`; it starts at once."""

    def __init__(self, actor: Any, factory: RayEngines) -> None:
        self.actor = actor
        self.worker_pids: list[int] = []
        self.checksum: int | None = None
        self.address = actor
        self._factory = factory
        self._ready = actor.ready.remote()
        self._number = 0

    async def ready(self) -> None:
        self.worker_pids = await self._answer(self._ready, "start")

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, session_id: str) -> Generation:
        self._number += 1
        number = self._number
        answer = self.actor.generate.remote(number, list(prompt_ids), sampling, session_id)
        try:
            generation: Generation | None = await self._answer(answer, "generate")
        except asyncio.CancelledError:
            self.actor.abort.remote(number)
            raise
        if generation is None:
            raise InfraError("the vllm engine dropped a request")
        return generation

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        reference = self._factory.share(weights)
        self.checksum = await self._answer(self.actor.update_weights.remote(reference, version), "take new weights")

    async def rest(self) -> None:
        await self._answer(self.actor.rest.remote(), "go to sleep")

    async def took(self, version: int) -> None:
        await self._answer(self.actor.took.remote(version), "take new weights")

    async def ping(self) -> None:
        await self._answer(self.actor.ping.remote(), "answer")

    async def running(self) -> int:
        """Requests that vLLM works on."""
        count: int = await self._answer(self.actor.running.remote(), "answer")
        return count

    async def aclose(self) -> None:
        with suppress(InfraError, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._answer(self.actor.aclose.remote(), "stop")
        self.kill()

    def kill(self) -> None:
        """End the actor; vLLM's processes follow it."""
        import ray

        with suppress(ValueError):  # already gone
            ray.kill(self.actor)

    async def _answer(self, reference: Any, what: str) -> Any:
        """The value, or the error as it was raised in the actor; a lost actor is an `InfraError`.

        Ray's own future is shielded: Ray does not expect anyone to cancel it.
        """
        import ray.exceptions

        future = asyncio.wrap_future(reference.future())
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(future)
        except ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, AgentGymError):
                raise cause from None
            raise InfraError(f"the vllm engine could not {what}: {error}") from None
        except ray.exceptions.RayError as error:
            raise InfraError(f"the vllm engine is lost, it could not {what}: {type(error).__name__}: {error}") from None

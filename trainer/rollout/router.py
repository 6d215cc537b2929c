"""Several engines as one: who serves which session, what happens when an engine dies, and one update for all.

Concurrency, all in one event loop:

* A request waits while an update is on, then for an engine that is ready; it is unblocked by the end of the update, by
  the start of an engine, or by its deadline. It holds no lock while the engine works.
* An update waits for the requests inside, then for every ready engine to take the weights. An engine that starts
  meanwhile takes the newest weights before it becomes ready.
* One task per engine keeps it alive: it starts the engine, asks for its health now and then (and at once after a failed
  request), kills it when it does not answer, and starts it anew with the current weights.
* Closing ends the keepers first, then the engines; requests that wait fail with `InfraError`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from agentgym.errors import AgentGymError, ConfigError, InfraError
from agentgym.generation import Generation, SamplingParams
from agentgym.trainer.rollout.counters import COUNTERS, count_turn
from agentgym.trainer.rollout.sampling import check_params
from agentgym.trainer.rollout.update_lock import UpdateLock

logger = logging.getLogger(__name__)

MAX_STARTS = 3
"""An engine that fails this often in a row, without having served in between, is given up."""

SLACK = 2
"""A session leaves its engine when that has this many more requests than half as many again as the least busy one."""


class EngineHandle(Protocol):
    """One engine, wherever it lives. Every method raises `InfraError` when the engine is lost."""

    async def ready(self) -> None:
        """Wait until it can serve. Idempotent."""

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, session_id: str) -> Generation:
        """One turn; cancelling it aborts the request."""

    checksum: int | None
    """Of the weights that it took last."""

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take new weights in place."""

    address: Any
    """What the trainer's processes call to hand over weights: a Ray actor; None where there is none."""

    async def took(self, version: int) -> None:
        """The trainer has handed over the weights of this version."""

    async def rest(self) -> None:
        """Free the GPU for the trainer; the next call wakes it."""

    async def ping(self) -> None:
        """Answer."""

    async def aclose(self) -> None:
        """Stop. Idempotent."""

    def kill(self) -> None:
        """End it at once, with all its processes."""


@dataclass(slots=True, eq=False)
class _Slot:
    """One place for an engine, and the engine that is there now."""

    number: int
    handle: EngineHandle | None = None
    load: int = 0
    """Requests that it works on."""
    started: bool = False
    """Whether an engine ever became ready here."""
    served: bool = False
    """Whether this engine has answered a request."""
    failures: int = 0
    """Engines in a row that did not start, or were lost before they had answered a request."""
    given_up: str | None = None
    """Why no further start is tried."""
    suspected: asyncio.Event = field(default_factory=asyncio.Event)
    """A request failed: look after the engine now."""
    condemned: str | None = None
    """Why the engine must be replaced although it may answer."""


class EngineRouter:
    """An `agentgym.trainer.rollout.engines.Engine` made of several.

    A session stays with its engine, where its history is in the prefix cache, unless that engine is much busier than
    another. A request whose engine fails is tried once more, on another engine if there is one.

    Args:
        make: a new engine for a place, counted from 0; it may begin to start at once.
        count: number of engines.
        request_timeout: seconds for one turn, waiting included.
        start_timeout: seconds for an engine to start and take the current weights.
        health_every: seconds between two questions for an engine's health.
        health_timeout: seconds within which a healthy engine answers.
    """

    def __init__(
        self,
        make: Callable[[int], EngineHandle],
        count: int,
        *,
        request_timeout: float = 600.0,
        start_timeout: float = 600.0,
        health_every: float = 10.0,
        health_timeout: float = 60.0,
    ) -> None:
        self.version = 0
        self.checksum: int | None = None
        self._make = make
        self._request_timeout = request_timeout
        self._start_timeout = start_timeout
        self._health_every = health_every
        self._health_timeout = health_timeout
        self._slots = [_Slot(number, handle=make(number)) for number in range(count)]
        self._ready: set[int] = set()
        self._changed = asyncio.Condition()
        """Notified when an engine becomes ready or is given up, and when the router closes."""
        self._behind: set[int] = set()
        """Engines that started after the trainer had handed weights over: they serve after the next transfer."""
        self._handed_over = False
        """Whether the newest weights came from the trainer's processes, so that they are not here to give again."""
        self._transfer: AbstractAsyncContextManager[None] | None = None
        self._receivers: list[_Slot] = []
        self._homes: dict[str, int] = {}
        self._lock = UpdateLock()
        self._weights: Mapping[str, Tensor] | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._begun = False
        self._closed = False
        self._stats = dict.fromkeys((*COUNTERS, "retries", "restarts", "moves"), 0.0)

    # What callers use

    async def ready(self) -> None:
        """Start the engines and wait for all of them; later on wait until there is any.

        Raises:
            InfraError: no engine could be started.
        """
        self._keep()
        async with self._changed:
            await self._changed.wait_for(self._usable if self._begun else self._settled)
        self._begun = True
        self._check_alive()

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, session_id: str) -> Generation:
        """One turn on the session's engine; see `agentgym.generation.Generator`.

        Raises:
            ConfigError: a sampling parameter or the prompt is out of range.
            SessionError: the session has a turn in flight.
            InfraError: it failed on two engines, took too long, or there is no engine any more.
        """
        check_params(sampling)
        self._keep()
        try:
            async with asyncio.timeout(self._request_timeout), self._lock.request():
                generation = await self._generate(prompt_ids, sampling, session_id)
        except TimeoutError:
            raise InfraError(
                f"session {session_id!r}: a turn of at most {sampling.max_tokens} tokens did not end within "
                f"{self._request_timeout:.0f} s; raise rollout.vllm.request_timeout if it is really that long"
            ) from None
        count_turn(self._stats, len(prompt_ids), generation)
        return generation

    async def _generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, session_id: str) -> Generation:
        slot = await self._choose(session_id, avoid=None)
        try:
            return await self._ask(slot, prompt_ids, sampling, session_id)
        except InfraError as error:
            logger.warning("engine %d failed; session %s tries again: %s", slot.number, session_id, error)
            self._stats["retries"] += 1
        other = await self._choose(session_id, avoid=slot.number)
        return await self._ask(other, prompt_ids, sampling, session_id)

    async def _ask(
        self, slot: _Slot, prompt_ids: Sequence[int], sampling: SamplingParams, session_id: str
    ) -> Generation:
        assert slot.handle is not None
        slot.load += 1
        try:
            generation = await slot.handle.generate(prompt_ids, sampling, session_id)
        except InfraError:
            self._suspect(slot)
            raise
        finally:
            slot.load -= 1
        slot.served = True
        return generation

    async def _choose(self, session_id: str, avoid: int | None) -> _Slot:
        """The engine for a session: its own, unless that is not ready, to be avoided, or much busier than another."""
        async with self._changed:
            await self._changed.wait_for(self._usable)
        self._check_alive()
        ready = [self._slots[number] for number in sorted(self._ready)]
        candidates = [slot for slot in ready if slot.number != avoid] or ready
        best = min(candidates, key=lambda slot: slot.load)
        home = self._homes.get(session_id)
        for slot in candidates:
            if slot.number == home and slot.load <= 1.5 * best.load + SLACK:
                return slot
        if home is not None:
            self._stats["moves"] += 1
        self._homes[session_id] = best.number
        return best

    async def release(self, session_id: str) -> None:
        """Forget where the session was served."""
        self._homes.pop(session_id, None)

    def begin_batch(self, keys: Sequence[str], limit: int) -> None:
        """Nothing to arrange: requests are served as they come."""

    def finish(self, key: str) -> None:
        """Forget where the session was served."""
        self._homes.pop(key, None)

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Give all engines new weights; no request is served between the first engine and the last.

        An engine that fails at it is started anew, with the new weights.

        Raises:
            ConfigError: names or shapes do not fit the model; nothing is changed.
            InfraError: there is no engine any more.
        """
        self._keep()
        await self.ready()
        async with self._lock.update():
            before = self._weights, self.version
            # From now on an engine that starts takes these: none becomes ready with older ones.
            self._weights, self.version, self._handed_over = weights, version, False
            slots = [self._slots[number] for number in sorted(self._ready)]
            results = await asyncio.gather(*(self._update(slot, weights, version) for slot in slots))
            for slot, result in zip(slots, results, strict=True):
                if isinstance(result, ConfigError):
                    self._weights, self.version = before
                    raise result
                if result is None:
                    assert slot.handle is not None
                    self.checksum = slot.handle.checksum
                else:
                    slot.condemned = f"it did not take the weights of version {version}: {result}"
                    self._suspect(slot)
        self._check_alive()

    async def _update(self, slot: _Slot, weights: Mapping[str, Tensor], version: int) -> AgentGymError | None:
        assert slot.handle is not None
        try:
            await slot.handle.update_weights(weights, version)
        except AgentGymError as error:
            return error
        return None

    async def begin_transfer(self) -> list[Any]:
        """Hold requests back for an update that the trainer's processes make themselves, until `end_transfer`.

        Returns:
            The addresses of the engines to give weights to, also of those that wait for them since they were lost.
        """
        self._keep()
        async with self._changed:
            await self._changed.wait_for(self._settled)
        update = self._lock.update()
        await update.__aenter__()
        self._transfer, self._handed_over = update, True
        self._receivers = [self._slots[number] for number in sorted(self._ready | self._behind)]
        return [slot.handle.address for slot in self._receivers if slot.handle is not None]

    async def end_transfer(self, version: int | None) -> None:
        """The engines have the weights of ``version``; None: it failed, and they are started anew."""
        assert self._transfer is not None
        try:
            for slot in self._receivers:
                problem = "the transfer of weights failed" if version is None else await self._took(slot, version)
                if problem is not None:
                    slot.condemned = problem
                    self._suspect(slot)
                elif slot.number in self._behind:
                    self._behind.discard(slot.number)
                    await self._admit(slot)
            if version is not None:
                self._weights, self.version, self.checksum = None, version, None
        finally:
            await self._transfer.__aexit__(None, None, None)
            self._transfer = None

    async def _took(self, slot: _Slot, version: int) -> str | None:
        assert slot.handle is not None
        try:
            await slot.handle.took(version)
        except AgentGymError as error:
            return str(error)
        return None

    async def rest(self) -> None:
        """Let engines free the GPUs that they share with the trainer; the next request or update wakes them."""
        handles = [slot.handle for slot in self._slots if slot.number in self._ready and slot.handle is not None]
        await asyncio.gather(*(handle.rest() for handle in handles))

    def stats(self) -> dict[str, float]:
        """Counters since the start: tokens, retried requests, restarted engines, sessions that changed the engine."""
        return dict(self._stats)

    @property
    def handles(self) -> list[EngineHandle | None]:
        """The engines; None where one is being started."""
        return [slot.handle for slot in self._slots]

    async def aclose(self) -> None:
        """Stop all engines. Idempotent."""
        self._closed = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        async with self._changed:
            self._changed.notify_all()
        handles = [slot.handle for slot in self._slots if slot.handle is not None]
        await asyncio.gather(*(handle.aclose() for handle in handles), return_exceptions=True)
        for handle in handles:
            handle.kill()

    # Keeping engines alive

    def _keep(self) -> None:
        if self._closed:
            raise InfraError("the engines are closed")
        if not self._keepers:
            self._keepers = [asyncio.create_task(self._keeper(slot)) for slot in self._slots]

    def _usable(self) -> bool:
        """Whether there is an engine to ask, or no hope for one."""
        return self._closed or bool(self._ready) or not self._hopeful()

    def _settled(self) -> bool:
        """Whether no engine is being started."""
        known = self._ready | self._behind
        return self._closed or all(slot.number in known or slot.given_up is not None for slot in self._slots)

    def _hopeful(self) -> bool:
        """Whether some engine is ready, or may become so by itself."""
        return any(slot.given_up is None and slot.number not in self._behind for slot in self._slots)

    def _check_alive(self) -> None:
        if self._closed:
            raise InfraError("the engines are closed")
        if self._hopeful():
            return
        if self._behind:
            raise InfraError(
                f"every engine was lost since the weights of version {self.version} were handed over, and new ones get "
                "weights at the next update only: resume the run"
            )
        raise InfraError(f"no engine could be started: {self._slots[0].given_up}")

    async def _keeper(self, slot: _Slot) -> None:
        """Keep one place filled with a healthy engine."""
        while slot.given_up is None:
            problem = await self._start(slot)
            if problem is None:
                if self._handed_over:
                    self._behind.add(slot.number)
                    async with self._changed:
                        self._changed.notify_all()
                else:
                    await self._admit(slot)
                problem = await self._watch(slot)
                self._behind.discard(slot.number)
                self._stats["restarts"] += 1
                logger.warning("engine %d is lost and started anew: %s", slot.number, problem)
            self._ready.discard(slot.number)
            slot.failures = 0 if slot.served else slot.failures + 1
            if slot.handle is not None:
                slot.handle.kill()
            slot.handle, slot.served, slot.condemned = None, False, None
            if slot.failures >= MAX_STARTS or not slot.started:
                slot.given_up = problem
                async with self._changed:
                    self._changed.notify_all()

    async def _start(self, slot: _Slot) -> str | None:
        """Start the engine, with the newest weights. Returns what went wrong."""
        if slot.handle is None:
            slot.handle = self._make(slot.number)
        try:
            async with asyncio.timeout(self._start_timeout):
                await slot.handle.ready()
                taken = 0
                while self._weights is not None and taken != self.version:
                    taken = self.version
                    await slot.handle.update_weights(self._weights, taken)
        except TimeoutError:
            return (
                f"engine {slot.number} did not start within {self._start_timeout:.0f} s; "
                f"raise rollout.vllm.start_timeout if the model is really that large"
            )
        except AgentGymError as error:
            return str(error)
        slot.started = True
        return None

    async def _admit(self, slot: _Slot) -> None:
        """Let requests have the engine."""
        self._ready.add(slot.number)
        async with self._changed:
            self._changed.notify_all()

    async def _readmit(self, slot: _Slot) -> None:
        """Let requests have an engine that has answered, unless it serves anyway or something happened meanwhile."""
        serves = slot.number in self._ready | self._behind
        if not serves and slot.condemned is None and not slot.suspected.is_set():
            await self._admit(slot)

    def _suspect(self, slot: _Slot) -> None:
        """No requests for the engine until its keeper has heard from it."""
        self._ready.discard(slot.number)
        slot.suspected.set()

    async def _watch(self, slot: _Slot) -> str:
        """Ask for the engine's health until it does not answer. Returns the reason."""
        assert slot.handle is not None
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._health_every):
                    await slot.suspected.wait()
            slot.suspected.clear()
            if slot.condemned is not None:
                return slot.condemned
            try:
                async with asyncio.timeout(self._health_timeout):
                    await slot.handle.ping()
            except TimeoutError:
                return f"it did not answer within {self._health_timeout:.0f} s"
            except AgentGymError as error:
                return str(error)
            await self._readmit(slot)

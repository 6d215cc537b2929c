"""The `vllm` engine: one vLLM ``AsyncLLM`` behind the contract of all engines."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from torch import Tensor

from agentgym.errors import ConfigError, EnvError, InfraError, SessionError, boundary
from agentgym.generation import Generation, SamplingParams
from agentgym.trainer.rollout.counters import COUNTERS, count_turn
from agentgym.trainer.rollout.sampling import check_params
from agentgym.trainer.rollout.update_lock import UpdateLock
from agentgym.trainer.rollout.vllm_setup import (
    EngineOptions,
    engine_arguments,
    environment,
    quiet,
    silent_statistics,
)
from agentgym.trainer.rollout.weights import Shapes, checksum, shared_file


class VllmEngine:
    """An `agentgym.trainer.rollout.engines.Engine` around vLLM.

    vLLM computes in a process of its own, which ends with this one. Requests are token ids in, token ids and
    log-probs of the sampled distribution out. Its prefix cache keeps what sessions have in common, and a session's
    history between its turns, for as long as there is room; so there is nothing to `release`.

    An update waits for the requests in flight (they end under the old weights), takes the new weights in place, empties
    the prefix cache, and only then lets requests in again.

    One event loop uses an engine; `start` and everything after it runs there.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.version = 0
        self.address: Any = None
        self.checksum: int | None = None
        """Of the weights that vLLM took last; None before the first update."""
        self._llm: Any = None
        self._starting: asyncio.Task[None] | None = None
        self._waking = asyncio.Lock()
        self._asleep = False
        self._lock = UpdateLock()
        self._shapes: Shapes | None = None
        self._closed = False
        self._open: dict[str, asyncio.Task[Any]] = {}
        """Who asks for a session's turn."""
        self._running: set[asyncio.Task[Generation]] = set()
        self._numbers = itertools.count()
        self._stats = dict.fromkeys(COUNTERS, 0.0)
        self.worker_pids: list[int] = []
        """Processes that hold the model."""

    @property
    def closed(self) -> bool:
        """Whether `aclose` was called."""
        return self._closed

    async def ready(self) -> None:
        """Start vLLM and load the model, unless that is done; wake it if it sleeps.

        Raises:
            InfraError: it did not start, or was closed.
        """
        if self._closed:
            raise InfraError("the vllm engine is closed: make a new one")
        if self._starting is None:
            self._starting = asyncio.create_task(self._launch())
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        # Whoever is cancelled here does not stop the start: nobody would know of the process.
        await asyncio.shield(self._starting)
        async with self._waking:
            if self._asleep:
                async with self._foreign("waking up"):
                    await self._llm.wake_up()
                self._asleep = False

    async def _launch(self) -> None:
        # In a thread: vLLM blocks until its process has loaded the model.
        await asyncio.to_thread(self._start)
        async with self._foreign("starting"):
            self.worker_pids = await self._rpc("agentgym_ping")

    def _start(self) -> None:
        self._shapes = Shapes.read(self.options.model, self.options.revision)
        arguments = engine_arguments(self.options, self._shapes.config)
        with environment(self.options), quiet(self.options):
            try:
                with boundary("starting vLLM"):
                    from vllm.config import WeightTransferConfig
                    from vllm.engine.arg_utils import AsyncEngineArgs
                    from vllm.v1.engine.async_llm import AsyncLLM

                    if self.options.transfer is not None:
                        arguments["weight_transfer_config"] = WeightTransferConfig(backend=self.options.transfer)
                    self._llm = AsyncLLM.from_engine_args(
                        AsyncEngineArgs(**arguments), stat_loggers=[silent_statistics()]
                    )
            except EnvError as error:
                raise InfraError(
                    f"{error}\nrollout.vllm.log_level=info shows what vLLM logs; under Ray that is in Ray's log folder"
                ) from error

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, session_id: str) -> Generation:
        """Sample one turn; see `agentgym.generation.Generator`. Cancelling it aborts the request in vLLM.

        Raises:
            ConfigError: a sampling parameter or the prompt is out of range.
            SessionError: the session has a turn in flight.
            InfraError: the engine died or was closed.
        """
        check_params(sampling)
        await self.ready()
        self._check_prompt(prompt_ids, session_id)
        before = self._open.get(session_id)
        if before is not None and not before.cancelling():
            raise SessionError(f"session {session_id!r} has a turn in flight: await it before the next one")
        if before is not None:
            await asyncio.wait([before])
        task = asyncio.current_task()
        assert task is not None
        self._open[session_id] = task
        try:
            async with self._lock.request(), self._foreign("generating"):
                request = asyncio.create_task(self._request(prompt_ids, sampling))
                self._running.add(request)
                try:
                    return await request
                except asyncio.CancelledError:
                    if self._closed and not task.cancelling():
                        raise InfraError("the vllm engine was closed") from None
                    raise
                finally:
                    self._running.discard(request)
        finally:
            self._open.pop(session_id, None)

    async def _request(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        prompt = list(map(int, prompt_ids))
        limit = min(sampling.max_tokens, self.options.max_length - len(prompt))
        params = vllm_params(sampling, limit)
        version, result = self.version, None
        async for output in self._llm.generate({"prompt_token_ids": prompt}, params, str(next(self._numbers))):
            result = output
        if result is None or not result.outputs or result.outputs[0].finish_reason not in ("stop", "length"):
            raise InfraError("vLLM ended a request without an answer")
        done = result.outputs[0]
        ids = list(done.token_ids)
        generation = Generation(
            token_ids=ids,
            logprobs=sampled_logprobs(done.logprobs, len(ids)),
            finish_reason=done.finish_reason,
            weight_version=version,
            cached_tokens=int(result.num_cached_tokens or 0),
            preemptions=int(result.metrics.num_preemptions),
        )
        count_turn(self._stats, len(prompt), generation)
        return generation

    async def release(self, session_id: str) -> None:
        """Nothing is kept under the session's name: vLLM's prefix cache makes room by itself."""

    def begin_batch(self, keys: Sequence[str], limit: int) -> None:
        """Nothing to arrange: vLLM admits requests as they come."""

    def finish(self, key: str) -> None:
        """Nothing is kept under the key."""

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take new weights: turns in flight end under the old ones, later ones start under the new ones.

        Raises:
            ConfigError: names or shapes do not fit the model; nothing is changed.
            InfraError: the engine died, was closed, or took other bytes than were sent.
        """
        await self.ready()
        assert self._shapes is not None
        self._shapes.check(weights)
        weights = self._shapes.untied(weights)
        async with self._lock.update(), self._foreign("taking new weights"):
            with shared_file(weights) as path:
                taken = set(await self._rpc("agentgym_load", path))
            await self._empty_cache()
            expected = await asyncio.to_thread(checksum, weights)
            if taken != {expected}:
                raise InfraError(f"the engine took weights of checksum {taken}, {expected} was sent")
            self.checksum, self.version = expected, version

    async def _empty_cache(self) -> None:
        if not await self._llm.reset_prefix_cache():
            raise InfraError("vLLM did not empty its prefix cache: requests are still running")

    async def rest(self) -> None:
        """Give the GPU's memory to the trainer until the next request or update; nothing on a GPU of its own."""
        if not self.options.colocated or self._llm is None:
            return
        async with self._lock.update(), self._waking, self._foreign("going to sleep"):
            if not self._asleep:
                await self._llm.sleep(level=1)
                self._asleep = True

    async def transfer(self, method: str, arguments: Mapping[str, Any]) -> None:
        """Call a method of vLLM's weight transfer on every worker: the trainer's side drives it.

        Whoever does so keeps requests away, and says `took` at the end.
        """
        await self.ready()
        async with self._foreign(f"transferring weights ({method})"):
            await self._llm.collective_rpc(method, kwargs=dict(arguments))

    async def took(self, version: int) -> None:
        """The weights that were transferred are complete, and of this version."""
        async with self._lock.update(), self._foreign("taking new weights"):
            await self._empty_cache()
            self.version, self.checksum = version, None

    async def ping(self) -> None:
        """Raise `InfraError` if the engine is dead; waits until it is between two steps."""
        if self._llm is None or self._closed:
            raise InfraError("the vllm engine is not running")
        async with self._foreign("answering"):
            await self._rpc("agentgym_ping")

    def running(self) -> int:
        """Requests that vLLM works on."""
        return 0 if self._llm is None else int(self._llm.get_num_unfinished_requests())

    def stats(self) -> dict[str, float]:
        """Requests and tokens since the engine was made."""
        return dict(self._stats)

    async def aclose(self) -> None:
        """Stop vLLM; requests that wait fail with `InfraError`. Idempotent."""
        self._closed = True
        for task in self._running:
            task.cancel()
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        llm, self._llm = self._llm, None
        if llm is not None:
            if llm.output_handler is not None:  # else it reports the end of vLLM's process as a failure
                llm.output_handler.cancel()
                await asyncio.wait({llm.output_handler})
            # On the CPU there is nothing to release; vLLM's default is to wait five seconds.
            await asyncio.to_thread(llm.shutdown, None if self.options.gpu else 0.5)

    def kill(self) -> None:
        """End vLLM's processes at once."""
        for pid in self.worker_pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `WorkerExtension` on every worker."""
        results: list[Any] = await self._llm.collective_rpc(method, args=arguments)
        return results

    @asynccontextmanager
    async def _foreign(self, what: str) -> AsyncIterator[None]:
        """What vLLM raises becomes an `InfraError`."""
        if self._llm is None:
            raise InfraError("the vllm engine is closed: make a new one")
        try:
            with boundary(f"vLLM while {what}"):
                yield
        except EnvError as error:
            raise InfraError(str(error)) from error.__cause__

    def _check_prompt(self, prompt: Sequence[int], session_id: str) -> None:
        assert self._shapes is not None
        if not len(prompt):
            raise ConfigError(f"session {session_id!r}: the prompt is empty; expected at least 1 token")
        low, high, vocabulary = min(prompt), max(prompt), self._shapes.vocabulary
        if low < 0 or high >= vocabulary:
            raise ConfigError(
                f"session {session_id!r}: the prompt has ids from {low} to {high}, the model knows "
                f"0 to {vocabulary - 1}: tokenizer and model do not belong together"
            )
        if len(prompt) + 1 > self.options.max_length:
            raise ConfigError(
                f"session {session_id!r}: a prompt of {len(prompt)} tokens leaves no room for another in "
                f"max_length={self.options.max_length}: end the rollout, or raise max_length"
            )


def vllm_params(sampling: SamplingParams, limit: int) -> Any:
    """vLLM's parameters for a request of at most ``limit`` tokens.

    Only the ids and strings of the request end it; log-probs are asked for the sampled token alone.
    """
    import vllm
    from vllm.sampling_params import RequestOutputKind

    if "" in sampling.stop:
        raise ConfigError(f"stop={list(sampling.stop)}: an empty stop string would end every turn; leave it out")
    return vllm.SamplingParams(
        max_tokens=limit,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=None if sampling.seed is None else sampling.seed % 2**63,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def sampled_logprobs(flat: Any, count: int) -> list[float]:
    """Log-probs of the ``count`` sampled tokens: the first entry of each position."""
    if len(flat.start_indices) < count:
        raise InfraError(f"vLLM gave log-probs for {len(flat.start_indices)} of {count} tokens")
    return [float(flat.logprobs[start]) for start in flat.start_indices[:count]]

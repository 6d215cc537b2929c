"""The embedded rollout engine: continuous batching for Hugging Face causal LMs with full attention, on CPU or GPU."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentgym.errors import AgentGymError, ConfigError, InfraError, SessionError, boundary
from agentgym.generation import Generation, SamplingParams
from agentgym.trainer.rollout.decoder import Decoder
from agentgym.trainer.rollout.gate import Gate
from agentgym.trainer.rollout.probe import check_model
from agentgym.trainer.rollout.sampling import check_params, uniforms
from agentgym.trainer.rollout.slots import Turn
from agentgym.trainer.rollout.weights import Shapes
from agentgym.trainer.threads import one_thread

GATHER_SECONDS = 0.001
"""How long an idle engine waits for another request after each: one forward for all is cheaper than one for each."""


@dataclass(slots=True, eq=False)
class _Ticket:
    """A turn and the future of its caller."""

    turn: Turn
    future: Future[Generation] = field(default_factory=Future)

    def fail(self, error: AgentGymError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class _Update:
    """New weights and the future of who brings them."""

    weights: Mapping[str, Tensor]
    version: int
    future: Future[None] = field(default_factory=Future)


class TorchEngine:
    """An `agentgym.generation.Generator` around a Hugging Face causal LM.

    Requests join and leave the batch at any decode step. The keys and values of a session stay in its row, and its
    next turn computes only what is new of the prompt, until `release`, or until the row is needed by another session
    (least recently used first). Prompts that are equal, or begin alike, are computed once.

    One thread owns model and cache. Callers, in any event loop, hand it commands through a queue, which it takes
    between two decode steps; it sleeps when there is nothing to decode. It answers through futures. A fault in it
    fails every request that waits with `InfraError`, drops all keys and values, and leaves the engine usable.

    Log-probs are those of the sampled distribution: ``log_softmax(logits / temperature)`` in float32, renormalised
    over what top-k and top-p leave; a greedy turn reports ``log_softmax(logits)``.

    Deterministic mode: after `begin_batch` turns are admitted at barriers (see `agentgym.trainer.rollout.gate`), so
    that on a CPU ids and log-probs are, to the bit, a function of weights, requests and thread count, whatever the
    timing. Session ids are then the announced keys. Without `begin_batch`, or with ``deterministic=False``, admission
    is immediate.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_slots: int = 64,
        max_length: int = 2048,
        deterministic: bool = False,
        num_threads: int | None = None,
        device: str | torch.device = "cpu",
        tokenizer: Any = None,
    ) -> None:
        """Take over ``model`` (its attention implementation is changed, its weights by `update_weights`).

        Args:
            model: a causal LM of transformers.
            max_slots: sessions whose keys and values fit; also the largest decode batch.
            max_length: longest sequence, prompt and generated tokens, of a session.
            deterministic: obey `begin_batch`.
            num_threads: intra-op threads of the engine's thread; None leaves torch's default.
            device: where the model runs.
            tokenizer: decodes for stop strings; requests with ``stop`` are refused without it.

        Raises:
            ConfigError: the model has layers that the engine would not run exactly, or a limit is below 1.
        """
        if max_slots < 1 or max_length < 2:
            raise ConfigError(f"max_slots={max_slots}, max_length={max_length}: expected at least 1 and 2")
        self.device = torch.device(device)
        with one_thread():
            model.to(self.device).eval()
            share = check_model(model, max_length, self.device)
        self.max_slots, self.max_length, self.deterministic = max_slots, max_length, deterministic
        self._tokenizer = tokenizer
        self._shapes = Shapes(model)
        self._num_threads = num_threads
        self._announced: frozenset[str] = frozenset()
        self._closed = False
        # From here on only the engine's thread touches what follows.
        self._decoder = Decoder(
            model, max_slots=max_slots, max_length=max_length, device=self.device, tokenizer=tokenizer, share=share
        )
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._pending: list[_Ticket] = []
        self._open: dict[str, _Ticket] = {}
        self._updates: list[_Update] = []
        self._gate: Gate | None = None
        self._released: set[str] = set()
        self._thread = threading.Thread(target=self._main, name="agentgym-torch-engine", daemon=True)
        self._thread.start()

    # What callers use

    @property
    def version(self) -> int:
        """The version of the weights in use; 0 before the first update."""
        return self._decoder.version

    checksum: int | None = None
    """Not computed: the weights are handed over within the process."""

    async def ready(self) -> None:
        """It is, from the start."""

    async def rest(self) -> None:
        """Nothing to free."""

    def stats(self) -> dict[str, float]:
        """The counters of `agentgym.trainer.rollout.decoder.EngineStats` since the engine was made."""
        return asdict(self._decoder.stats)

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, session_id: str) -> Generation:
        """Sample one turn; see `agentgym.generation.Generator`.

        Raises:
            ConfigError: a sampling parameter or the prompt is out of range.
            SessionError: the session has a turn in flight, or was not announced to `begin_batch`.
            InfraError: the engine failed or was closed.
        """
        ticket = _Ticket(self._turn(prompt_ids, sampling, session_id))
        # A running future cannot be cancelled through its asyncio face: it always gets the engine's answer.
        ticket.future.set_running_or_notify_cancel()
        self._post(partial(self._submit, ticket))
        try:
            return await asyncio.wrap_future(ticket.future)
        except asyncio.CancelledError:
            self._inbox.put(partial(self._cancel, ticket))
            raise

    async def release(self, session_id: str) -> None:
        """Forget the session's keys and values. In a deterministic batch this happens at the next barrier."""
        self._inbox.put(partial(self._release, session_id))

    def begin_batch(self, keys: Sequence[str], limit: int) -> None:
        """Announce the session keys of the coming batch, in order; at most ``limit`` are open at once, in order.

        Forgets all sessions, so that the batch does not depend on what came before. The caller must really open
        ``limit`` keys at once, in this order, and must `finish` each: a barrier waits for every open key. A rollout
        that is tried again keeps its key, and is finished after the last try.
        Does nothing when the engine is not deterministic.

        Raises:
            ConfigError: a key occurs twice, or the limit is below 1.
        """
        gate = Gate(keys, limit)
        if self.deterministic:
            self._announced = frozenset(keys)
            self._post(partial(self._begin, gate))

    def finish(self, key: str) -> None:
        """Say that the rollout of ``key`` needs no more turns; its keys and values are released. Idempotent.

        Raises:
            ConfigError: the key was not announced.
        """
        if not self.deterministic:
            return
        if key not in self._announced:
            raise ConfigError(f"session key {key!r} is not in the batch: announce it with begin_batch(keys, limit)")
        self._inbox.put(partial(self._finish, key))

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take new weights: turns in flight end under the old ones, later ones start under the new ones.

        All keys and values are forgotten. The tensors must not change before this returns; they are copied.

        Raises:
            ConfigError: names or shapes do not fit the model; nothing is changed.
            InfraError: the engine failed or was closed.
        """
        self._shapes.check(weights)
        update = _Update(weights, version)
        update.future.set_running_or_notify_cancel()
        self._post(partial(self._updates.append, update))
        await asyncio.wrap_future(update.future)

    async def aclose(self) -> None:
        """Stop the engine's thread; requests that wait fail with `InfraError`. Idempotent."""
        if not self._closed:
            self._closed = True
            self._inbox.put(lambda: None)
        await asyncio.to_thread(self._thread.join)

    def _post(self, command: Callable[[], None]) -> None:
        if self._closed or not self._thread.is_alive():
            raise InfraError("the torch engine is closed: make a new one")
        self._inbox.put(command)

    def _turn(self, prompt_ids: Sequence[int], sampling: SamplingParams, session_id: str) -> Turn:
        check_params(sampling)
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        if prompt.ndim != 1 or not len(prompt):
            raise ConfigError(f"session {session_id!r}: the prompt is empty; expected at least 1 token")
        if prompt.min() < 0 or prompt.max() >= self._shapes.vocabulary:
            raise ConfigError(
                f"session {session_id!r}: the prompt has ids from {prompt.min()} to {prompt.max()}, the model knows "
                f"0 to {self._shapes.vocabulary - 1}: tokenizer and model do not belong together"
            )
        if len(prompt) + 1 > self.max_length:
            raise ConfigError(
                f"session {session_id!r}: a prompt of {len(prompt)} tokens leaves no room for another in "
                f"max_length={self.max_length}: end the rollout, or raise max_length"
            )
        if sampling.stop and self._tokenizer is None:
            raise ConfigError(f"stop={list(sampling.stop)}: stop strings need TorchEngine(tokenizer=...)")
        if "" in sampling.stop:
            raise ConfigError(f"stop={list(sampling.stop)}: an empty stop string would end every turn; leave it out")
        limit = min(sampling.max_tokens, self.max_length - len(prompt))
        return Turn(
            session_id=session_id,
            prompt=prompt,
            params=sampling,
            limit=limit,
            noise=uniforms(sampling.seed, limit) if sampling.temperature > 0 else [0.5] * limit,
            stop_ids=frozenset(sampling.stop_token_ids),
            # Every token has at least a byte; the margin is for characters that the window's edge cuts.
            stop_window=max((len(stop.encode()) + 4 for stop in sampling.stop), default=0),
        )

    # The engine's thread

    def _main(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        try:
            with torch.inference_mode():
                while not self._closed:
                    self._guarded_cycle()
        finally:
            self._closed = True
            self._fail(InfraError("the torch engine was closed"))

    def _guarded_cycle(self) -> None:
        try:
            with boundary("the torch engine"):
                self._cycle()
        except AgentGymError as error:
            failure = error if isinstance(error, InfraError) else InfraError(str(error))
            failure.__cause__ = error.__cause__
            self._fail(failure)
            self._decoder.recover()
            if self._gate is not None:
                self._gate.passed(0)

    def _cycle(self) -> None:
        """Take the commands, then do one piece of work: an update, an admission, or a decode step."""
        self._take_commands()
        if self._closed:
            return
        if self._updates and not self._decoder.active:
            self._update()
        elif self._admissible():
            self._admit()
        elif self._decoder.active and not self._held():
            self._answer(self._decoder.step())

    def _take_commands(self) -> None:
        """Run what callers sent. Without work it waits for them, and then for others who ask at the same moment."""
        idle = not self._has_work()
        if idle:
            self._inbox.get()()
        while True:
            try:
                gather = idle and self._gate is None  # at a barrier it is known who has to come
                command = self._inbox.get(timeout=GATHER_SECONDS) if gather else self._inbox.get_nowait()
            except Empty:
                return
            command()

    def _has_work(self) -> bool:
        if self._closed or (self._updates and not self._decoder.active):
            return True
        return self._admissible() or (self._decoder.active > 0 and not self._held())

    def _held(self) -> bool:
        """Whether decoding waits for a barrier. An update lets the turns run on: it waits for their end."""
        return self._gate is not None and self._gate.due and not self._updates

    def _admissible(self) -> bool:
        if self._updates:
            return False
        if self._gate is None:
            return bool(self._pending) and self._decoder.capacity > 0
        return self._gate.due and self._gate.passable(self._open)

    def _admit(self) -> None:
        gate = self._gate
        if gate is not None:
            for key in sorted(self._released, key=gate.rank):
                self._decoder.drop(key)
            self._released.clear()
            self._pending.sort(key=lambda ticket: gate.rank(ticket.turn.session_id))
        ready = [t for t in self._pending if gate is None or gate.is_open(t.turn.session_id)]
        admitted = ready[: self._decoder.capacity]
        self._pending = [ticket for ticket in self._pending if ticket not in admitted]
        turns = [ticket.turn for ticket in admitted]
        if gate is not None:
            gate.passed(self._decoder.active + len(turns))
        if turns:
            self._answer(self._decoder.admit(turns))

    def _answer(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            assert turn.finish_reason is not None
            if self._gate is not None:
                self._gate.turn_ended()
            self._open.pop(turn.session_id).future.set_result(
                Generation(
                    token_ids=turn.token_ids,
                    logprobs=turn.logprobs,
                    finish_reason=turn.finish_reason,
                    weight_version=self._decoder.version,
                    cached_tokens=turn.cached,
                )
            )

    def _update(self) -> None:
        update = self._updates[0]
        self._decoder.load(update.weights, update.version)
        self._updates.pop(0)
        update.future.set_result(None)

    def _fail(self, error: AgentGymError) -> None:
        """Fail everyone who waits, also those whose command is still in the queue when the engine is closed."""
        while self._closed and not self._inbox.empty():
            self._inbox.get()()
        for ticket in self._open.values():
            ticket.fail(error)
        for update in self._updates:
            update.future.set_exception(error)
        self._open.clear()
        self._pending.clear()
        self._updates.clear()

    # Commands, run by the engine's thread

    def _submit(self, ticket: _Ticket) -> None:
        session_id = ticket.turn.session_id
        if session_id in self._open:
            ticket.fail(SessionError(f"session {session_id!r} has a turn in flight: await it before the next one"))
            return
        if self._gate is not None and (session_id not in self._gate or self._gate.finished(session_id)):
            state = "is finished" if session_id in self._gate else "was not announced"
            ticket.fail(
                SessionError(f"session key {session_id!r} {state} in this batch: name it in begin_batch(keys, limit)")
            )
            return
        self._open[session_id] = ticket
        self._pending.append(ticket)

    def _cancel(self, ticket: _Ticket) -> None:
        if self._open.get(ticket.turn.session_id) is not ticket:
            return
        del self._open[ticket.turn.session_id]
        if ticket in self._pending:
            self._pending.remove(ticket)
            return
        self._decoder.cancel(ticket.turn)
        if self._gate is not None:
            self._gate.turn_ended()

    def _release(self, session_id: str) -> None:
        if self._gate is not None and session_id in self._gate:
            self._released.add(session_id)
        else:
            self._decoder.drop(session_id)

    def _begin(self, gate: Gate) -> None:
        for ticket in self._open.values():
            ticket.fail(SessionError(f"session {ticket.turn.session_id!r} was cut off by begin_batch: await it first"))
        self._open.clear()
        self._pending.clear()
        self._released.clear()
        self._decoder.clear()
        self._gate = None if gate.done else gate

    def _finish(self, key: str) -> None:
        gate = self._gate
        if gate is None or not gate.finish(key):
            return
        ticket = self._open.get(key)
        if ticket is not None:
            ticket.fail(SessionError(f"session key {key!r} was finished during its turn"))
            self._cancel(ticket)
        self._released.add(key)
        if gate.done:
            self._gate = None
            self._released.clear()
            self._decoder.clear()

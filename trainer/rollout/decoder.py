"""The synchronous heart of the `torch` engine: admit turns, prefill what is new of them, decode one token at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentgym.errors import InfraError
from agentgym.trainer.rollout.attention import SharedPrefix, added, visible
from agentgym.trainer.rollout.kv_cache import KVCache, rounded_up
from agentgym.trainer.rollout.prefix import MIN_SHARED, common_prefix, shared_groups, shared_reads
from agentgym.trainer.rollout.sampling import SamplingPlan, sample
from agentgym.trainer.rollout.slots import RowTable, Session, Turn

PREFILL_TOKENS = 4096
"""Most tokens, padding included, of one prefill forward; bounds its memory."""

CHUNK = 1024
"""Longest piece of a prompt that one forward takes."""

MIN_SAVED = 256
"""A shared prefix is computed apart if that spares at least so many tokens: it costs a forward more."""

MIN_SPARED_BYTES = 2 * 2**20
"""Rows are read together if that spares each layer so many bytes: it costs each about 100 microseconds."""

HOLES = 1 / 8
"""Rows are moved together when at least this share of the batch is holes: a move costs about six steps of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine was made."""

    requests: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    """Prompt tokens that went through the model."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were reused, from the session's last turn or from an equal prefix."""
    prefill_forwards: int = 0
    decode_steps: int = 0
    decode_rows: int = 0
    """Sum over the steps of the rows that decoded; over ``decode_steps`` it is the mean batch."""
    shared_steps: int = 0
    """Decode steps that read what rows begin with alike once for all of them."""
    evictions: int = 0
    """Idle sessions whose keys and values made room for another."""


@dataclass(slots=True)
class _Job:
    """Tokens ``start..end`` of a session's prompt, to be computed."""

    session: Session
    start: int
    end: int


class Decoder:
    """Decodes the turns of up to ``max_slots`` sessions with a Hugging Face causal LM. One thread uses it."""

    def __init__(
        self, model: Any, *, max_slots: int, max_length: int, device: torch.device, tokenizer: Any, share: bool
    ) -> None:
        """``share``: the model can read rows together, as `agentgym.trainer.rollout.probe.check_model` found."""
        self.model = model
        self.version = 0
        self.stats = EngineStats()
        self._max_slots = max_slots
        self._device = device
        self._tokenizer = tokenizer
        self._share = share
        self._cache = KVCache(model.config.num_hidden_layers, max_slots, max_length, device)
        self._table = RowTable(self._cache, max_length)
        self._columns = torch.arange(self._cache.columns, device=device)
        self._plan = SamplingPlan.of([], device)
        self._prefix: SharedPrefix | None = None
        self._clock = 0
        self.active = 0
        """Number of turns that decode."""

    @property
    def capacity(self) -> int:
        """How many turns can be admitted now."""
        return self._max_slots - self.active

    def admit(self, turns: Sequence[Turn]) -> list[Turn]:
        """Start turns (at most `capacity`), in this order; returns those that ended with their first token."""
        self._clock += 1
        sessions = [self._table.open(turn.session_id, self._clock) for turn in turns]
        evicted = self._table.evict(self._clock)
        for session, turn in zip(sessions, turns, strict=True):
            kept = common_prefix(session.tokens[: session.length], turn.prompt)
            session.length = min(kept, len(turn.prompt) - 1)
            session.turn = turn
            turn.cached = session.length
        self._arrange()
        logits = self._prefill(sessions)
        self._read_together()
        ids, logprobs = sample(
            logits, SamplingPlan.of([t.params for t in turns], self._device), [t.noise[0] for t in turns]
        )
        self.active += len(turns)
        self.stats = replace(
            self.stats,
            requests=self.stats.requests + len(turns),
            cached_tokens=self.stats.cached_tokens + sum(t.cached for t in turns),
            evictions=self.stats.evictions + evicted,
        )
        return self._accept(sessions, ids, logprobs)

    def step(self) -> list[Turn]:
        """Sample one token for every turn; returns those that ended."""
        if (len(self._table.front) - self.active) >= HOLES * len(self._table.front):
            self._arrange()
            self._read_together()
        tokens, positions, writes, noise = self._inputs()
        length = rounded_up(max(positions) + 1)
        at = torch.tensor(positions, device=self._device)[:, None]
        self._cache.aim(range(len(tokens)), torch.tensor(writes, device=self._device)[:, None], length)
        mask = added(visible(self._columns[:length], at), self.model.dtype)
        extras = {} if self._prefix is None else {"shared_prefix": self._prefix}
        logits = self._forward(torch.tensor(tokens, device=self._device)[:, None], at, mask, **extras)
        ids, logprobs = sample(logits, self._plan, noise)
        rows = [s if s is not None and s.turn is not None else None for s in self._table.front]
        self.stats = replace(
            self.stats,
            decode_steps=self.stats.decode_steps + 1,
            decode_rows=self.stats.decode_rows + self.active,
            shared_steps=self.stats.shared_steps + (self._prefix is not None),
        )
        return self._accept(rows, ids, logprobs)

    def drop(self, session_id: str) -> None:
        """Forget a session; one that decodes is forgotten when its turn ends. Unknown ids are fine."""
        session = self._table.sessions.get(session_id)
        if session is None:
            return
        if session.turn is not None:
            session.forget = True
        else:
            self._table.free(session)

    def cancel(self, turn: Turn) -> None:
        """End a turn that decodes and forget its session."""
        session = self._table.sessions[turn.session_id]
        session.forget = True
        self._end(session)

    def clear(self) -> None:
        """Forget all sessions and turns; the state is that of a new decoder."""
        self._table.clear()
        self._prefix = None
        self.active = 0

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take new weights, in place. No turn may be active; all keys and values are forgotten."""
        self.clear()
        with torch.inference_mode(False), torch.no_grad():
            self.model.load_state_dict(weights, strict=False)
        self.version = version

    def recover(self) -> None:
        """After a failed forward: forget everything and wipe the cache of what it may have written."""
        self.clear()
        self._cache.clear()

    def _arrange(self) -> None:
        self._table.arrange([s for s in self._table.sessions.values() if s.turn is not None])
        self._plan = SamplingPlan.of(
            [s.turn.params for s in self._table.front if s is not None and s.turn is not None], self._device
        )

    def _read_together(self) -> None:
        """Find what the rows of the batch begin with alike, for the decode steps up to the next arrangement.

        Rows that end before it may be taken by nobody else, so what is read of them stays right.
        """
        self._prefix = None
        if len(self._table.front) < 2 or not self._share:
            return
        reads = shared_reads([s.tokens[: s.length] for s in self._table.front if s is not None])
        if reads.spared * self._cache.column_bytes >= MIN_SPARED_BYTES:
            self._prefix = SharedPrefix.of(self._cache, reads.groups, reads.length)

    def _inputs(self) -> tuple[list[int], list[int], list[int], list[float]]:
        """Token, position, column to write and noise of each row.

        A hole looks at its row up to the first column that is not shared, and writes to scratch.
        """
        tokens, positions, writes, noise = [], [], [], []
        for session in self._table.front:
            if session is None or session.turn is None:
                tokens.append(0)
                positions.append(self._prefix.length if self._prefix is not None else 0)
                writes.append(self._cache.scratch)
                noise.append(0.5)
                continue
            turn = session.turn
            tokens.append(turn.token_ids[-1])
            positions.append(session.length)
            writes.append(session.length)
            noise.append(turn.noise[len(turn.token_ids)])
            session.tokens[session.length] = turn.token_ids[-1]
            session.length += 1
        return tokens, positions, writes, noise

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, **extras: Any) -> Tensor:
        """Logits [n, V] after the last of the tokens [n, T]."""
        logits: Tensor = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
            **extras,
        ).logits
        return logits[:, -1]

    # Prefill

    def _prefill(self, sessions: Sequence[Session]) -> Tensor:
        """Compute what is new of the sessions' prompts; returns the logits [n, V] after them.

        Equal prompts are computed once, and so is what fresh prompts share with each other or with a kept session.
        """
        leaders: dict[bytes, Session] = {}
        followers: list[tuple[Session, Session]] = []
        continued = []
        for session in sessions:
            if session.length >= MIN_SHARED:
                continued.append(session)
                continue
            leader = leaders.setdefault(_turn(session).prompt.tobytes(), session)
            if leader is not session:
                followers.append((session, leader))
        fresh = self._copy_kept(list(leaders.values()), sessions)
        self._compute_shared(fresh)
        jobs = [_Job(s, s.length, len(_turn(s).prompt)) for s in [*continued, *leaders.values()]]
        logits = self._compute(jobs)
        for session, leader in followers:
            self._copy(leader, session, leader.length)
            logits[id(session)] = logits[id(leader)]
        return torch.stack([logits[id(session)] for session in sessions])

    def _copy_kept(self, leaders: Sequence[Session], admitted: Sequence[Session]) -> list[Session]:
        """Copy what fresh prompts share with sessions in the cache; returns those that share nothing."""
        new = {id(s) for s in admitted if s.length < MIN_SHARED}
        kept: dict[bytes, list[Session]] = {}
        for session in self._table.sessions.values():
            if session.length >= MIN_SHARED and id(session) not in new:
                kept.setdefault(session.tokens[:MIN_SHARED].tobytes(), []).append(session)
        rest = []
        for session in leaders:
            prompt = _turn(session).prompt
            sources = kept[key] if (key := prompt[:MIN_SHARED].tobytes()) in kept else []
            shared = [common_prefix(s.tokens[: s.length], prompt[:-1]) for s in sources]
            best = max(shared, default=0)
            if best >= MIN_SHARED:
                self._copy(sources[shared.index(best)], session, best)
            else:
                rest.append(session)
        return rest

    def _compute_shared(self, fresh: Sequence[Session]) -> None:
        """Compute the prefixes that fresh prompts share, once each, and copy them."""
        prompts = [_turn(s).prompt for s in fresh]
        groups = []
        for group in shared_groups(prompts):
            length = min(group.length, *(len(prompts[i]) - 1 for i in group.members))
            if length * (len(group.members) - 1) >= MIN_SAVED:
                groups.append(([fresh[i] for i in group.members], length))
        if groups:
            self._compute([_Job(members[0], 0, length) for members, length in groups])
        for members, length in groups:
            for session in members[1:]:
                self._copy(members[0], session, length)

    def _copy(self, source: Session, target: Session, length: int) -> None:
        """Give ``target`` the first ``length`` tokens of ``source`` with their keys and values."""
        self._cache.copy(_row(source), _row(target), length)
        target.tokens[:length] = source.tokens[:length]
        target.length = length
        _turn(target).cached = length

    def _compute(self, jobs: Sequence[_Job]) -> dict[int, Tensor]:
        """Run the jobs through the model; returns the logits [V] after each by ``id(session)``."""
        logits: dict[int, Tensor] = {}
        todo = list(jobs)
        while todo:
            pieces = [_Job(job.session, job.start, min(job.end, job.start + CHUNK)) for job in todo]
            for batch in _batches(pieces):
                for job, row in zip(batch, self._run(batch), strict=True):
                    logits[id(job.session)] = row
            rest = [_Job(job.session, piece.end, job.end) for job, piece in zip(todo, pieces, strict=True)]
            todo = [job for job in rest if job.start < job.end]
        return logits

    def _run(self, batch: Sequence[_Job]) -> Tensor:
        """One prefill forward; returns the logits [n, V] after each job.

        Shorter jobs are padded on the left, so that the last column is every job's last token. Padding stands at
        position 0, sees column 0 and writes to the scratch column.
        """
        width = max(job.end - job.start for job in batch)
        tokens = np.zeros((len(batch), width), dtype=np.int64)
        positions = np.zeros((len(batch), width), dtype=np.int64)
        writes = np.full((len(batch), width), self._cache.scratch, dtype=np.int64)
        for i, job in enumerate(batch):
            prompt = _turn(job.session).prompt[job.start : job.end]
            pad = width - len(prompt)
            tokens[i, pad:] = prompt
            positions[i, pad:] = writes[i, pad:] = np.arange(job.start, job.end)
            job.session.tokens[job.start : job.end] = prompt
            job.session.length = job.end
        length = rounded_up(max(job.end for job in batch))
        at = torch.from_numpy(positions).to(self._device)
        rows = [_row(job.session) for job in batch]
        self._cache.aim(rows, torch.from_numpy(writes).to(self._device), length)
        mask = visible(self._columns[:length], at)
        self.stats = replace(
            self.stats,
            prefill_forwards=self.stats.prefill_forwards + 1,
            prefill_tokens=self.stats.prefill_tokens + sum(job.end - job.start for job in batch),
        )
        return self._forward(torch.from_numpy(tokens).to(self._device), at, mask)

    # Results

    def _accept(self, rows: Sequence[Session | None], ids: Tensor, logprobs: Tensor) -> list[Turn]:
        """Append the sampled token to each row's turn; returns the turns that this ends."""
        ended = []
        accepted = 0
        for session, token, logprob in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
            if session is None:
                continue
            turn = _turn(session)
            if not math.isfinite(logprob):
                raise InfraError(
                    f"the model's logits are not finite (weight version {self.version}, session "
                    f"{turn.session_id!r}, token {len(turn.token_ids)}): look at the last weight update"
                )
            accepted += 1
            turn.token_ids.append(token)
            turn.logprobs.append(logprob)
            if token in turn.stop_ids or (turn.stop_window and self._stopped(turn)):
                turn.finish_reason = "stop"
            elif len(turn.token_ids) >= turn.limit:
                turn.finish_reason = "length"
            else:
                continue
            ended.append(turn)
            self._end(session)
        self.stats = replace(self.stats, generated_tokens=self.stats.generated_tokens + accepted)
        return ended

    def _stopped(self, turn: Turn) -> bool:
        text = self._tokenizer.decode(turn.token_ids[-turn.stop_window :], skip_special_tokens=False)
        return any(stop in text for stop in turn.params.stop)

    def _end(self, session: Session) -> None:
        session.turn = None
        self.active -= 1
        if session.forget:
            self._table.free(session)


def _turn(session: Session) -> Turn:
    assert session.turn is not None
    return session.turn


def _row(session: Session) -> int:
    assert session.row is not None
    return session.row


def _batches(jobs: Sequence[_Job]) -> list[list[_Job]]:
    """Group jobs of like length: at most `PREFILL_TOKENS` with padding, and no job padded to over twice its length."""
    ordered = sorted(jobs, key=lambda job: (job.start - job.end, _row(job.session)))
    batches: list[list[_Job]] = []
    for job in ordered:
        size = job.end - job.start
        width = batches[-1][0].end - batches[-1][0].start if batches else 0
        fits = width * (len(batches[-1]) + 1) <= PREFILL_TOKENS and width <= max(2 * size, 32) if batches else False
        if fits:
            batches[-1].append(job)
        else:
            batches.append([job])
    # Neighbouring rows are read without a copy.
    return [sorted(batch, key=lambda job: _row(job.session)) for batch in batches]

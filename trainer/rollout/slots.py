"""Who holds which row of the KV cache: sessions, the turns they decode, and the order of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from agentgym.generation import SamplingParams
from agentgym.trainer.rollout.kv_cache import KVCache
from agentgym.trainer.rollout.prefix import Tokens
from agentgym.types import FinishReason


@dataclass(slots=True, eq=False)
class Turn:
    """One request while it waits or decodes."""

    session_id: str
    prompt: Tokens
    params: SamplingParams
    limit: int
    """Most tokens to generate: ``max_tokens``, or less where ``max_length`` comes first."""
    noise: Sequence[float]
    """One uniform number for each of ``limit`` positions."""
    stop_ids: frozenset[int]
    stop_window: int
    """A stop string that ends with the newest token lies within this many tokens; 0 without stop strings."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0
    finish_reason: FinishReason | None = None


@dataclass(slots=True, eq=False)
class Session:
    """What is kept of a session: the tokens whose keys and values are in its row."""

    id: str
    tokens: Tokens
    """[max_length]; the first ``length`` are in the cache."""
    length: int = 0
    row: int | None = None
    turn: Turn | None = None
    used: int = 0
    """The engine's clock when the session was last admitted: the smallest is evicted first."""
    forget: bool = False
    """Released during its turn: freed when the turn ends."""


class RowTable:
    """The rows of the cache. Those that decode are kept dense at the front, so that the batch is a slice of it."""

    def __init__(self, cache: KVCache, max_length: int) -> None:
        self._cache = cache
        self._max_length = max_length
        self._owner: list[Session | None] = [None] * cache.rows
        self.sessions: dict[str, Session] = {}
        self.front: list[Session | None] = []
        """The owners of the batch's rows; None or a session without a turn is a hole: it is computed and ignored."""

    def open(self, session_id: str, clock: int) -> Session:
        """The session of that id, made if it is new, marked as used now."""
        session = self.sessions.get(session_id)
        if session is None:
            session = Session(session_id, np.zeros(self._max_length, dtype=np.int64))
            self.sessions[session_id] = session
        session.used = clock
        return session

    def free(self, session: Session) -> None:
        """Forget a session that has no turn."""
        del self.sessions[session.id]
        if session.row is not None:
            self._owner[session.row] = None
            if session.row < len(self.front):
                self.front[session.row] = None
            session.row = None

    def evict(self, clock: int) -> int:
        """Free idle sessions, least recently used first, until every session fits in a row; those used now stay."""
        idle = [s for s in self.sessions.values() if s.turn is None and s.used < clock]
        surplus = max(0, len(self.sessions) - len(self._owner))
        for session in sorted(idle, key=lambda s: s.used)[:surplus]:
            self.free(session)
        return surplus

    def arrange(self, active: Sequence[Session]) -> None:
        """Bring the ``active`` sessions to the first rows; those already there stay where they are."""
        wanted = set(map(id, active))
        count = len(active)
        # Those that leave a row behind go first: an idle session in the way of a new one then finds a free row.
        movers = [s for s in active if s.row is not None and s.row >= count] + [s for s in active if s.row is None]
        holes = [row for row in range(count) if self._owner[row] is None or id(self._owner[row]) not in wanted]
        for session, hole in zip(movers, holes, strict=True):
            self._bring(session, hole, count)
        self.front = self._owner[:count]

    def _bring(self, session: Session, hole: int, count: int) -> None:
        idle = self._owner[hole]
        row = session.row
        if row is None:
            row = next(r for r in range(count, len(self._owner)) if self._owner[r] is None) if idle else hole
        if idle is not None and session.row is not None:
            self._cache.swap(hole, idle.length, row, session.length)
        elif idle is not None:
            self._cache.copy(hole, row, idle.length)
        elif session.row is not None:
            self._cache.copy(row, hole, session.length)
        self._owner[row] = idle
        if idle is not None:
            idle.row = row
        self._owner[hole] = session
        session.row = hole

    def clear(self) -> None:
        """Forget all sessions, also those with a turn."""
        self._owner = [None] * len(self._owner)
        self.sessions.clear()
        self.front = []

"""Deterministic admission: which turns are in a batch follows from the requests alone, never from their timing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from agentgym.errors import ConfigError

BARRIER_FRACTION = 0.5
"""The share of the rows of the last barrier whose turn must have ended before the next barrier."""


class Gate:
    """The barriers of one batch of rollouts.

    The batch is an ordered list of session keys of which at most ``limit`` are open at once, opened in order: the
    window is the first ``limit + finished`` keys. When a barrier is due, nothing is decoded until every key of the
    window is finished, has a turn in progress, or waits with a request; then requests are admitted in key order.
    """

    def __init__(self, keys: Sequence[str], limit: int) -> None:
        if limit < 1:
            raise ConfigError(f"limit={limit}: at least 1 session must be open at once")
        self._rank = {key: rank for rank, key in enumerate(keys)}
        if len(self._rank) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ConfigError(f"session key {twice!r} occurs twice in the batch: each rollout needs its own key")
        self._keys = list(keys)
        self._limit = limit
        self._open = set(self._keys[:limit])
        self._finished: set[str] = set()
        self._running = 0
        self._ended = 0

    def __contains__(self, key: str) -> bool:
        return key in self._rank

    @property
    def done(self) -> bool:
        """True when every key is finished."""
        return len(self._finished) == len(self._keys)

    def finished(self, key: str) -> bool:
        """Whether `finish` was called for the key."""
        return key in self._finished

    def is_open(self, key: str) -> bool:
        """Whether the key is in the window and not finished. Callers may run ahead of it; they wait."""
        return key in self._open

    def rank(self, key: str) -> int:
        """The key's place in the batch."""
        return self._rank[key]

    def finish(self, key: str) -> bool:
        """The rollout of ``key`` needs no more turns: the window grows by one. False if that was known."""
        if key not in self._rank or key in self._finished:
            return False
        self._finished.add(key)
        self._open.discard(key)
        grown = self._limit + len(self._finished) - 1
        if grown < len(self._keys) and self._keys[grown] not in self._finished:
            self._open.add(self._keys[grown])
        return True

    def turn_ended(self) -> None:
        """A row's turn ended."""
        self._ended += 1

    @property
    def due(self) -> bool:
        """Whether the next barrier has come: no row decodes, or enough turns ended since the last one."""
        return self._ended >= max(1, BARRIER_FRACTION * self._running) or self._ended == self._running

    def passable(self, busy: Collection[str]) -> bool:
        """Whether every open key is in ``busy``: it decodes or has a request waiting."""
        return self._open <= set(busy)

    def passed(self, running: int) -> None:
        """A barrier was passed; ``running`` rows decode from here on."""
        self._running, self._ended = running, 0

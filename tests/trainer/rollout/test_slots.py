from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.trainer.rollout.kv_cache import KVCache
from agentgym.trainer.rollout.slots import RowTable, Session, Turn

ROWS, LENGTH = 6, 40


def make_table() -> tuple[RowTable, KVCache]:
    cache = KVCache(2, ROWS, LENGTH, torch.device("cpu"))
    cache.aim([0], torch.tensor([[0]]), 32)
    for layer in range(2):
        cache.update(torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1, 4), layer)
    return RowTable(cache, LENGTH), cache


def write(cache: KVCache, session: Session, mark: float) -> None:
    assert cache.keys is not None
    assert cache.values is not None
    cache.keys[:, session.row, :, : session.length] = mark
    cache.values[:, session.row, :, : session.length] = -mark


def holds(cache: KVCache, session: Session, mark: float) -> bool:
    assert cache.keys is not None
    assert cache.values is not None
    keys, values = (store[:, session.row, :, : session.length] for store in (cache.keys, cache.values))
    return bool((keys == mark).all() and (values == -mark).all())


ROUNDS = st.lists(
    st.tuples(st.sets(st.integers(0, 9), min_size=1, max_size=ROWS), st.sets(st.integers(0, 9), max_size=2)),
    min_size=1,
    max_size=8,
)


@given(ROUNDS, st.integers(1, 30))
@settings(max_examples=150, deadline=None)
def test_keys_and_values_travel_with_their_session(rounds: list[tuple[set[int], set[int]]], length: int) -> None:
    table, cache = make_table()
    marks: dict[str, float] = {}
    for clock, (active, freed) in enumerate(rounds, start=1):
        sessions = [table.open(str(i), clock) for i in sorted(active)]
        table.evict(clock)
        for session in sessions:
            session.turn = object.__new__(Turn)
        table.arrange(sessions)
        assert sorted(s.row for s in sessions if s.row is not None) == list(range(len(sessions)))
        for session in sessions:
            if session.length == 0:
                session.length = min(LENGTH, length + len(marks))
                marks[session.id] = float(len(marks) + 1)
                write(cache, session, marks[session.id])
            session.turn = None
        rows = [s.row for s in table.sessions.values()]
        assert len(set(rows)) == len(rows) <= ROWS
        assert all(holds(cache, s, marks[s.id]) for s in table.sessions.values())
        for session in [s for s in table.sessions.values() if int(s.id) in freed]:
            table.free(session)


def test_the_least_recently_used_idle_session_is_evicted() -> None:
    table, _ = make_table()
    for clock in range(1, ROWS + 1):
        table.arrange([table.open(f"s{clock}", clock)])
    table.open("s1", ROWS + 1)  # used again
    table.open("new", ROWS + 1)
    assert table.evict(ROWS + 1) == 1
    assert "s2" not in table.sessions
    assert {"s1", "new"} <= table.sessions.keys()

"""The sandbox benchmark."""

from __future__ import annotations

import pytest

from agentgym.sandbox import sandbox_backends
from agentgym.tools.sandbox import bench


async def test_a_row_of_a_backend_has_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "STARTS", 1)
    monkeypatch.setattr(bench, "OPENS", 1)
    monkeypatch.setattr(bench, "CALLS", 20)
    monkeypatch.setattr(bench, "SUSTAINED_SECONDS", 0.1)
    row = await bench.backend_row(sandbox_backends.get("process")(), sessions=2)
    assert row["what"] == "process"
    assert row["sessions"] == 2
    figures = ("cold_start_ms", "pool_open_ms", "call_p50_ms", "calls_per_s", "memory_mb", "opens_per_s")
    assert all(float(row[name]) > 0 for name in figures)
    assert float(row["call_p50_ms"]) <= float(row["call_p99_ms"])
    assert 1 < float(row["memory_mb"]) < 100

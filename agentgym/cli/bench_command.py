"""``agentgym bench``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from agentgym.console import Console
from agentgym.errors import ConfigError, did_you_mean
from agentgym.registry import import_target

Row = Mapping[str, float | int | str]

BENCHES = {
    "advantages": "agentgym.trainer.bench_advantages:bench_advantages",
    "loop": "agentgym.trainer.bench_loop:run",
    "rollout": "agentgym.cli.bench_command:rollout_rows",
    "sandbox": "agentgym.tools.sandbox.bench:run",
    "step": "agentgym.trainer.bench_step:run",
}
"""Name to the function that measures and returns a list of rows."""


def bench_command(name: str, *, as_json: bool) -> int:
    """Run one benchmark and print its rows. Returns the exit code."""
    if name not in BENCHES:
        raise ConfigError(f"no benchmark {name!r}.{did_you_mean(name, BENCHES)} Known: {', '.join(BENCHES)}")
    run: Callable[[], Sequence[Row]] = import_target(BENCHES[name], what=f"benchmark {name!r}")
    rows = run()
    console = Console()
    if as_json:
        console.line(json.dumps([dict(row) for row in rows], indent=2))
        return 0
    for line in table(rows):
        console.line(line)
    return 0


def rollout_rows() -> list[Row]:
    """The shipped model in the rollout engines and in ``generate``: tokens/s, and how many times as fast `torch` is."""
    from agentgym.trainer.bench_rollout import bench_rollout
    from agentgym.trainer.model import load_causal_lm
    from agentgym.trainer.model_path import resolve_model_path
    from agentgym.trainer.rollout.vllm_support import installed

    folder = resolve_model_path("tiny") if installed() is not None else None
    report = bench_rollout(load_causal_lm("tiny", dtype="float32"), vllm_folder=folder)
    ratios = {"generate": report["ratio"], "vllm": report.get("ratio_vllm", {})}
    return [
        dict(row) | ({"torch_is_faster": ratios[row["engine"]][row["turns"]]} if row["engine"] in ratios else {})
        for row in report["rows"]
    ]


def table(rows: Sequence[Row]) -> list[str]:
    """Rows as aligned text: one column per key, numbers to the right."""
    if not rows:
        return []
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row[key]) if key in row else "" for key in keys] for row in rows]
    widths = [max(len(key), *(len(line[i]) for line in cells)) for i, key in enumerate(keys)]
    texts = {key for key in keys if any(isinstance(row.get(key, 0), str) for row in rows)}

    def align(values: Sequence[str]) -> str:
        pairs = zip(keys, values, widths, strict=True)
        return "  ".join(v.ljust(w) if k in texts else v.rjust(w) for k, v, w in pairs).rstrip()

    return [align(keys), *(align(line) for line in cells)]


def _cell(value: float | int | str) -> str:
    if isinstance(value, str | int):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"

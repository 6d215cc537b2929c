"""The report as one HTML page that needs no network: the plots' JavaScript is in it."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentgym.atomic import write_atomically
from agentgym.evaluation.report import EvalReport, TaskResult

Figure = tuple[str, list[dict[str, Any]], dict[str, Any]]
"""Title, traces and layout of a plot."""

MAX_TASKS = 2_000
"""Rows of the table of tasks."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #222; }}
h1 {{ font-size: 1.4em; }} h2 {{ font-size: 1.1em; margin-top: 2em; }}
pre {{ background: #f5f5f3; padding: 1em; overflow-x: auto; }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1em; }}
.plot {{ height: 320px; }}
table {{ border-collapse: collapse; width: 100%; }} td, th {{ text-align: left; padding: .2em .8em .2em 0;
border-bottom: 1px solid #e5e5e2; }} td.number {{ font-variant-numeric: tabular-nums; }}
.warning {{ background: #fff1e6; border-left: 4px solid #d9480f; padding: .6em 1em; white-space: pre-wrap; }}
</style>
<script>{script}</script></head><body>
<h1>{title}</h1>
{warning}<pre>{table}</pre>
<div class="plots">{plots}</div>
<h2>Tasks</h2>
<table><thead><tr><th>task</th><th>source</th><th>mean reward</th><th>rewards</th><th>errors</th></tr></thead>
<tbody>{tasks}</tbody></table>
<script>
const margin = {{l: 50, r: 20, t: 40, b: 45}};
for (const [id, data, layout] of {figures})
  Plotly.newPlot(id, data, {{margin, ...layout}}, {{responsive: true, displaylogo: false}});
</script>
</body></html>
"""


def write_html(path: Path, report: EvalReport) -> None:
    """Write the page, about 5 MB, whole or not at all."""
    write_atomically(path, render(report))


def render(report: EvalReport) -> str:
    """The page."""
    from plotly.offline import get_plotlyjs

    figures = plots(report)
    named = [
        (f"plot{i}", data, {"title": {"text": title}, **layout}) for i, (title, data, layout) in enumerate(figures)
    ]
    warning = "\n".join(report.warnings()).strip()
    return PAGE.format(
        title=html.escape(f"{report.policy} in {report.env} ({report.split})"),
        script=get_plotlyjs(),
        warning=f'<p class="warning">{html.escape(warning)}</p>\n' if warning else "",
        table=html.escape("\n".join(report.lines())),
        plots="".join(f'<div class="plot" id="{name}"></div>' for name, _, _ in named),
        tasks="".join(map(_task_row, report.per_task[:MAX_TASKS])),
        figures=in_script(named),
    )


def in_script(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def plots(report: EvalReport) -> list[Figure]:
    """What is drawn, as Plotly's plain data; a plot that would show nothing is left out."""
    rewards = [reward for task in report.per_task for reward in task.rewards]
    figures: list[Figure] = []
    if rewards:
        figures.append(("Rewards", [_histogram(rewards)], _axes("reward", "rollouts")))
        means = sorted((task.mean for task in report.per_task if task.mean is not None), reverse=True)
        figures.append(("Mean reward of each task", [{"type": "bar", "y": means}], _axes("tasks, best first", "")))
    if len(report.at_k) > 1:
        ks = [entry.k for entry in report.at_k]
        curves = {"pass@k": "pass_at", "majority@k": "majority", "pass^k": "pass_hat"}
        lines = [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": ks,
                "y": [getattr(e, a) for e in report.at_k],
            }
            for name, a in curves.items()
        ]
        figures.append(("What k samples are worth", lines, _axes("k", "") | {"yaxis": {"range": [0, 1.02]}}))
    parts = {name: part.reward for name, part in report.sources.items() if part.reward is not None}
    for title, estimates in (("Reward by source", parts), ("Reward components", dict(report.components))):
        if estimates:
            figures.append((title, [_bars(estimates)], _axes("", "")))
    figures.append(("How rollouts ended", [_counts(report.statuses)], _axes("", "rollouts")))
    return figures


def _histogram(values: Sequence[float]) -> dict[str, Any]:
    """Twenty steps from the lowest to the highest value, each in the middle of its bar."""
    low, high = min(values), max(values)
    size = (high - low) / 20 or 0.05
    return {"type": "histogram", "x": values, "xbins": {"start": low - size / 2, "end": high + size, "size": size}}


def _bars(estimates: Mapping[str, Any]) -> dict[str, Any]:
    values = list(estimates.values())
    return {
        "type": "bar",
        "x": list(estimates),
        "y": [value.mean for value in values],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [value.high - value.mean for value in values],
            "arrayminus": [value.mean - value.low for value in values],
        },
    }


def _counts(counts: Mapping[str, int]) -> dict[str, Any]:
    return {"type": "bar", "x": list(counts), "y": list(counts.values())}


def _axes(x: str, y: str) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}


def _task_row(task: TaskResult) -> str:
    mean = "" if task.mean is None else f"{task.mean:.3f}"
    cells = [
        html.escape(task.task_id),
        html.escape(task.data_source),
        mean,
        _short(task.rewards),
        str(task.errors) if task.errors else "",
    ]
    return "<tr>" + "".join(f'<td class="number">{cell}</td>' for cell in cells) + "</tr>"


def _short(rewards: Sequence[float]) -> str:
    return " ".join(f"{reward:g}" for reward in rewards[:32]) + (" ..." if len(rewards) > 32 else "")

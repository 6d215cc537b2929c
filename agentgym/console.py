"""What a person sees of long work: a progress line on a terminal, plain lines in a file or pipe, and a summary."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

SHOWN: Mapping[str, tuple[str, str]] = {
    "reward/mean": ("reward", "{:.3f}"),
    "val/reward_mean": ("validation", "{:.3f}"),
    "rollout/failed": ("failed", "{:.0f}"),
    "throughput/tokens_per_s": ("tokens/s", "{:,.0f}"),
}
"""Metrics that the progress line shows, in this order, with their name and format there."""

RECENT = 20
"""Updates over which the speed is averaged for the time left."""


class Console:
    """Writes to a person: lines, progress, summaries.

    Args:
        file: where to; default: standard output.
        live: a progress bar that redraws itself; default: only where ``file`` is a terminal.
        interval: without a bar, seconds between two lines at least (news such as a validation are shown at once).
        clock: seconds, for the time left.
    """

    def __init__(
        self,
        *,
        file: TextIO | None = None,
        live: bool | None = None,
        interval: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.file = file if file is not None else sys.stdout
        self.live = self.file.isatty() if live is None else live
        self.interval = interval
        self.clock = clock

    def line(self, text: str = "") -> None:
        """One line, at once. While a progress bar is shown use `Progress.line`."""
        self.file.write(text + "\n")
        self.file.flush()

    def progress(self, total: int, *, done: int = 0, unit: str = "step") -> Progress:
        """A context manager that shows how far work of ``total`` units is, of which ``done`` were done before."""
        return Progress(self, total=total, done=done, unit=unit)


class Progress:
    """The progress of one piece of work; made by `Console.progress`.

    Example:
        >>> with console.progress(100) as progress:
        ...     progress.status("sampling")
        ...     progress.update(1, {"reward/mean": 0.25, "throughput/tokens_per_s": 5120.0})
    """

    def __init__(self, console: Console, *, total: int, done: int, unit: str) -> None:
        self.console = console
        self.total = total
        self.done = done
        self.unit = unit
        self._shown: dict[str, float] = {}
        self._status = ""
        self._ticks: deque[tuple[float, int]] = deque(maxlen=RECENT)
        self._last_line = float("-inf")
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._ticks.append((self.console.clock(), self.done))
        if self.console.live:
            self._bar, self._task = _make_bar(self.console.file, self.total, self.done, self.unit)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._status = ""
            self._redraw()
            self._bar.stop()
            self._bar = None

    def update(self, done: int, values: Mapping[str, float]) -> None:
        """``done`` units are finished. Of ``values`` (metrics) those in `SHOWN` appear; they stay until replaced."""
        self.done = done
        self._ticks.append((self.console.clock(), done))
        news = "val/reward_mean" in values
        self._shown |= {name: value for name, value in values.items() if name in SHOWN}
        if self._bar is not None:
            self._redraw()
        elif news or done >= self.total or self.console.clock() - self._last_line >= self.console.interval:
            self._last_line = self.console.clock()
            self.console.line(self.text())

    def status(self, text: str) -> None:
        """What is being done right now (``"validating"``); shown behind the bar, nowhere without one."""
        self._status = text
        if self._bar is not None:
            self._redraw()
            self._bar.refresh()

    def line(self, text: str) -> None:
        """A line above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            self.console.line(text)

    def text(self) -> str:
        """``step 12/80  reward 0.412  validation 0.355  tokens/s 5,120  left 2m10s``."""
        return f"{self.unit} {self.done}/{self.total}  {self._values()}".rstrip()

    def seconds_left(self) -> float | None:
        """Seconds until the end at the speed of the last updates; None before the first one."""
        (start, first), (end, last) = self._ticks[0], self._ticks[-1]
        if last <= first:
            return None
        return (end - start) / (last - first) * max(0, self.total - self.done)

    def _values(self) -> str:
        parts = [
            f"{label} {template.format(self._shown[name])}"
            for name, (label, template) in SHOWN.items()
            if name in self._shown and not (name == "rollout/failed" and self._shown[name] == 0)
        ]
        left = self.seconds_left()
        if left is not None and self.done < self.total:
            parts.append(f"left {duration(left)}")
        return "  ".join(parts)

    def _redraw(self) -> None:
        assert self._bar is not None
        assert self._task is not None
        text = "  ".join(filter(None, [self._values(), self._status]))
        self._bar.update(self._task, completed=self.done, values=text)


def _make_bar(file: TextIO, total: int, done: int, unit: str) -> tuple[RichProgress, TaskID]:
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    bar = Progress(
        TextColumn(unit),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[values]}", markup=False),
        console=RichConsole(file=file, force_terminal=True),
        refresh_per_second=8,
    )
    return bar, bar.add_task(unit, total=total, completed=done, values="")


def duration(seconds: float) -> str:
    """``45s``, ``2m10s``, ``3h05m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """How a training run ended."""

    run_dir: str
    steps: int
    """Steps of the whole run, those before a resume included."""
    seconds: float
    """Wall clock of this process's part."""
    reward_before: float | None = None
    """Validation reward before training; None where it was not measured."""
    reward_after: float | None = None
    next_command: str = ""
    """What to type next."""

    def lines(self) -> Sequence[str]:
        """The summary, one fact a line."""
        rows = [("run", self.run_dir), ("steps", f"{self.steps} in {duration(self.seconds)}")]
        if self.reward_after is not None:
            before = f"{self.reward_before:.3f} -> " if self.reward_before is not None else ""
            rows.append(("validation", f"{before}{self.reward_after:.3f} (mean reward)"))
        if self.next_command:
            rows.append(("next", self.next_command))
        return [f"{name:<12}{value}" for name, value in rows]

"""Signals of long commands."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """A SIGTERM inside the block is an interruption like Ctrl-C: what is open gets released, what was done is kept."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so started by a shell in the background
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)

"""OpenMP's threads in a process: how long they wait awake, and who may have some."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SPIN = 50_000
"""Looks of an idle OpenMP thread for its next piece of work before it sleeps, about 3 ms.

Asleep (``OMP_WAIT_POLICY=PASSIVE``) it is woken for every operation, 70 microseconds each: the small model then ran no
faster on two cores than on one. For ever awake (``ACTIVE``) it would take a core from the process that works.
"""


def openmp_environment(threads: int) -> dict[str, str]:
    """Environment variables for a process that computes with so many threads."""
    return {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": str(SPIN)}


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread for what is computed inside.

    Every thread that computes in parallel gets helpers of its own, which live as long as it does. As soon as a process
    has more of them than cores, GNU's OpenMP puts all of them to sleep between two operations. So only the thread that
    does the main work of a process may have some; models are loaded and tried in others.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

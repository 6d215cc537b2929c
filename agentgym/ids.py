"""Ids of sessions and tool instances: unique over all processes, and cheap to make."""

from __future__ import annotations

import itertools
import os
import secrets

_count = itertools.count()
_prefix = secrets.token_hex(5)


def new_id() -> str:
    """16 hexadecimal digits: 10 random ones of this process, and a counter."""
    return f"{_prefix}{next(_count):06x}"


def _renew() -> None:
    global _prefix
    _prefix = secrets.token_hex(5)


os.register_at_fork(after_in_child=_renew)  # a forked child must not go on with its parent's ids

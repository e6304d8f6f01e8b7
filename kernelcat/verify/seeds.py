"""Seeds of inputs, drawn at run time: a kernel that knows its seeds could return known results."""

from __future__ import annotations

import secrets

MAX_PASSES = 3
"""Passes with new inputs after a race, of which the fastest counts: other load on the machine may
slow one of them. Each pass needs a seed."""


def draw_seeds(count: int) -> tuple[int, ...]:
    """``count`` seeds below 2**31. Rows and messages record them, to repeat a failure."""
    return tuple(secrets.randbits(31) for _ in range(count))

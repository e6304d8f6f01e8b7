"""A race of tiles for peers that compile a kernel for each tile and have no cheap tuner."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kernelcat.reference._peers import import_torch

SECONDS = 16.0
"""Time after which :func:`fastest` builds no further candidate, for all products of a problem."""
RUNS = 5
"""Timed runs of a candidate."""
FLUSH_BYTES = 1 << 30
"""Bytes written between runs: the L2 cache is cold, and the host launches ahead of the GPU."""


class Raced(NamedTuple):
    """The winner of a race: its time in microseconds, the candidate, and its function."""

    us: float
    candidate: Any
    run: Callable[..., Any]


def deadline() -> float:
    """When the races of a problem that begin now shall end, in ``time.monotonic`` seconds."""
    return time.monotonic() + SECONDS


def fastest(
    candidates: Sequence[Any],
    build: Callable[[Any], Callable[..., Any]],
    arguments: Sequence[Any],
    end: float,
) -> Raced:
    """The candidate whose function ``build(candidate)`` takes the least time for ``arguments``.

    Candidates stand in the order of their promise: from ``end`` on (:func:`deadline`) all but the
    first are left out.
    """
    best = None
    for candidate in candidates:
        if best and time.monotonic() >= end:
            break
        run = build(candidate)
        us = median_us(lambda run=run: run(*arguments))
        if best is None or us < best.us:
            best = Raced(us, candidate, run)
    assert best is not None, "there are no candidates"
    return best


def median_us(run: Callable[[], Any]) -> float:
    """Median of the microseconds that ``run`` takes on the GPU, with a cold L2 cache."""
    torch = import_torch("a race of tiles")
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(RUNS)]
    for start, end in events:
        flush.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[RUNS // 2] * 1e3

"""Where experts are, and which of them change places so that ranks have equal work.

The *places* of a layer are numbered over all ranks: rank r holds the places r * local to
(r + 1) * local - 1, and each place has one expert.

DeepSeek's EPLB assigns experts anew, the heaviest first to the rank with the least load. That moves
most weights for the sake of a few hot experts. Here experts change places in pairs: the rank with
the most work swaps an expert with another rank, so that the busier of the two gets the most relief,
until no swap helps. The result is about as even, and few weights move.

Source of the problem: DeepSeek-AI, "EPLB", 2025.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[Any]

LEAST_GAIN = 0.005
"""Part of a rank's mean load by which a swap must lower the load of the busier rank."""


def evened(load: Counts, ranks: int) -> Counts:
    """Sources (places,) for one layer: each place gets the expert that is in place ``sources[p]``.

    ``load`` (places,) is what the expert in each place has served. The same input gives the same
    result on every rank.
    """
    load, local = np.array(load, dtype=np.float64), len(load) // ranks
    sources, least = np.arange(len(load)), LEAST_GAIN * load.sum() / ranks
    for _ in sources:
        sums = load.reshape(ranks, local).sum(1)
        first = int(sums.argmax()) * local
        moved = load[first : first + local, None] - load
        gain = np.minimum(moved, sums.max() - sums.repeat(local) - moved)
        a, b = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[a, b] <= least:
            break
        swap = [first + int(a), int(b)]
        load[swap], sources[swap] = load[swap[::-1]], sources[swap[::-1]]
    return sources

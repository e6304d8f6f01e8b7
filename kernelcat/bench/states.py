"""Thermal states: how a race treats the chip's heat. What the chip did then is in the rows.

The same cuBLAS product ran at 787 TFLOP/s on a cool H200 (1980 MHz) and at 635 to 687 under its
700 W cap (about 1500 MHz), so both are raced, each apart from the other. A state says how a race
was run; a small kernel may draw so little that the clock is the same in each, and the row's clock
tells.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelcat.store.races import BURST, LADDER, SUSTAINED

BLOCKS = 11
"""Blocks of a race: enough for a 95 % interval corrected for fifty rivals."""
RECOVERED = 0.97
"""A clock above this share of the highest one has recovered."""
REST_S = (0.005, 0.04)
"""The shortest and the longest rest before a block."""


@dataclass(frozen=True)
class State:
    """How a race is run.

    Attributes
    ----------
    block_us : microseconds of work in a block; a kernel slower than that runs once
    rest : idle time before a block, as a multiple of the work in the block before it
    warm_up_s : seconds of work by the contestants before the first block
    """

    block_us: float
    rest: float = 0.0
    warm_up_s: float = 0.0

    def rest_s(self, work_us: float, clock: float) -> float:
        """Seconds of idling after ``work_us`` that ended at this share of the highest clock."""
        shortest, longest = REST_S
        if not self.rest:
            return 0.0
        if clock < RECOVERED:
            return longest
        return min(max(self.rest * work_us * 1e-6, shortest), longest)


_RESTED = State(block_us=2000.0, rest=5.0)

STATES = {
    BURST: _RESTED,
    SUSTAINED: State(block_us=6000.0, warm_up_s=2.0),
    LADDER: _RESTED,
}
"""Name -> state. ``ladder`` is ``burst`` with every variant, however slow: see `kernelcat ladder`.
Slow kernels let the chip cool, so this state says nothing about a hot chip."""

TUNED = (BURST, SUSTAINED)
"""The states that a tune races in, in this order: the second leaves the chip hot."""

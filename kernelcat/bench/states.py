"""Thermal states: whether a race lets the chip cool between blocks or keeps the chip hot.

One cuBLAS product ran at 787 TFLOP/s on a cool H200 (1980 MHz) and at 635 to 687 TFLOP/s under the
power cap of 700 W (about 1500 MHz). Kernels are therefore raced in both states, in separate races.
A state describes how a race was run, not the clock: a small kernel may draw so little power that
the clock is equal in both states. The clock of each race is in the rows of the database.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelcat.store.races import BURST, LADDER, SUSTAINED

BLOCKS = 11
"""Blocks of a race: enough for 95 % intervals of 51 contestants, corrected for 50 comparisons."""
RECOVERED_CLOCK = 0.97
"""Fraction of the highest clock above which the chip counts as cool."""
REST_S = (0.005, 0.04)
"""The shortest and the longest rest before a block, in seconds."""


@dataclass(frozen=True)
class State:
    """How a race is run.

    Attributes
    ----------
    block_us : microseconds of work in a block; a slower kernel runs once
    rest : idle time before a block, as a multiple of the work in the block before it
    warm_up_s : seconds of work by the contestants before the first block
    """

    block_us: float
    rest: float = 0.0
    warm_up_s: float = 0.0

    def rest_s(self, work_us: float, clock: float) -> float:
        """Seconds of rest after a block.

        ``work_us`` is the duration of the block in microseconds, ``clock`` the clock at the end of
        the block as a fraction of the highest clock.
        """
        shortest, longest = REST_S
        if not self.rest:
            return 0.0
        if clock < RECOVERED_CLOCK:
            return longest
        return min(max(self.rest * work_us * 1e-6, shortest), longest)


_WITH_RESTS = State(block_us=2000.0, rest=5.0)

STATES = {
    BURST: _WITH_RESTS,
    SUSTAINED: State(block_us=6000.0, warm_up_s=2.0),
    LADDER: _WITH_RESTS,
}
"""Name -> state. ``ladder`` is run like ``burst``, but with every variant, also the slowest (see
`kernelcat ladder`): slow kernels let the chip cool, so there is no ladder on a hot chip."""

TUNED = (BURST, SUSTAINED)
"""The states in which a tune races, in this order: the sustained race leaves the chip hot."""

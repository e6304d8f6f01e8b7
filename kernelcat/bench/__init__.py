"""The measurement protocol: timers, races and their statistics.

Two numbers taken at different times on a GPU say nothing about each other: clocks follow heat
and power. So whatever is compared is *raced* (``race``), judged by paired differences
(``stats``), with L2 cold and the chip cool or hot on purpose (``states``); what the chip did is
recorded (``kernelcat.runtime.telemetry``).
"""

from kernelcat.bench.race import Contestant, copies_needed, race
from kernelcat.bench.states import BLOCKS, STATES, State
from kernelcat.bench.stats import Interval, RaceResult, decide, median_interval, ratio_interval
from kernelcat.bench.timer import REGIMES, CudaTimer, HostTimer, Timed, Timer

__all__ = [
    "BLOCKS",
    "REGIMES",
    "STATES",
    "Contestant",
    "CudaTimer",
    "HostTimer",
    "Interval",
    "RaceResult",
    "State",
    "Timed",
    "Timer",
    "copies_needed",
    "decide",
    "median_interval",
    "race",
    "ratio_interval",
]

"""The measurement protocol: timers, races and their statistics.

Times that were taken at different moments on a GPU cannot be compared: the clock follows heat and
power. Kernels that are compared are therefore *raced*: they take turns in one process (``race``)
and are judged by paired differences (``stats``). The L2 cache is cold, and the chip is cool or hot
on purpose (``states``). ``kernelcat.runtime.telemetry`` records clock, power and temperature.
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

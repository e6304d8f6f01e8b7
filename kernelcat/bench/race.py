"""Races: the contestants run in one process, in interleaved blocks of random order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kernelcat.bench.states import BLOCKS, State
from kernelcat.bench.timer import Timed
from kernelcat.runtime.telemetry import Reading

Key = TypeVar("Key", bound=Hashable)
"""Type by which the caller names contestants."""
Contender = TypeVar("Contender", bound=Hashable, contravariant=True)


class Sampler(Protocol):
    """Reads clock, power and temperature of the chip (:mod:`kernelcat.runtime.telemetry`)."""

    def read(self) -> Reading | None: ...


class Time(Protocol):
    """The functions of the module ``time`` that a race uses; tests pass a clock of their own."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


class Referee(Protocol[Contender]):
    """Checks the contestants between the timed blocks (:mod:`kernelcat.tune.referee`)."""

    def before(self, contestant: Contender, block: int) -> None:
        """Prepares the memory for block ``block`` of ``contestant``."""
        ...

    def after(self, contestant: Contender, one_pass: Callable[[], float]) -> bool:
        """Judges what the block wrote; False ends the race for ``contestant``.

        ``one_pass`` runs ``contestant`` on every copy once more.
        """
        ...


@dataclass
class Contestant:
    """One participant of a race.

    Attributes
    ----------
    timed : the kernel, ready to be timed
    samples : microseconds of one run, one sample for each block
    readings : state of the chip during the blocks, where the sampler can read the state
    """

    timed: Timed
    samples: list[float] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)

    def run(self, target_us: float, sampler: Sampler) -> None:
        """Runs one block of about ``target_us`` microseconds; adds a sample and a reading."""

        def observe() -> None:
            reading = sampler.read()
            if reading:
                self.readings.append(reading)

        self.samples.append(self.timed.block(target_us, observe))

    @property
    def clock(self) -> float:
        """The last SM clock that was read, over the highest clock; 1 without a reading."""
        last = self.readings[-1] if self.readings else None
        return last.sm_clock_mhz / last.max_clock_mhz if last else 1.0


def race(
    contestants: Mapping[Key, Contestant],
    sampler: Sampler,
    state: State,
    *,
    blocks: int = BLOCKS,
    seed: int = 0,
    announce: Callable[[Key], None] = lambda key: None,
    host: Time = time,
    referee: Referee[Key] | None = None,
) -> None:
    """Adds ``blocks`` samples to every contestant that ``referee`` does not send off.

    In each block every contestant runs once, in an order drawn with ``seed``. ``announce`` is
    called with the key of the contestant that runs next, so that a hang can be attributed. The
    referee works before the rest of a block and after the block.
    """
    order = list(contestants)
    shuffle = random.Random(seed)
    _warm_up(contestants, state, announce, host)
    rest_s = state.rest_s(state.block_us, clock=0.0)
    for block in range(blocks):
        for key in shuffle.sample(order, len(order)):
            announce(key)
            if referee:
                referee.before(key, block)
            host.sleep(rest_s)
            begin = host.monotonic()
            contestants[key].run(state.block_us, sampler)
            work_us = (host.monotonic() - begin) * 1e6
            rest_s = state.rest_s(work_us, contestants[key].clock)
            if referee and not referee.after(key, contestants[key].timed.one_pass):
                order.remove(key)


def _warm_up(
    contestants: Mapping[Key, Contestant], state: State, announce: Callable[[Key], None], host: Time
) -> None:
    """Runs the contestants by turns for ``state.warm_up_s`` seconds; records nothing."""
    end = host.monotonic() + state.warm_up_s
    while host.monotonic() < end:
        for key, contestant in contestants.items():
            announce(key)
            contestant.timed.block(state.block_us)


MAX_COPIES = 2048
"""Upper limit of the number of rotating copies."""
WARM_COPIES = 64
"""Number of copies where MAX_COPIES of them fit into half of the L2 cache.

The cache then stays warm with any number, and every copy costs time to write and to judge."""


def copies_needed(moved_bytes: int, bytes_each: int, l2_bytes: int, free_bytes: int) -> int:
    """Number of copies of a problem's arrays that keep the L2 cache cold.

    A run on each copy in turn moves at least three times the size of the L2 cache. The copies take
    at most 40 % of the free memory, and there are at most ``MAX_COPIES``; ``WARM_COPIES`` of a
    problem that is too small for a cold cache.

    Parameters
    ----------
    moved_bytes : bytes that one run reads and writes
    bytes_each : bytes of one copy
    l2_bytes : size of the L2 cache
    free_bytes : free memory of the device
    """
    wanted = -(-3 * l2_bytes // moved_bytes) if moved_bytes else 1
    if moved_bytes * MAX_COPIES <= l2_bytes // 2:
        wanted = min(wanted, WARM_COPIES)
    affordable = int(0.4 * free_bytes) // max(bytes_each, 1)
    return max(1, min(wanted, affordable, MAX_COPIES))

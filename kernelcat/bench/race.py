"""Races: everything that is compared runs in one process, in randomized interleaved blocks."""

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
"""What the caller names its contestants by."""


class Sampler(Protocol):
    def read(self) -> Reading | None: ...


class Time(Protocol):
    """What a race asks of the module ``time``; tests have one that nobody waits for."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


@dataclass
class Contestant:
    """One side of a race: its samples, in microseconds a run, and what the chip did meanwhile."""

    timed: Timed
    samples: list[float] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)

    def run(self, target_us: float, sampler: Sampler) -> None:
        def observe() -> None:
            reading = sampler.read()
            if reading:
                self.readings.append(reading)

        self.samples.append(self.timed.block(target_us, observe))

    @property
    def clock(self) -> float:
        """Share of the highest SM clock when last looked at; 1 where the chip does not tell."""
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
) -> None:
    """Fill every contestant's samples: one in each of ``blocks`` blocks, in a drawn order.

    ``announce`` gets the key of the contestant that runs next, so that a hang has a name.
    """
    order = list(contestants)
    shuffle = random.Random(seed)
    _warm_up(contestants, state, announce, host)
    rest_s = state.rest_s(state.block_us, clock=0.0)
    for _ in range(blocks):
        order = shuffle.sample(order, len(order))
        for key in order:
            announce(key)
            host.sleep(rest_s)
            begin = host.monotonic()
            contestants[key].run(state.block_us, sampler)
            work_us = (host.monotonic() - begin) * 1e6
            rest_s = state.rest_s(work_us, contestants[key].clock)


def _warm_up(
    contestants: Mapping[Key, Contestant], state: State, announce: Callable[[Key], None], host: Time
) -> None:
    """Run the contestants by turns, unobserved, for as long as ``state`` asks."""
    end = host.monotonic() + state.warm_up_s
    while host.monotonic() < end:
        for key, contestant in contestants.items():
            announce(key)
            contestant.timed.block(state.block_us)


COPIES = 2048
"""Rotating copies at most."""


def copies_needed(moved_bytes: int, bytes_each: int, l2_bytes: int, free_bytes: int) -> int:
    """How many copies of a problem's arrays keep L2 cold: runs on all move three times the L2.

    A run moves ``moved_bytes`` of a copy's ``bytes_each``. At most 40 % of the free memory is
    spent on them.
    """
    wanted = -(-3 * l2_bytes // moved_bytes) if moved_bytes else 1
    affordable = int(0.4 * free_bytes) // max(bytes_each, 1)
    return max(1, min(wanted, affordable, COPIES))

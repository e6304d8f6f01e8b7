"""Races: everything that is compared runs in one process, in randomized interleaved blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kernelcat.bench.timer import Timed
from kernelcat.telemetry import Reading

BLOCKS = 15
"""Blocks of a race: enough for a 95 % interval corrected for a dozen rivals."""
BLOCK_US = 6000.0
"""Length of a block; a lane slower than that runs once."""


class Sampler(Protocol):
    def read(self) -> Reading | None: ...


@dataclass
class Lane:
    """One contestant: its samples, in microseconds a run, and what the chip did meanwhile."""

    timed: Timed
    samples: list[float] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)

    def run(self, target_us: float, sampler: Sampler) -> None:
        def observe() -> None:
            reading = sampler.read()
            if reading:
                self.readings.append(reading)

        self.samples.append(self.timed.block(target_us, observe))


def race(
    lanes: Mapping[str, Lane],
    sampler: Sampler,
    *,
    blocks: int = BLOCKS,
    block_us: float = BLOCK_US,
    seed: int = 0,
    announce: Callable[[str], None] = lambda key: None,
) -> None:
    """Fill every lane's samples: ``blocks`` blocks, each lane once a block in a drawn order.

    ``announce`` is told which lane runs next, so that a hang has a name.
    """
    order: Sequence[str] = sorted(lanes)
    shuffle = random.Random(seed)
    for _ in range(blocks):
        order = shuffle.sample(order, len(order))
        for key in order:
            announce(key)
            lanes[key].run(block_us, sampler)


COPIES = 2048
"""Rotating copies at most."""


def copies_needed(bytes_each: int, l2_bytes: int, free_bytes: int) -> int:
    """How many copies of a problem's arrays keep L2 cold: three times the L2 in total.

    At most 40 % of the free memory is spent on them.
    """
    wanted = -(-3 * l2_bytes // max(bytes_each, 1))
    affordable = int(0.4 * free_bytes) // max(bytes_each, 1)
    return max(1, min(wanted, affordable, COPIES))

"""How long the kernels take that write new tokens into a paged cache."""

from __future__ import annotations

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.runtime.gpu import Gpu

ROW_US = 2.0
"""From the load of a row to its store: the kernel looks up a sequence, a position, a page and
angles, one after another."""
RESIDENT_THREADS = 1024
"""Threads that an SM holds at once."""


def write_us(bytes_moved: int, num_ctas: int, threads: int, unroll_us: float, gpu: Gpu) -> float:
    """Microseconds that the bandwidth allows, or that the waves of thread blocks take.

    ``unroll_us`` is what a thread's rows in flight add to the time of one row.
    """
    waves = num_ctas * threads / (gpu.sms * RESIDENT_THREADS)
    row_us = ROW_US + unroll_us + 0.0005 * threads
    return LAUNCH_US + max(copy_us(bytes_moved, gpu), waves * row_us) + row_us

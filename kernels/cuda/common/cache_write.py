"""What the kernels that write new tokens into a paged cache have in common on the host."""

from __future__ import annotations

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.runtime.gpu import Gpu

ROW_US = 2.0
"""From the load of a row to its store: the kernel looks up a sequence, a position, a page and
angles, one after another."""
RESIDENT_WARPS = 32
"""Warps that an SM holds at once."""


def rope_style(problem: Problem) -> str:
    """The template argument."""
    return f"kernelcat::RopeStyle::k{problem['style'].capitalize()}"


def write_us(bytes_moved: int, warps: float, config: Config, gpu: Gpu) -> float:
    """Microseconds that the bandwidth allows, or that the waves of warps take.

    Small thread blocks fill the SMs more evenly.
    """
    row_us = ROW_US + 0.1 * config["unroll"] + 0.0002 * config["threads"]
    waves = warps / (gpu.sms * RESIDENT_WARPS)
    return LAUNCH_US + max(copy_us(bytes_moved, gpu), waves * row_us) + row_us

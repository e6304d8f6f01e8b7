"""What the kernels that write new tokens into a paged cache have in common on the host."""

from __future__ import annotations

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Int32
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.common.paged_cache import page_bits, scales
from kernelcat.runtime.gpu import Gpu

ROW_US = 2.0
"""From the load of a row to its store: the kernel looks up a sequence, a position, a page and
angles, one after another."""
RESIDENT_WARPS = 32
"""Warps that an SM holds at once."""
SIZES = ("tokens", "batch", "heads", "kv_heads", "table_width")


def rope_style(problem: Problem) -> str:
    """The template argument."""
    return f"kernelcat::RopeStyle::k{problem['style'].capitalize()}"


def num_heads(problem: Problem) -> int:
    """Heads of a token's queries, keys and values."""
    return int(problem["heads"] + 2 * problem["kv_heads"])


def head_writer(problem: Problem, variant: str, *constants: int) -> CudaSource:
    """The kernel ``variant`` of the problem's entry; ``constants`` are its last arguments."""
    arguments = (
        *(f"kernelcat::{problem[name]}" for name in ("dtype", "kv_dtype")),
        str(problem["head_dim"]),
        rope_style(problem),
        scales(problem),
        *map(str, constants),
    )
    kernel = f"{problem.entry}_{variant}"
    return CudaSource(
        f"{problem.entry}/{variant}.cu", f"kernelcat::{kernel}<{', '.join(arguments)}>"
    )


def head_sizes(problem: Problem) -> tuple[Int32, ...]:
    """tokens, batch, heads, kv_heads, table_width, page_bits and rotary_dim."""
    sizes = (*(problem[name] for name in SIZES), page_bits(problem), problem["rotary_dim"])
    return tuple(map(Int32, sizes))


def write_us(bytes_moved: int, warps: float, config: Config, gpu: Gpu) -> float:
    """Microseconds that the bandwidth allows, or that the waves of warps take.

    Small thread blocks fill the SMs more evenly.
    """
    row_us = ROW_US + 0.1 * config["unroll"] + 0.0002 * config["threads"]
    waves = warps / (gpu.sms * RESIDENT_WARPS)
    return LAUNCH_US + max(copy_us(bytes_moved, gpu), waves * row_us) + row_us

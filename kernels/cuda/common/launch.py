"""What launches of CUDA kernels share: the name of a kernel in C++, and the limits of grids and
clusters."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.implementation import Param, Program, Step
from kernelcat.jit.cuda import CudaSource

MAX_BLOCKS = 2**31 - 1
"""Thread blocks that a grid can have along x."""


def instance(path: str, kernel: str, *arguments: str | int | bool) -> CudaSource:
    """The kernel of the file ``path`` (``gemm/wgmma.cu``) with these template arguments.

    Strings are names in the namespace ``kernelcat``: ``"bfloat16"``, ``"Activation::kSilu"``.
    """
    words = ", ".join(map(_cpp, arguments))
    return CudaSource(path, f"kernelcat::{kernel}<{words}>" if words else f"kernelcat::{kernel}")


def _cpp(argument: str | int | bool) -> str:
    if isinstance(argument, bool):
        return "true" if argument else "false"
    return f"kernelcat::{argument}" if isinstance(argument, str) else str(argument)


def why_no_grid(num_blocks: int) -> str | None:
    """Why no grid has ``num_blocks`` thread blocks along x, or None."""
    if num_blocks <= MAX_BLOCKS:
        return None
    return f"{num_blocks} thread blocks are more than the {MAX_BLOCKS} of a grid"


def grid_stride_launch(
    source: CudaSource,
    params: tuple[Param, ...],
    num_items: int,
    *,
    items_per_block: int,
    threads: int,
) -> Program:
    """A launch whose thread blocks go over any number of items, the whole grid at a stride.

    Nothing is launched without items.
    """
    num_blocks = min(ceil(num_items / items_per_block), MAX_BLOCKS)
    if num_blocks == 0:
        return Program(())
    return Program((Step(source, (num_blocks, 1, 1), params, threads),))

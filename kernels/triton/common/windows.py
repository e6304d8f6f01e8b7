"""What launches over several ranks share: arguments, slots and times."""

from __future__ import annotations

from kernelcat.catalog.implementation import Rank, Window
from kernelcat.jit import triton
from kernelcat.kernels.cuda.common.windows import NVLINK
from kernelcat.reference.all_reduce import MAX_RANKS
from kernelcat.runtime.gpu import Gpu

PROGRAM_RATE = 4e9
"""Bytes per second that a program sends."""


def window_arguments() -> dict[str, triton.Argument]:
    """The launching rank, and all ranks' windows from its own on."""
    windows = {f"window{shift}": triton.Argument("i64", (Window(shift=shift),), 16)
               for shift in range(MAX_RANKS)}  # fmt: skip
    return {"rank": triton.Argument("i32", (Rank(),)), **windows}


def wire_us(num_bytes: float, num_programs: int) -> float:
    """Microseconds in which so many programs send ``num_bytes`` to other GPUs."""
    return num_bytes / min(NVLINK, PROGRAM_RATE * max(num_programs, 1)) * 1e6


def why_not_resident(num_programs: int, gpu: Gpu) -> str | None:
    """Programs wait for each other across ranks, so all of them must run at once."""
    if num_programs > gpu.sms:
        return f"{num_programs} programs wait for each other on {gpu.sms} SMs"
    return None

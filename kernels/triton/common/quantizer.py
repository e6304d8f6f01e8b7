"""Kernels that quantize to float8_e4m3fn, x -> (q, scale): their launch and its predicted time."""

from math import ceil

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import ConfigValue, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.runtime.gpu import Gpu

TECHNIQUES = {"fp8_convert": "F2FP.SATFINITE.E4M3"}


def launch(
    kernel: str,
    problem: Problem,
    axis: str,
    constants: dict[str, ConfigValue],
    *,
    rows: int,
    cols: int,
    warps: int,
) -> Program:
    """One launch of ``kernel``: ``rows`` x ``cols`` elements of x (M, ``axis``) a program."""
    m, n, dtype = problem["M"], problem[axis], problem["dtype"]
    if m == 0 or n == 0:
        return Program(())
    step = triton.step(
        kernel,
        (ceil(m / rows) * ceil(n / cols), 1, 1),
        {
            "x": triton.pointer("x", dtype),
            "q": triton.pointer("q", "float8_e4m3fn"),
            "scale": triton.pointer("scale", "float32"),
            "M": triton.integer(m, divisor=1),
            axis: triton.integer(n),
        },
        constants,
        num_warps=warps,
    )
    return Program((step,))


def launch_us(bytes_moved: int, num_programs: int, in_flight: float, gpu: Gpu) -> float:
    """Memory time; longer where programs are fewer than SMs or threads hold few elements.

    ``in_flight`` is what a thread loads at once, divided by what hides the latency of memory.
    """
    busy = min(1.0, max(1, num_programs) / gpu.sms) * min(1.0, 0.4 + in_flight)
    return cost_model.copy_us(bytes_moved, gpu, cost_model.BANDWIDTH_EFFICIENCY * busy)

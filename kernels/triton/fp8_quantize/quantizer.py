"""Kernels x -> (q, scale): their launch and its time, as `fp8_swiglu` has them too."""

from math import ceil

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import ConfigValue, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.runtime.gpu import Gpu

ARCHS = ("sm_89+",)  # the first with an instruction that converts to float8_e4m3fn
TECHNIQUES = {"fp8_convert": "F2FP.SATFINITE.E4M3"}


def launch(
    kernel: str,
    problem: Problem,
    axis: str,
    constants: dict[str, ConfigValue],
    *,
    rows: int,
    width: int,
    warps: int,
) -> Program:
    """One launch of ``kernel``: ``rows`` x ``width`` elements of x (M, ``axis``) a program."""
    m, cols, dtype = problem["M"], problem[axis], problem["dtype"]
    if m == 0 or cols == 0:
        return Program(())
    step = triton.step(
        kernel,
        (ceil(m / rows) * ceil(cols / width), 1, 1),
        {
            "x": triton.pointer("x", dtype),
            "q": triton.pointer("q", "float8_e4m3fn"),
            "scale": triton.pointer("scale", "float32"),
            "M": triton.integer(m, divisor=1),
            axis: triton.integer(cols),
        },
        constants,
        num_warps=warps,
    )
    return Program((step,))


def launch_us(bytes_moved: int, programs: int, in_flight: float, gpu: Gpu) -> float:
    """Memory time; longer where programs are fewer than SMs or threads hold few elements.

    ``in_flight`` is what a thread holds, as a share of what it takes to hide the latency.
    """
    busy = min(1.0, max(1, programs) / gpu.sms) * min(1.0, 0.4 + in_flight)
    return cost_model.copy_us(bytes_moved, gpu, cost_model.BANDWIDTH_EFFICIENCY * busy)

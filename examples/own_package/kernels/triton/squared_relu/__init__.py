"""`squared_relu` in Triton: one block of elements a program."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.reference.squared_relu import ENTRY
from kernelcat.runtime.gpu import Gpu

KERNEL = "kernelcat.kernels.triton.squared_relu.device:square"


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    elements = problem["M"] * problem["N"]
    if not elements:
        return Program(())
    arguments = {
        tensor.name: triton.pointer(tensor.name, tensor.dtype_of(problem))
        for tensor in ENTRY.tensors
    }
    arguments["n"] = triton.integer(elements, divisor=1)
    grid = (ceil(elements / config["block"]), 1, 1)
    step = triton.step(KERNEL, grid, arguments, {"BLOCK": config["block"]}, num_warps=4)
    return Program((step,))


IMPLEMENTATIONS = (
    Implementation(
        entry="squared_relu",
        language="triton",
        variant="naive",
        summary="one block of elements a program",
        archs=("sm_80+",),
        space={"block": (1024, 2048, 4096)},
        program=_program,
        estimate=lambda problem, config, gpu: copy_us(ENTRY.bytes_moved(problem), gpu),
    ),
)

"""The baseline of `moe_mlp`: the baselines of `moe_route` and `moe_gemm`, for every format."""

from __future__ import annotations

from kernelcat.catalog.cost_model import LAUNCH_US
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cute import moe_gemm
from kernelcat.kernels.cute.moe_mlp import parts
from kernelcat.kernels.cute.moe_mlp.parts import Part
from kernelcat.reference._moe_parts import is_empty, product_names, products
from kernelcat.runtime.gpu import Gpu


def _parts(problem: Problem, gpu: Gpu) -> tuple[Part, ...]:
    """Routing and both products, of which the second one adds up; quantization before each."""
    first, second = products(problem)
    product, names = moe_gemm.NAIVE, product_names(problem, 2)
    quantize = parts.quantizing(problem, "naive", gpu)
    return (
        parts.routing(problem, "naive", gpu),
        *quantize[:1],
        parts.by_default("the first product", product, first, gpu, product_names(problem, 1)),
        *quantize[1:],
        parts.by_default("the second product", product, second, gpu, names),
    )


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    return parts.program(problem, _parts(problem, gpu), gpu)


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return None if is_empty(problem) else parts.why_not(problem, _parts(problem, gpu), gpu)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return LAUNCH_US if is_empty(problem) else parts.estimate(_parts(problem, gpu), gpu)


IMPLEMENTATION = Implementation(
    entry="moe_mlp",
    language="cute",
    variant="naive",
    summary="a thread for each element of both products; every format",
    archs=("sm_80+",),
    space={},
    illegal=_illegal,
    program=_program,
    estimate=_estimate,
    rank=0,
)

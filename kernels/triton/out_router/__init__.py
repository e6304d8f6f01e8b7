"""`out_router` in Triton: naive (a kernel for each formula)."""

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, ConfigValue, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common.grid import MAX_GRID_Y
from kernelcat.reference.out_router import ENTRY
from kernelcat.runtime.gpu import Gpu

KERNELS = "kernelcat.kernels.triton.out_router.device:"
NAIVE_ROWS, NAIVE_BLOCK_K = 32, 128
"""Rows and columns of weights that a program multiplies at a time."""


def _pointers(problem: Problem, *names: str) -> dict[str, triton.Argument]:
    types = {tensor.name: tensor.dtype_of(problem) for tensor in ENTRY.tensors}
    return {name: triton.pointer(name, types[name]) for name in names}


def _sizes(problem: Problem, *names: str) -> dict[str, triton.Argument]:
    return {name: triton.integer(problem[name]) for name in names}


# ---- naive ---------------------------------------------------------------------------------------


def _naive_step(
    kernel: str,
    problem: Problem,
    num_rows: int,
    arguments: dict[str, triton.Argument],
    **constants: ConfigValue,
) -> Step:
    """A launch with programs for each token and for each NAIVE_ROWS of ``num_rows`` rows."""
    grid = (problem["tokens"], ceil(num_rows / NAIVE_ROWS), 1)
    constants = {**constants, "BLOCK_K": NAIVE_BLOCK_K}
    return triton.step(KERNELS + kernel, grid, arguments, constants, num_warps=4)


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if not problem["tokens"]:
        return Program(())
    project = _naive_step(
        "project", problem, problem["hidden"],
        _pointers(problem, "attn", "wo", "bo", "residual") | _sizes(problem, "width", "hidden"),
        BIAS=problem["bias"], BLOCK_N=NAIVE_ROWS,
    )  # fmt: skip
    normalize = _naive_step(
        "normalize", problem, 1,
        _pointers(problem, "residual", "norm_weight", "x")
        | _sizes(problem, "hidden")
        | {"eps": triton.real(problem["eps"])},
    )  # fmt: skip
    route = _naive_step(
        "route", problem, problem["experts"],
        _pointers(problem, "x", "router", "router_bias", "logits")
        | _sizes(problem, "hidden", "experts"),
        BIAS=problem["router_bias"], BLOCK_E=NAIVE_ROWS,
    )  # fmt: skip
    steps = (project, normalize) if problem["hidden"] else ()
    return Program((*steps, route) if problem["experts"] else steps)


def _illegal_naive(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    for axis in ("hidden", "experts"):
        if problem[axis] > MAX_GRID_Y * NAIVE_ROWS:
            return (
                f"{axis}={problem[axis]} takes more than {MAX_GRID_Y} programs of {NAIVE_ROWS} "
                "rows, the most on a second axis"
            )
    return None


def _estimate_naive(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Every token reads all weights again, mostly from L2."""
    return 3 * LAUNCH_US + 2 * copy_us(max(problem["tokens"], 1) * ENTRY.bytes_moved(problem), gpu)


NAIVE = Implementation(
    entry="out_router",
    language="triton",
    variant="naive",
    summary="a kernel for each formula, a token's elements a program; any shape",
    archs=("sm_80+",),
    space={},
    illegal=_illegal_naive,
    program=_naive,
    estimate=_estimate_naive,
    rank=0,
)

IMPLEMENTATIONS = (NAIVE,)

"""`out_router` for few tokens: weights stream once through rings in shared memory.

The first launch adds to the residual. The second normalizes the residual, once that is complete,
and multiplies the rows by the router, whose weights it loads while the first launch runs.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.implementation import (
    Config,
    Float32,
    Implementation,
    Int32,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.common.streamed_product import (
    CHUNK_COLS,
    GROUP_ROWS,
    SPACE,
    StreamedProduct,
    unpromising_product,
    why_no_room,
    why_not_streamed,
)
from kernelcat.runtime.gpu import Gpu

PROJECT_EXTRA_BYTES = 8
"""Bytes of ResidualOutput::Extra: two biases and two elements of the residual."""
ROUTE_EXTRA_BYTES = 4
"""Bytes of RouterOutput::Extra: two biases."""
ROUTE_WARPS = 16
ROUTE_TOKENS = {2: 16, 4: 16, 6: 8, 8: 8}
"""Chunks of a warp in a stage -> tokens at most of a thread block that computes logits; a thread
holds both in registers."""
ROUTE_US = 0.7
"""From the first launch's end: loads of h and of the norm's weights, products, sums, stores."""


def _projection(problem: Problem, config: Config, gpu: Gpu) -> StreamedProduct:
    return StreamedProduct.of(
        problem["hidden"], problem["width"], problem["tokens"], PROJECT_EXTRA_BYTES, config, gpu
    )


def _routing(problem: Problem) -> StreamedProduct:
    """The product of a thread block that computes logits of eight experts.

    A stage has whole rows of the router, up to 4096 columns; two stages take turns at longer rows.
    """
    hidden, warp_cols = problem["hidden"], CHUNK_COLS * ROUTE_WARPS
    chunks = next((c for c in ROUTE_TOKENS if c * warp_cols >= hidden), max(ROUTE_TOKENS))
    return StreamedProduct(
        GROUP_ROWS,
        hidden,
        min(problem["tokens"], ROUTE_TOKENS[chunks]),
        ROUTE_EXTRA_BYTES,
        sms=1,
        stage_cols=chunks * warp_cols,
        num_warps=ROUTE_WARPS,
        num_stages=1 if chunks * warp_cols >= hidden else 2,
    )


def _num_route_blocks(problem: Problem) -> int:
    """Thread blocks of the second launch: each has eight experts' logits, or normalizes a token."""
    tokens, groups = problem["tokens"], ceil(problem["experts"] / GROUP_ROWS)
    return groups * ceil(tokens / _routing(problem).padded_tokens) + tokens


def later_waves_us(problem: Problem, gpu: Gpu) -> float:
    """Time of the second launch after its first wave of thread blocks, of which an SM holds one."""
    if not problem["tokens"]:
        return 0.0
    return (ceil(_num_route_blocks(problem) / gpu.sms) - 1) * _routing(problem).us(gpu)


def _project_step(problem: Problem, config: Config, gpu: Gpu) -> Step:
    product = _projection(problem, config, gpu)
    return Step(
        instance("out_router/streamed.cu", "out_router_project", problem["dtype"],
                 *product.constants),
        (product.grid, 1, 1),
        (
            *map(Pointer, ("attn", "wo", "bo", "residual")),
            *(Int32(problem[axis]) for axis in ("tokens", "width", "hidden")),
        ),
        product.num_threads,
        product.shared_bytes,
        programmatic=True,
    )  # fmt: skip


def route_step(problem: Problem) -> Step:
    """The launch that normalizes the residual and computes the logits."""
    product = _routing(problem)
    tokens, hidden, experts = (problem[axis] for axis in ("tokens", "hidden", "experts"))
    padded_tokens, _, *constants = product.constants  # of a single group
    return Step(
        instance("out_router/streamed.cu", "out_router_route", problem["dtype"], padded_tokens,
                 *constants),
        (_num_route_blocks(problem), 1, 1),
        (
            *map(Pointer, ("residual", "norm_weight", "router", "router_bias", "x", "logits")),
            *(Int32(size) for size in (tokens, hidden, experts)),
            Float32(problem["eps"]),
        ),
        product.num_threads,
        product.shared_bytes,
        programmatic=True,
    )  # fmt: skip


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if not problem["tokens"]:
        return Program(())
    project = (_project_step(problem, config, gpu),) if problem["hidden"] else ()
    return Program((*project, route_step(problem)))


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    columns = {axis: problem[axis] for axis in ("width", "hidden")}
    if why := why_not_streamed(problem["tokens"], config, **columns):
        return why
    return why_no_room(_projection(problem, config, gpu), gpu)


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return unpromising_product(_projection(problem, config, gpu))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The second launch begins while the first runs."""
    return _projection(problem, config, gpu).us(gpu) + ROUTE_US + later_waves_us(problem, gpu)


IMPLEMENTATION = Implementation(
    entry="out_router",
    language="cuda",
    variant="streamed",
    summary="for few tokens: bulk copies of rows into a ring, mma.sync; two launches that overlap",
    archs=("sm_90+",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    program=_program,
    estimate=_estimate,
    techniques={
        "mma.sync": "HMMA",
        "bulk copies": "UBLKCP",
        "mbarrier": "SYNCS",
        "dependent launch": "ACQBULK",
    },
    rank=1,
)

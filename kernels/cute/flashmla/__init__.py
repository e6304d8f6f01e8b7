"""`flashmla` in CuTe DSL."""

from __future__ import annotations

from kernelcat.gpu import Gpu
from kernelcat.implementation import Config, Implementation, Program, Step
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cute.gemm.program import fastest
from kernelcat.kernels.cute.flashmla.program import (
    SIZES,
    attend,
    compiled_in,
    grid_reject,
    is_empty,
    is_packed,
    parameters,
    row_tiles,
    splits_reject,
    tensor_kinds,
    why_not,
)
from kernelcat.model import LAUNCH_US
from kernelcat.reference._mla_row import PACKED
from kernelcat.reference.flashmla import ENTRY
from kernelcat.spec import Problem

UNVERIFIED = "not yet run on a GPU"
NAIVE_WARPS = 4


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    kinds = (*tensor_kinds(problem), *["int32"] * len(SIZES), "float32")
    source = CuteSource("flashmla.naive:Naive", kinds, tuple(compiled_in(problem).items()))
    grid = (problem["tokens"], -(-problem["heads"] // NAIVE_WARPS), 1)
    return Program((Step(source, grid, parameters(problem), block=32 * NAIVE_WARPS),))


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return LAUNCH_US + ENTRY.flops(problem) / (0.02 * gpu.flops["float32"]) * 1e6


NAIVE = Implementation(
    entry="flashmla",
    language="cute",
    variant="naive",
    summary="one warp, one query of one head, token after token; any shape",
    archs=("sm_80+",),
    space={},
    reject=lambda config, problem, gpu: why_not(problem, gpu),
    default=lambda problem, gpu: Config(),
    program=_naive_program,
    estimate=_naive_estimate,
    techniques={"warp shuffle": "SHFL.BFLY"},
    rank=0,
    unverified=UNVERIFIED,
)

# wgmma ------------------------------------------------------------------------------------------

WGMMA_BLOCK = 64
WGMMA_SPLITS = (1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 44, 66)


def _wgmma_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if reason := why_not(problem, gpu) or grid_reject(problem):
        return reason
    if is_packed(problem):
        return f"rows of {PACKED} bytes are read by split"
    if problem["page_size"] % WGMMA_BLOCK:
        return f"pages of {problem['page_size']} tokens are no whole tiles of {WGMMA_BLOCK}"
    if row_tiles(problem, WGMMA_BLOCK) % config["cluster"]:
        return "an odd number of tiles of rows leaves one alone"
    return splits_reject(problem, WGMMA_BLOCK, WGMMA_BLOCK, config["splits"], gpu.sms)


def _wgmma_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    constants = {"block_n": WGMMA_BLOCK, "cluster": config["cluster"]}
    return attend(
        problem, gpu, "wgmma:Wgmma", constants, block_m=WGMMA_BLOCK, splits=config["splits"],
        threads=384, cluster=config["cluster"],
    )  # fmt: skip


def _wgmma_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return 1.0


WGMMA: Implementation = Implementation(
    entry="flashmla",
    language="cute",
    variant="wgmma",
    summary="64 rows, pages by TMA, two warpgroups that halve the values and share the weights",
    archs=("sm_90a",),
    space={"cluster": (1, 2), "splits": WGMMA_SPLITS},
    reject=_wgmma_reject,
    default=fastest(lambda: WGMMA),
    program=_wgmma_program,
    estimate=_wgmma_estimate,
    techniques={
        "tma": "UTMALDG",
        "wgmma": "HGMMA",
        "mbarrier": "SYNCS",
        "register reallocation": "USETMAXREG",
        "stmatrix": "STSM",
        "dependent launch": "ACQBULK",
    },
    rank=3,
    unverified=UNVERIFIED,
)

IMPLEMENTATIONS = (NAIVE, WGMMA)

"""`gemm` in CuTe DSL: naive, mma.sync, TMA and WGMMA on Hopper, tcgen05 on Blackwell.

The device code is in modules that import the DSL; they are imported when a kernel is compiled.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from kernelcat.catalog.cost_model import tiled_gemm_us
from kernelcat.catalog.implementation import Config, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cute.common.matmul import (
    exceeds_shared,
    illegal_naive,
    is_empty,
    naive_program,
    naive_us,
    span,
)
from kernelcat.kernels.cute.gemm.hopper import SKINNY, WGMMA
from kernelcat.kernels.cute.gemm.program import illegal_tma, params, persistent, source
from kernelcat.runtime.gpu import Gpu

BLOCK_K = 64

# naive ------------------------------------------------------------------------------------------


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    kernel, num_cols = source("naive:Naive", problem, 3), problem["N"] // span(problem)
    return naive_program(kernel, problem, params(problem), num_cols)


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return naive_us(problem, gpu, 0.012)


NAIVE = Implementation(
    entry="gemm",
    language="cute",
    variant="naive",
    summary="a thread for each element; any shape",
    archs=("sm_80+",),
    space={},
    illegal=illegal_naive,
    program=_naive_program,
    estimate=_naive_estimate,
    rank=0,
)

# tiled ------------------------------------------------------------------------------------------


def _illegal_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["K"] % 8:
        return f"K={problem['K']} must be a multiple of 8: rows are copied 16 bytes at a time"
    return exceeds_shared(
        2 * BLOCK_K * (config["block_m"] + config["block_n"]) * config["stages"], gpu
    )


def _tiled_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    kernel = source(
        "tiled:Tiled",
        problem,
        3,
        block_m=config["block_m"],
        block_n=config["block_n"],
        num_stages=config["stages"],
        is_paired=problem["N"] % 2 == 0,
    )
    num_tiles = ceil(problem["M"] / config["block_m"]) * ceil(problem["N"] / config["block_n"])
    block = 2 * config["block_n"]
    return Program((Step(kernel, (num_tiles, 1, 1), params(problem), block=block),))


def _tiled_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return tiled_gemm_us(
        problem["M"],
        problem["N"],
        problem["K"],
        block_m=config["block_m"],
        block_n=config["block_n"],
        split_k=1,
        gpu=gpu,
        dtype=problem["dtype"],
        blocks_per_sm=max(1, 256 // (config["block_m"] + config["block_n"])),
        efficiency=0.55 if gpu.arch == "sm_90a" else 0.75,
    )


TILED = Implementation(
    entry="gemm",
    language="cute",
    variant="tiled",
    summary="cp.async stages, ldmatrix and mma.sync",
    archs=("sm_80+",),
    space={"block_m": (64, 128), "block_n": (64, 128), "stages": (3,)},
    illegal=_illegal_tiled,
    program=_tiled_program,
    estimate=_tiled_estimate,
    techniques={"cp.async": "LDGSTS", "ldmatrix": "LDSM", "mma.sync": "HMMA"},
    rank=1,
)

# tcgen05 ----------------------------------------------------------------------------------------


def _illegal_tcgen05(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return illegal_tma(problem)


def _unpromising_tcgen05(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if config["ctas"] == 2 and problem["M"] <= 128:
        return f"the second SM of a pair has no rows at M={problem['M']}"
    return None


def _tcgen05_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    kernel, ctas = source("tcgen05:Tcgen05", problem, 4, **config), config["ctas"]
    num_tiles = ceil(problem["M"] / (128 * ctas)) * ceil(problem["N"] / config["block_n"])
    num_ctas = min(num_tiles, gpu.sms // ctas) * ctas
    return persistent(kernel, problem, num_ctas, block=192, cluster=ctas)


def _tcgen05_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """A GPU of SM pairs has half as many SMs, each twice as fast."""
    pairs = replace(gpu, sms=gpu.sms // config["ctas"])
    return tiled_gemm_us(
        problem["M"],
        problem["N"],
        problem["K"],
        block_m=128 * config["ctas"],
        block_n=config["block_n"],
        split_k=1,
        gpu=pairs,
        dtype=problem["dtype"],
        efficiency=0.75,
    )


TCGEN05 = Implementation(
    entry="gemm",
    language="cute",
    variant="tcgen05",
    summary="Blackwell, persistent: TMA ring, tcgen05 by pairs of SMs, two accumulators",
    archs=("sm_100a", "sm_103a"),
    space={"block_n": (256, 128, 64), "ctas": (2, 1)},
    illegal=_illegal_tcgen05,
    unpromising=_unpromising_tcgen05,
    program=_tcgen05_program,
    estimate=_tcgen05_estimate,
    techniques={"tma": "UTMALDG", "tcgen05": "UTCHMMA", "tensor memory": "LDTM"},
    rank=4,
    unverified="needs a Blackwell GPU",
)

IMPLEMENTATIONS = (NAIVE, TILED, WGMMA, SKINNY, TCGEN05)

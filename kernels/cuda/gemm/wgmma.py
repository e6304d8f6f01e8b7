"""`gemm` by wgmma on Hopper: tile shapes, split k and tile order are tuned, stages follow."""

from __future__ import annotations

from math import ceil

from kernelcat.gpu import KB, Gpu
from kernelcat.implementation import (
    Config,
    Implementation,
    Int32,
    Int64,
    Param,
    Pointer,
    Program,
    Step,
    TensorMap,
)
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.gemm.operands import BLOCK_K, operand_map, why_not_tma
from kernelcat.model import tiled_gemm_us
from kernelcat.spec import Problem

MAX_STAGES = 8
MIN_STAGES = 3
NULL = Int64(0)

SPACE = {
    "block_m": (64, 128, 256),
    "block_n": (32, 64, 128, 192, 256),
    "split_k": (1, 2, 3, 4, 6, 8, 12, 16),
    "group_m": (8, 16),
}

_EFFICIENCY = {32: 0.45, 64: 0.60, 128: 0.75, 192: 0.78, 256: 0.82}
"""BLOCK_N -> share of the tensor cores' peak; narrow instructions leave gaps between them."""

_REDUCTION_US = 1.5
"""Handing partial sums to the block that arrives last."""


def tiles(problem: Problem, config: Config) -> int:
    return ceil(problem["M"] / config["block_m"]) * ceil(problem["N"] / config["block_n"])


def consumers(config: Config) -> int:
    """Warpgroups that multiply; one more loads."""
    return 1 if config["block_m"] == 64 else 2


def chunk_cols(config: Config) -> int:
    """Columns of D that leave through shared memory at a time."""
    return next(cols for cols in (64, 32, 16) if config["block_n"] % cols == 0)


def num_stages(config: Config, gpu: Gpu) -> int:
    """As many as fit beside the output chunks, the barriers (under 256 bytes) and the alignment."""
    stage = (config["block_m"] + config["block_n"]) * BLOCK_K * 2
    return min((gpu.shared_bytes - _fixed_shared(config)) // stage, MAX_STAGES)


def shared_bytes(config: Config, gpu: Gpu) -> int:
    stage = (config["block_m"] + config["block_n"]) * BLOCK_K * 2
    return int(num_stages(config, gpu) * stage + _fixed_shared(config))


def _fixed_shared(config: Config) -> int:
    return consumers(config) * 2 * 64 * chunk_cols(config) * 2 + KB + 256


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    m, n, k, dtype = (problem[axis] for axis in ("M", "N", "K", "dtype"))
    split_k, num_tiles = config["split_k"], tiles(problem, config)
    if num_tiles == 0:
        return Program(())
    map_a = operand_map("a", problem, m, config["block_m"])
    map_b = operand_map("b", problem, n, config["block_n"])
    by_tma, cols = n % 8 == 0, chunk_cols(config)
    map_d = TensorMap("d", dtype, (n, m), (2 * n,), (cols, 64), 2 * cols) if by_tma else map_a
    arguments = (
        f"kernelcat::{dtype}, {config['block_m']}, {config['block_n']}, "
        f"{num_stages(config, gpu)}, {'true' if by_tma else 'false'}"
    )
    params: tuple[Param, ...] = (
        map_a,
        map_b,
        map_d,
        Pointer("bias"),
        Pointer("d"),
        Pointer("partials") if split_k > 1 else NULL,
        Pointer("counters") if split_k > 1 else NULL,
        *map(Int32, (m, n, k, split_k, config["group_m"])),
    )
    step = Step(
        CudaSource("gemm/wgmma.cu", f"kernelcat::gemm_wgmma<{arguments}>"),
        (min(num_tiles * split_k, gpu.sms), 1, 1),
        params,
        128 * (consumers(config) + 1),
        shared_bytes(config, gpu),
    )
    return Program((step,), _workspaces(problem, config))


def _workspaces(problem: Problem, config: Config) -> dict[str, int]:
    if config["split_k"] == 1:
        return {}
    num_tiles, tile_bytes = tiles(problem, config), 4 * config["block_m"] * config["block_n"]
    return {
        "partials": num_tiles * config["split_k"] * tile_bytes,
        "counters": num_tiles * consumers(config) * 4,
    }


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if config["block_m"] // consumers(config) * config["block_n"] > 128 * 128:
        return "the accumulators of 128 x 192 a warpgroup and more do not fit in registers"
    if num_stages(config, gpu) < MIN_STAGES:
        return f"fewer than {MIN_STAGES} stages fit in {gpu.shared_bytes} bytes of shared memory"
    return (
        why_not_tma(problem)
        or _reject_tile(config, problem, gpu)
        or _reject_split(config, problem, gpu)
    )


def _reject_tile(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    """Tiles that cannot win: mostly empty, or so small that operands are read too often."""
    block_m, block_n, m, n = config["block_m"], config["block_n"], problem["M"], problem["N"]
    if block_m > 64 and block_m >= 2 * m:
        return f"tiles of {block_m} rows are mostly empty at M={m}"
    if block_n > 32 and block_n >= 2 * n:
        return f"tiles of {block_n} columns are mostly empty at N={n}"
    narrow = block_n < min(n, 128) and tiles(problem, config) > 8 * gpu.sms
    if narrow or (block_m == 64 and m > 512):
        return f"tiles of {block_m} x {block_n} are too small for {m} x {n}"
    if config["group_m"] != SPACE["group_m"][0] and ceil(m / block_m) <= SPACE["group_m"][0]:
        return "all tile rows are in one group already"
    return None


def _reject_split(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    split_k, blocks = config["split_k"], ceil(problem["K"] / BLOCK_K)
    if split_k == 1:
        return None
    if split_k * 2 > blocks:
        return f"K={problem['K']} has {blocks} blocks of {BLOCK_K}, too few for {split_k} splits"
    if tiles(problem, config) * split_k > gpu.sms:
        return f"{tiles(problem, config)} tiles in {split_k} splits are more than {gpu.sms} SMs"
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    us = tiled_gemm_us(
        problem["M"],
        problem["N"],
        problem["K"],
        block_m=config["block_m"],
        block_n=config["block_n"],
        split_k=config["split_k"],
        gpu=gpu,
        dtype=problem["dtype"],
        efficiency=_EFFICIENCY[config["block_n"]] * (0.85 if consumers(config) == 1 else 1.0),
    )
    return us + (_REDUCTION_US if config["split_k"] > 1 else 0.0)


def _default(problem: Problem, gpu: Gpu) -> Config:
    """The best by the model."""
    serving = IMPLEMENTATION.configs(problem, gpu)
    fallback = Config(block_m=64, block_n=32, split_k=1, group_m=8)
    return min(serving, key=lambda config: _estimate(problem, config, gpu), default=fallback)


IMPLEMENTATION = Implementation(
    entry="gemm",
    language="cuda",
    variant="wgmma",
    summary="persistent, warp-specialized: TMA fills a ring that wgmma empties; split k",
    archs=("sm_90a",),
    space=SPACE,
    reject=_reject,
    default=_default,
    program=_program,
    estimate=_estimate,
    techniques={
        "wgmma": "HGMMA",
        "tma": "UTMALDG",
        "mbarrier": "SYNCS",
        "register reallocation": "USETMAXREG",
        "stmatrix": "STSM",
    },
    rank=3,
)

"""`fp8_gemm` in CuTe DSL: naive, TMA with WGMMA on Hopper, with tcgen05 on Blackwell.

The device code is in modules that import the DSL; they are imported when something is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import (
    L2_TO_DRAM,
    LAUNCH_US,
    TENSOR_EFFICIENCY,
    WAVE_LATENCY_US,
    copy_us,
)
from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    Int64,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cute.gemm.program import fastest, is_empty, why_not_naive
from kernelcat.runtime.gpu import Gpu

BLOCK = 128
"""Columns of A and B, and rows of B, that share a scale; the depth of a stage."""

TENSORS = tuple(Pointer(name) for name in ("a", "a_scale", "b", "b_scale", "d"))


def _kinds(operand: str) -> tuple[str, ...]:
    return operand, "*float32", operand, "*float32", "*bfloat16"


def _sizes(problem: Problem) -> tuple[Int32, Int32, Int32]:
    return Int32(problem["M"]), Int32(problem["N"]), Int32(problem["K"])


# naive ------------------------------------------------------------------------------------------


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    source = CuteSource("fp8_gemm.naive:Naive", _kinds("*uint8") + ("int32",) * 3)
    grid = (ceil(problem["N"] / 16), ceil(problem["M"] / 16), 1)
    return Program((Step(source, grid, (*TENSORS, *_sizes(problem)), block=256),))


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    work = 2 * problem["M"] * problem["N"] * problem["K"]
    return LAUNCH_US + work / (0.01 * gpu.flops["float32"]) * 1e6


NAIVE = Implementation(
    entry="fp8_gemm",
    language="cute",
    variant="naive",
    summary="one thread, one element; any shape",
    archs=("sm_89+",),
    space={},
    illegal=why_not_naive,
    default=lambda problem, gpu: Config(),
    program=_naive_program,
    estimate=_naive_estimate,
    techniques={"fp8 conversion": "F2FP.F16.E4M3.UNPACK_B"},
    rank=0,
)

# wgmma ------------------------------------------------------------------------------------------

SWAP_UNTIL = 64
"""Up to so many rows, A takes WGMMA's narrow side and the weights its side of 64 rows."""

WIDE_TILES = ((256, 128), (128, 192), (128, 160), (128, 128), (128, 64))
"""Tiles that are not swapped; sums and accumulators of larger ones exceed the registers."""

SPACE = {
    "block_m": (256, 128, 64),
    "block_n": (192, 160, 128, 64, 32, 16),
    "cluster": (1, 2),
    "swap": (False, True),
    "split_k": (1, 2, 4, 8),
    "whole_tile": (True, False),
}


def _cluster_shape(config: Config) -> tuple[int, int]:
    """A cluster's CTAs, which share an operand, side by side or below each other; as `Wgmma`."""
    if config["block_m"] >= config["block_n"] and not config["swap"]:
        return 1, config["cluster"]
    return config["cluster"], 1


def _tiles(problem: Problem, config: Config) -> tuple[int, int]:
    """Tiles along WGMMA's M and N sides, in whole clusters."""
    rows, cols = problem["M"], problem["N"]
    if config["swap"]:
        rows, cols = cols, rows
    cluster_m, cluster_n = _cluster_shape(config)
    tiles_m = ceil(rows / (config["block_m"] * cluster_m)) * cluster_m
    return tiles_m, ceil(cols / (config["block_n"] * cluster_n)) * cluster_n


def _tma_reject(problem: Problem) -> str | None:
    n, k = problem["N"], problem["K"]
    if k == 0 or k % 16 or n % 8:
        return f"TMA needs whole 16-byte units: K={k} must be a multiple of 16, > 0, N={n} of 8"
    return None


def _wgmma_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    m, k = problem["M"], problem["K"]
    if reason := _tma_reject(problem):
        return reason
    if config["swap"] != (m <= SWAP_UNTIL):
        return f"A and B change sides where M is at most {SWAP_UNTIL}, and only there"
    reason = _narrow_reject(config, m) if config["swap"] else _wide_reject(config, m)
    if reason:
        return reason
    tiles_m, tiles_n = _tiles(problem, config)
    tiles, split_k = tiles_m * tiles_n, config["split_k"]
    if config["cluster"] > 1 and tiles * split_k < 0.8 * gpu.sms:
        return "a cluster's multicast pays when the tiles fill the GPU"
    if split_k > 1 and (tiles * split_k > 2 * gpu.sms or ceil(k / BLOCK) < 4 * split_k):
        return f"split_k={split_k} leaves too much or too little work to a CTA"
    return None


def _narrow_reject(config: Config, m: int) -> str | None:
    if config["block_m"] > 128 or not config["whole_tile"]:
        return "swapped tiles have at most 128 rows and a whole epilogue"
    if config["cluster"] > 1 and (config["block_m"], config["block_n"]) != (64, 64):
        return "fewer rows of A than of the weights are not worth sharing"
    if config["block_n"] != max(16, 1 << (max(m, 1) - 1).bit_length()):
        return f"block_n={config['block_n']} is not the smallest that holds {m} rows"
    return None


def _wide_reject(config: Config, m: int) -> str | None:
    tile = config["block_m"], config["block_n"]
    if tile not in WIDE_TILES:
        return f"tiles that are not swapped: {', '.join(f'{x} x {y}' for x, y in WIDE_TILES)}"
    if config["cluster"] > 1 and (_cluster_shape(config)[0] > 1 >= m / 128 or tile == (128, 64)):
        return "there is nothing to share in a cluster"
    if m <= 128 < config["block_m"] or (tile == (128, 64) and m > 128):
        return f"tiles of {tile[0]} x {tile[1]} do not suit {m} rows"
    if tile != (256, 128) and not config["whole_tile"]:
        return "only tiles of 256 x 128 crowd out a stage"
    if config["split_k"] > 4 or (config["split_k"] > 1 and tile not in ((128, 128), (128, 64))):
        return "K is split up to 4 times, for tiles of at most 128 x 128"
    return None


def _wgmma_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    tiles_m, tiles_n = _tiles(problem, config)
    tiles, cluster, split_k = tiles_m * tiles_n, config["cluster"], config["split_k"]
    named = ("block_m", "block_n", "cluster", "swap", "whole_tile")
    constants = {name: config[name] for name in named} | {"split": split_k > 1}
    kinds = (*_kinds("*float8_e4m3fn"), "*float32", "*int32", *("int32",) * 5)
    source = CuteSource("fp8_gemm.wgmma:Wgmma", kinds, tuple(constants.items()))
    num_ctas = min(tiles * split_k // cluster, gpu.sms // cluster) * cluster
    workspaces, scratch = {}, (Int64(0), Int64(0))
    if split_k > 1:
        warpgroups = config["block_m"] // 64
        tile_bytes = 4 * config["block_m"] * config["block_n"]
        workspaces = {"partial": split_k * tiles * tile_bytes, "counters": 4 * warpgroups * tiles}
        scratch = tuple(Pointer(name) for name in workspaces)
    params = (*TENSORS, *scratch, *_sizes(problem), Int32(split_k), Int32(num_ctas))
    block = 160 if config["block_m"] == 64 else 384
    step = Step(source, (num_ctas, 1, 1), params, block=block, cluster=(cluster, 1, 1))
    return Program((step,), workspaces)


def _wgmma_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    cluster_m, cluster_n = _cluster_shape(config)
    tiles_m, tiles_n = _tiles(problem, config)
    split_k = config["split_k"]
    tiled_us = _tiled_us(
        problem,
        gpu,
        rounds=ceil(tiles_m * tiles_n * split_k / gpu.sms),
        block_m=config["block_m"],
        block_n=config["block_n"],
        fetched=config["block_m"] / cluster_n + config["block_n"] / cluster_m,
        depth=ceil(problem["K"] / BLOCK / split_k) * BLOCK,
        # A tile that leaves through one buffer waits for each part of it.
        tail_us=WAVE_LATENCY_US * (1.0 if config["whole_tile"] else 1.5),
    )
    reduce_us = WAVE_LATENCY_US if split_k > 1 else 0.0
    return tiled_us * (0.98 if config["cluster"] > 1 else 1.0) + reduce_us


def _tiled_us(
    problem: Problem,
    gpu: Gpu,
    *,
    rounds: int,
    block_m: int,
    block_n: int,
    fetched: float,
    depth: int,
    tail_us: float,
) -> float:
    """Rounds of tiles at the pace of the tensor cores or of L2, or all the bytes from memory.

    A CTA reads ``fetched`` rows of ``depth`` bytes for a tile.
    """
    m, n, k = problem["M"], problem["N"], problem["K"]
    peak = gpu.flops.get(problem["dtype"], gpu.flops["float32"]) * TENSOR_EFFICIENCY
    math_us = 2 * block_m * block_n * depth / peak * gpu.sms * 1e6
    l2_us = fetched * depth / (gpu.bandwidth * L2_TO_DRAM) * gpu.sms * 1e6
    dram_us = copy_us(m * k + n * k + 2 * m * n, gpu)
    return max(rounds * (max(math_us, l2_us) + tail_us), dram_us) + LAUNCH_US


WGMMA = Implementation(
    entry="fp8_gemm",
    language="cute",
    variant="wgmma",
    summary="persistent and warp-specialized: TMA ring, FP8 WGMMA, promoted sums, split-K",
    archs=("sm_90a",),
    space=SPACE,
    illegal=_wgmma_reject,
    default=fastest(lambda: WGMMA),
    program=_wgmma_program,
    estimate=_wgmma_estimate,
    techniques={"tma": "UTMALDG", "wgmma": "QGMMA", "mbarrier": "SYNCS", "cp.async": "LDGSTS"},
    rank=3,
)

# tcgen05 ----------------------------------------------------------------------------------------


def _tcgen05_grid(problem: Problem, config: Config) -> int:
    return ceil(problem["M"] / BLOCK) * ceil(problem["N"] / config["block_n"])


def _tcgen05_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    kinds = _kinds("*float8_e4m3fn") + ("int32",) * 3
    source = CuteSource("fp8_gemm.tcgen05:Tcgen05", kinds, tuple(config.items()))
    params = (*TENSORS, *_sizes(problem))
    return Program((Step(source, (_tcgen05_grid(problem, config), 1, 1), params, block=192),))


def _tcgen05_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return _tiled_us(
        problem,
        gpu,
        rounds=ceil(_tcgen05_grid(problem, config) / gpu.sms),
        block_m=BLOCK,
        block_n=config["block_n"],
        fetched=BLOCK + config["block_n"],
        depth=ceil(problem["K"] / BLOCK) * BLOCK,
        tail_us=2 * WAVE_LATENCY_US,
    )


TCGEN05 = Implementation(
    entry="fp8_gemm",
    language="cute",
    variant="tcgen05",
    summary="Blackwell: TMA ring, tcgen05 into tensor memory, sums promoted to registers",
    archs=("sm_100a", "sm_103a"),
    space={"block_n": (128, 64)},
    illegal=lambda config, problem, gpu: _tma_reject(problem),
    default=fastest(lambda: TCGEN05),
    program=_tcgen05_program,
    estimate=_tcgen05_estimate,
    techniques={"tma": "UTMALDG", "tcgen05": "UTCQMMA", "tensor memory": "LDTM"},
    rank=4,
    unverified="needs a Blackwell GPU",
)

IMPLEMENTATIONS = (NAIVE, WGMMA, TCGEN05)

"""`fp8_gemm` in CuTe DSL: naive, TMA with WGMMA on Hopper, with tcgen05 on Blackwell.

The device code is in modules that import the DSL; they are imported when a kernel is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog import ring_model
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
from kernelcat.catalog.ring_model import Tiles
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cute.common.matmul import (
    illegal_naive,
    is_empty,
    naive_program,
    naive_us,
    sizes,
)
from kernelcat.reference.fp8_gemm import ENTRY
from kernelcat.runtime.gpu import Gpu

BLOCK = 128
"""Columns of A and B, and rows of B, that share a scale; columns of a stage."""

TENSORS = tuple(Pointer(name) for name in ("a", "a_scale", "b", "b_scale", "d"))


def _kinds(operand: str) -> tuple[str, ...]:
    """Kinds of the tensors; ``operand`` is that of A and B."""
    return operand, "*float32", operand, "*float32", "*bfloat16"


# naive ------------------------------------------------------------------------------------------


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    source = CuteSource("fp8_gemm.naive:Naive", _kinds("*uint8") + ("int32",) * 3)
    return naive_program(source, problem, (*TENSORS, *sizes(problem)), problem["N"])


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return naive_us(problem, gpu, 0.01)


NAIVE = Implementation(
    entry="fp8_gemm",
    language="cute",
    variant="naive",
    summary="a thread for each element; any shape",
    archs=("sm_89+",),
    space={},
    illegal=illegal_naive,
    program=_naive_program,
    estimate=_naive_estimate,
    techniques={"fp8 conversion": "F2FP.F16.E4M3.UNPACK_B"},
    rank=0,
)

# wgmma ------------------------------------------------------------------------------------------

MAX_SWAPPED_M = 64
"""With at most this many rows, A takes WGMMA's narrow side and the weights the side of 64 rows."""
SWAPPED_BLOCK_N = (16, 32, 64)

TILES = ((256, 128), (128, 192), (128, 160), (128, 128), (128, 64))
"""Tiles that are not swapped: registers do not hold the sums and accumulators of larger ones."""
SPLIT_TILES = ((128, 128), (128, 64))
"""Tiles whose sums fit into registers together with the partial sums of another split."""


def _cluster_shape(config: Config) -> tuple[int, int]:
    """Thread blocks of a cluster along WGMMA's M and N sides, as `Wgmma` arranges them."""
    if config["block_m"] >= config["block_n"] and not config["swap"]:
        return 1, config["cluster"]
    return config["cluster"], 1


def _num_tiles(problem: Problem, config: Config) -> int:
    """Tiles of whole clusters that cover the product."""
    rows, cols = problem["M"], problem["N"]
    if config["swap"]:
        rows, cols = cols, rows
    cluster_m, cluster_n = _cluster_shape(config)
    num_m = ceil(rows / (config["block_m"] * cluster_m)) * cluster_m
    return num_m * ceil(cols / (config["block_n"] * cluster_n)) * cluster_n


def _illegal_tma(problem: Problem) -> str | None:
    n, k = problem["N"], problem["K"]
    if k == 0 or k % 16 or n % 8:
        return f"TMA needs whole 16-byte units: K={k} must be a multiple of 16, > 0, N={n} of 8"
    return None


def _illegal_wgmma(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if reason := _illegal_tma(problem):
        return reason
    if config["swap"] != (problem["M"] <= MAX_SWAPPED_M):
        return f"A and B change sides where M is at most {MAX_SWAPPED_M}, and only there"
    if reason := _illegal_swapped(config) if config["swap"] else _illegal_wide(config):
        return reason
    return _illegal_split(config, problem, gpu)


def _illegal_swapped(config: Config) -> str | None:
    tile = config["block_m"], config["block_n"]
    if config["block_m"] > 128 or config["block_n"] not in SWAPPED_BLOCK_N:
        return f"swapped tiles have at most 128 x {SWAPPED_BLOCK_N[-1]} elements"
    if config["cluster"] > 1 and tile != (64, 64):
        return "clusters of swapped tiles are made of tiles of 64 x 64"
    return None


def _illegal_wide(config: Config) -> str | None:
    tile = config["block_m"], config["block_n"]
    if tile not in TILES:
        return f"tiles that are not swapped: {', '.join(f'{m} x {n}' for m, n in TILES)}"
    if config["split_k"] > 1 and tile not in SPLIT_TILES:
        return "registers do not hold the sums of two splits of so large a tile"
    return None


def _illegal_split(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    split_k, num_tiles = config["split_k"], _num_tiles(problem, config)
    if split_k > 1 and num_tiles * split_k > 2 * gpu.sms:
        return (
            f"split_k={split_k} leaves partial sums of {num_tiles * split_k} tiles: "
            f"at most {2 * gpu.sms}, two for each SM"
        )
    if split_k > ceil(problem["K"] / BLOCK):
        return f"K={problem['K']} has no k-block for each of split_k={split_k}"
    return None


def _unpromising_wgmma(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    unpromising = _unpromising_swapped if config["swap"] else _unpromising_wide
    if reason := unpromising(config, problem["M"]):
        return reason
    num_tiles, split_k = _num_tiles(problem, config), config["split_k"]
    if config["cluster"] > 1 and num_tiles * split_k < 0.8 * gpu.sms:
        return f"{num_tiles * split_k} tiles do not fill the GPU: clusters gain nothing"
    if split_k > 1 and ceil(problem["K"] / BLOCK) < 4 * split_k:
        return f"K={problem['K']} is too short for split_k={split_k}"
    return None


def _unpromising_swapped(config: Config, m: int) -> str | None:
    smallest = max(16, 1 << (max(m, 1) - 1).bit_length())
    if config["block_n"] != smallest:
        return f"block_n={config['block_n']}: {smallest} is the smallest that holds M={m}"
    if not config["whole_tile"]:
        return "swapped tiles are stored whole, whatever whole_tile says"
    return None


def _unpromising_wide(config: Config, m: int) -> str | None:
    tile = config["block_m"], config["block_n"]
    if config["cluster"] > 1 and _cluster_shape(config)[0] > 1 >= m / 128:
        return f"the second thread block of a cluster has no rows at M={m}"
    if config["cluster"] > 1 and tile == (128, 64):
        return "tiles of 128 x 64 are for few rows of A, which are not worth sharing"
    if m <= 128 < config["block_m"]:
        return f"tiles of {config['block_m']} rows are at least half empty at M={m}"
    if tile == (128, 64) and m > 128:
        return f"tiles of 128 x 64 load too much where M={m}"
    if tile != (256, 128) and not config["whole_tile"]:
        return "a tile that is stored whole leaves as many stages, but for tiles of 256 x 128"
    if config["split_k"] > 4:
        return f"split_k={config['split_k']}: tiles of 128 rows are never so few"
    return None


def _wgmma_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    num_tiles, cluster, split_k = _num_tiles(problem, config), config["cluster"], config["split_k"]
    names = ("block_m", "block_n", "cluster", "swap", "whole_tile")
    constants = {name: config[name] for name in names} | {"is_split": split_k > 1}
    kinds = (*_kinds("*float8_e4m3fn"), "*float32", "*int32", *("int32",) * 5)
    source = CuteSource("fp8_gemm.wgmma:Wgmma", kinds, tuple(constants.items()))
    num_ctas = min(num_tiles * split_k // cluster, gpu.sms // cluster) * cluster
    workspaces, scratch = {}, (Int64(0), Int64(0))
    if split_k > 1:
        num_counters = config["block_m"] // 64 * num_tiles
        tile_bytes = 4 * config["block_m"] * config["block_n"]
        workspaces = {"partial": split_k * num_tiles * tile_bytes, "counters": 4 * num_counters}
        scratch = tuple(Pointer(name) for name in workspaces)
    params = (*TENSORS, *scratch, *sizes(problem), Int32(split_k), Int32(num_ctas))
    block = 160 if config["block_m"] == 64 else 384
    step = Step(source, (num_ctas, 1, 1), params, block=block, cluster=(cluster, 1, 1))
    return Program((step,), workspaces)


PROMOTION = 1.31
"""Time of the tensor cores beside the promotion of sums, over that of CUDA's fastest order."""


def _wgmma_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The cost model of persistent kernels."""
    cluster_m, cluster_n = _cluster_shape(config)
    block_m, block_n, split_k = config["block_m"], config["block_n"], config["split_k"]
    rows, cols = problem["M"], problem["N"]
    if config["swap"]:
        rows, cols = cols, rows
    cluster = cluster_m * cluster_n
    work = _num_tiles(problem, config) * split_k
    waves = ceil(work / cluster / (gpu.sms // cluster)) / split_k
    sums_us = ring_model.BITS_8.sums_us(split_k, block_m * min(block_n, cols))
    tiles = Tiles(
        rows, cols, problem["K"], block_m, block_n, cluster_m, cluster_n, work, waves,
        max(waves, 1.0),
    )  # fmt: skip
    slowdown = PROMOTION * (ring_model.ONE_CONSUMER if block_m == 64 else 1.0)
    return ring_model.BITS_8.gemm_us(
        tiles, gpu, problem["dtype"], ENTRY.bytes_moved(problem), slowdown=slowdown,
        extra_us=sums_us,
    )  # fmt: skip


def _tiled_us(
    problem: Problem,
    gpu: Gpu,
    *,
    waves: int,
    block_m: int,
    block_n: int,
    loaded_rows: float,
    depth: int,
    tail_us: float,
) -> float:
    """Waves of tiles at the pace of the tensor cores or of L2, or the time of all bytes from DRAM.

    A thread block loads ``loaded_rows`` rows of ``depth`` bytes for a tile, whose store takes
    ``tail_us``.
    """
    m, n, k = problem["M"], problem["N"], problem["K"]
    peak = gpu.flops.get(problem["dtype"], gpu.flops["float32"]) * TENSOR_EFFICIENCY
    math_us = 2 * block_m * block_n * depth / peak * gpu.sms * 1e6
    l2_us = loaded_rows * depth / (gpu.bandwidth * L2_TO_DRAM) * gpu.sms * 1e6
    dram_us = copy_us(m * k + n * k + 2 * m * n, gpu)
    return max(waves * (max(math_us, l2_us) + tail_us), dram_us) + LAUNCH_US


WGMMA = Implementation(
    entry="fp8_gemm",
    language="cute",
    variant="wgmma",
    summary="persistent and warp-specialized: TMA ring, FP8 WGMMA, promoted sums, split-K",
    archs=("sm_90a",),
    space={
        "block_m": (256, 128, 64),
        "block_n": (192, 160, 128, 64, 32, 16),
        "cluster": (1, 2),
        "swap": (False, True),
        "split_k": (1, 2, 4, 8),
        "whole_tile": (True, False),
    },
    illegal=_illegal_wgmma,
    unpromising=_unpromising_wgmma,
    program=_wgmma_program,
    estimate=_wgmma_estimate,
    techniques={"tma": "UTMALDG", "wgmma": "QGMMA", "mbarrier": "SYNCS", "cp.async": "LDGSTS"},
    rank=3,
)

# tcgen05 ----------------------------------------------------------------------------------------


def _tcgen05_tiles(problem: Problem, config: Config) -> int:
    return ceil(problem["M"] / BLOCK) * ceil(problem["N"] / config["block_n"])


def _illegal_tcgen05(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return _illegal_tma(problem)


def _tcgen05_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    kinds = _kinds("*float8_e4m3fn") + ("int32",) * 3
    source = CuteSource("fp8_gemm.tcgen05:Tcgen05", kinds, tuple(config.items()))
    params, num_tiles = (*TENSORS, *sizes(problem)), _tcgen05_tiles(problem, config)
    return Program((Step(source, (num_tiles, 1, 1), params, block=192),))


def _tcgen05_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return _tiled_us(
        problem,
        gpu,
        waves=ceil(_tcgen05_tiles(problem, config) / gpu.sms),
        block_m=BLOCK,
        block_n=config["block_n"],
        loaded_rows=BLOCK + config["block_n"],
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
    illegal=_illegal_tcgen05,
    program=_tcgen05_program,
    estimate=_tcgen05_estimate,
    techniques={"tma": "UTMALDG", "tcgen05": "UTCQMMA", "tensor memory": "LDTM"},
    rank=4,
    unverified="needs a Blackwell GPU",
)

IMPLEMENTATIONS = (NAIVE, WGMMA, TCGEN05)

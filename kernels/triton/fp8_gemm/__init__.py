"""`fp8_gemm` in Triton: naive, tma (tensor descriptors, split-K), persistent, gluon (warp roles).

Promoting every 128-deep sum to float32 is DeepSeek-V3's, and so is one warpgroup's promotion behind
another's products; computing the transposed product for few rows is CUTLASS's.
"""

from dataclasses import dataclass
from math import ceil

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.gemm.arguments import GROUP_M, MIN_BYTES_IN_FLIGHT, is_empty, sizes
from kernelcat.kernels.triton.gemm.arguments import Tile as GemmTile
from kernelcat.kernels.triton.gemm.variants import (
    BLACKWELL,
    HOPPER,
    implementation,
    on_blackwell,
    reject_naive,
)
from kernelcat.runtime.gpu import Gpu

KERNELS = "kernelcat.kernels.triton.fp8_gemm.device:"
FP8, BLOCK_K = "float8_e4m3fn", 128
WARPGROUP_ROWS = 64
REGISTERS = {2: (232, 40), 3: (152, 40)}
"""Consumers -> registers of a thread that multiplies, and of one that loads."""


@dataclass(frozen=True)
class Tile(GemmTile):
    """BLOCK_M x BLOCK_N; always as deep as a block of scales."""

    k: int = BLOCK_K

    @property
    def warps(self) -> int:
        """A thread holds a tile's sums twice, 64 of each at most: before and after promotion."""
        return 4 if self.m * self.n <= 64 * 128 else 8

    @property
    def stage_bytes(self) -> int:
        return (self.m + self.n) * BLOCK_K

    @property
    def constants(self) -> dict[str, int]:
        return {"BLOCK_M": self.m, "BLOCK_N": self.n}


# ---- programs ----------------------------------------------------------------------------------


def _stored_by_tma(problem: Problem) -> bool:
    return bool(problem["N"] % 8 == 0)


def _operands() -> dict[str, triton.Argument]:
    return {
        "a": triton.pointer("a", FP8),
        "a_scale": triton.pointer("a_scale", "float32"),
        "b": triton.pointer("b", FP8),
        "b_scale": triton.pointer("b_scale", "float32"),
        "d": triton.pointer("d", "bfloat16"),
    }


def _described(problem: Problem, tile: Tile, described_d: bool) -> dict[str, triton.Argument]:
    """a and b as descriptors, and d where ``described_d``."""
    m, n, k = problem["M"], problem["N"], problem["K"]
    described = _operands() | {
        "a": triton.descriptor("a", FP8, (m, k), (tile.m, BLOCK_K)),
        "b": triton.descriptor("b", FP8, (n, k), (tile.n, BLOCK_K)),
    }
    if described_d:
        described["d"] = triton.descriptor("d", "bfloat16", (m, n), (tile.m, tile.n))
    return described


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    tile = Tile.of(config)
    grid = (ceil(problem["M"] / tile.m), ceil(problem["N"] / tile.n), 1)
    arguments = _operands() | sizes(problem)
    launch = triton.step(
        KERNELS + "naive", grid, arguments, tile.constants, num_warps=4, num_stages=1
    )
    return Program((launch,))


def _tma(problem: Problem, config: Config, gpu: Gpu) -> Program:
    """One launch over (tiles, split_k); a workspace for partial tiles where K is split."""
    if is_empty(problem):
        return Program(())
    tile, split, stages = Tile.of(config), config["split_k"], config["stages"]
    tiles = tile.count(problem)
    by_descriptor = split == 1 and _stored_by_tma(problem)
    arguments = {
        **_described(problem, tile, by_descriptor),
        "partials": triton.pointer("partials", "float32"),
        "arrivals": triton.pointer("arrivals", "int32"),
        **sizes(problem, 1),
        "split_blocks": triton.integer(ceil(problem["K"] / BLOCK_K / split), divisor=1),
    }
    constants = {
        **tile.constants,
        "GROUP_M": GROUP_M,
        "SPLIT_K": split,
        "SWAP": tile.m < 64,
        "STAGES": stages,
        "TMA_STORE": by_descriptor,
    }
    launch = triton.step(
        KERNELS + "tma", (tiles, split, 1), arguments, constants,
        num_warps=tile.warps, num_stages=stages,
    )  # fmt: skip
    partials = tiles * split * tile.m * tile.n if split > 1 else 0
    return Program((launch,), {"partials": 4 * partials, "arrivals": 4 * tiles})


def _persistent(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    tile, stages = Tile.of(config), config["stages"]
    programs = gpu.sms * config["per_sm"]
    by_descriptor = _stored_by_tma(problem)
    launch = triton.step(
        KERNELS + "persistent",
        (min(programs, tile.count(problem)), 1, 1),
        _described(problem, tile, by_descriptor) | sizes(problem, 1),
        {
            **tile.constants,
            "GROUP_M": GROUP_M,
            "NUM_PROGRAMS": programs,
            "STAGES": stages,
            "TMA_STORE": by_descriptor,
            "WARP_SPECIALIZE": gpu.arch in BLACKWELL,
        },
        num_warps=tile.warps,
        num_stages=stages,
    )
    return Program((launch,))


def _ring_stages(consumers: int, gpu: Gpu) -> int:
    """As many as fit beside barriers and the rows of D on their way out."""
    rows = consumers * WARPGROUP_ROWS
    left = gpu.shared_bytes - 1024 - 2 * rows * BLOCK_K
    return int(left // ((rows + BLOCK_K) * BLOCK_K))


def _gluon(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    m, n, k, consumers = problem["M"], problem["N"], problem["K"], config["consumers"]
    tiles = Tile(consumers * WARPGROUP_ROWS, BLOCK_K).count(problem)
    arguments = {
        **_operands(),
        "a": triton.descriptor("a", FP8, (m, k), (WARPGROUP_ROWS, BLOCK_K), gluon=True),
        "b": triton.descriptor("b", FP8, (n, k), (BLOCK_K, BLOCK_K), gluon=True),
        "d": triton.descriptor("d", "bfloat16", (m, n), (WARPGROUP_ROWS, BLOCK_K), gluon=True),
        **sizes(problem, 1),
    }
    constants = {
        "CONSUMERS": consumers,
        "GROUP_M": config["group_m"],
        "NUM_PROGRAMS": gpu.sms,
        "NUM_STAGES": _ring_stages(consumers, gpu),
        "CONSUMER_REGISTERS": REGISTERS[consumers][0],
        "PRODUCER_REGISTERS": REGISTERS[consumers][1],
    }
    launch = triton.step(
        "kernelcat.kernels.triton.fp8_gemm.gluon_device:specialized",
        (min(gpu.sms, tiles), 1, 1), arguments, constants, num_warps=4,
    )  # fmt: skip
    return Program((launch,))


# ---- which configurations serve ----------------------------------------------------------------


def _reject_depth(problem: Problem) -> str | None:
    k = problem["K"]
    if k == 0 or k % 16:
        return f"K={k} must be a positive multiple of 16: TMA rows are 16-byte aligned"
    return None


def _reject_described(
    config: Config, problem: Problem, gpu: Gpu, epilogue: int = 0, least_m: int = 16
) -> str | None:
    """What holds for both; ``epilogue``: bytes of shared memory that the store of a tile takes."""
    tile, stages, per_sm = Tile.of(config), config["stages"], config.get("per_sm", 1)
    m = problem["M"]
    if reason := _reject_depth(problem):
        return reason
    scales = 4 * (tile.m + 4) * stages
    shared = (tile.stage_bytes * stages + scales + epilogue + 2048) * per_sm
    if shared > gpu.shared_bytes:
        return f"{stages} stages take {shared} bytes of shared memory, {gpu.sku} has less"
    if tile.stage_bytes * stages * per_sm < MIN_BYTES_IN_FLIGHT:
        return f"{stages} stages are too few to cover the latency of memory"
    if tile.m > least_m and tile.m >= 2 * m:
        return f"tiles of {tile.m} rows are at least half empty for M={m}"
    if tile.m <= 32 and m > tile.m:
        return f"tiles of {tile.m} rows read B more often than M={m} needs"
    return None


def _reject_tma(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile, split = Tile.of(config), config["split_k"]
    if split > 1 and tile.count(problem) * split > 4 * gpu.sms:
        return f"{tile.count(problem)} tiles fill {gpu.sms} SMs without split_k={split}"
    if split > 1 and problem["K"] < 4 * BLOCK_K * split:
        return f"K={problem['K']} is too short for split_k={split}"
    if tile.m * tile.n < 64 * 128 and problem["M"] > 64:
        return f"tiles of {tile.m} x {tile.n} read both operands too often for M={problem['M']}"
    return _reject_described(config, problem, gpu)


def _reject_persistent(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile = Tile.of(config)
    if config["per_sm"] > 1 and tile.warps == 8:
        return "two programs of 8 warps do not fit into the registers of an SM"
    return _reject_described(config, problem, gpu, 2 * tile.m * tile.n, least_m=64)


def _reject_gluon(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    rows = config["consumers"] * WARPGROUP_ROWS
    if reason := _reject_depth(problem):
        return reason
    if not _stored_by_tma(problem):
        return f"N={problem['N']} must be a multiple of 8: rows of D are stored by TMA"
    if rows >= 2 * problem["M"]:
        return f"tiles of {rows} rows are at least half empty for M={problem['M']}"
    if _ring_stages(config["consumers"], gpu) < 3:
        return f"fewer than 3 stages fit in {gpu.shared_bytes} bytes of shared memory"
    return None


# ---- which one without measuring ---------------------------------------------------------------


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The model's time, longer where programs are too few or nothing overlaps with promotion.

    An fp8 product multiplies and moves as a bfloat16 one of half its depth does.
    """
    m, n, k = problem["M"], problem["N"], problem["K"]
    split, stages = config.get("split_k", 1), config.get("stages", 0)
    if "consumers" in config:
        tile, stages = Tile(config["consumers"] * WARPGROUP_ROWS, BLOCK_K), 4
        efficiency = 0.7
    else:
        tile = Tile.of(config)
        efficiency = 0.6 if tile.m * tile.n >= 128 * 128 else 0.5
    if not stages:
        efficiency = 0.1  # nothing overlaps
    us = cost_model.tiled_gemm_us(
        m, n, ceil(k / 2), block_m=tile.m, block_n=tile.n, split_k=split, gpu=gpu,
        dtype="bfloat16", efficiency=efficiency,
    )  # fmt: skip
    programs = max(tile.count(problem) * split, 1)
    memory_us = cost_model.copy_us(m * k + n * k + 2 * m * n, gpu)
    memory_us *= gpu.sms / min(programs, gpu.sms)
    return max(us, memory_us) if stages else us + memory_us


NAIVE = implementation(
    entry="fp8_gemm",
    estimate=_estimate,
    variant="naive",
    summary="one small tile a program, masked loads; any shape",
    archs=("sm_89+",),
    space={"tile": ("32x32", "32x64", "64x64")},
    illegal=reject_naive,
    program=_naive,
    rank=0,
)

TMA = implementation(
    entry="fp8_gemm",
    estimate=_estimate,
    variant="tma",
    summary="tensor descriptors, warpgroup products promoted to float32, few rows transposed, "
    "split-K",
    archs=HOPPER,
    space={
        "tile": (
            "16x64", "16x128", "32x64", "32x128", "64x64", "64x128", "128x64", "128x128",
        ),
        "stages": (3, 4, 6),
        "split_k": (1, 2, 4, 8),
    },
    illegal=_reject_tma,
    program=_tma,
    techniques={"tma": "UTMALDG", "wgmma": "QGMMA"},
    rank=2,
)  # fmt: skip

PERSISTENT = implementation(
    entry="fp8_gemm",
    estimate=_estimate,
    variant="persistent",
    summary="programs over many tiles, stores overlapped with the next tile's loads",
    archs=HOPPER,
    space={"tile": ("64x128", "128x64", "128x128"), "stages": (2, 3, 4, 6), "per_sm": (1, 2, 3)},
    illegal=_reject_persistent,
    program=_persistent,
    techniques={"tma": "UTMALDG", "tma_store": "UTMASTG", "wgmma": "QGMMA"},
    rank=1,  # below tma, which splits K where tiles are few
)


GLUON = implementation(
    entry="fp8_gemm",
    estimate=_estimate,
    variant="gluon",
    summary="specialized warps: one loads, two or three warpgroups multiply and promote (Gluon)",
    archs=HOPPER,
    space={"consumers": (2, 3), "group_m": (8, 16)},
    illegal=_reject_gluon,
    program=_gluon,
    techniques={
        "tma": "UTMALDG", "tma_store": "UTMASTG", "wgmma": "QGMMA",
        "warp_specialization": "USETMAXREG",
    },
    rank=3,
    gluon=True,
)  # fmt: skip


IMPLEMENTATIONS = (
    NAIVE,
    TMA,
    PERSISTENT,
    GLUON,
    on_blackwell(TMA, "UTCQMMA"),
    on_blackwell(PERSISTENT, "UTCQMMA"),
)

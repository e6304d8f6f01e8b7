"""`fp8_gemm` in Triton: naive, tma (tensor descriptors, split-K), persistent, gluon (warp roles).

Promoting every 128-deep sum to float32 is DeepSeek-V3's idea, and so is one warpgroup's promotion
during another's products. Computing the transposed product for few rows is CUTLASS's.
"""

from dataclasses import dataclass
from math import ceil

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common import product, ring, split_k
from kernelcat.kernels.triton.common.architectures import BLACKWELL, HOPPER, on_blackwell
from kernelcat.kernels.triton.common.product import GROUP_M, MIN_BYTES_IN_FLIGHT, is_empty, sizes
from kernelcat.runtime.gpu import Gpu

KERNELS = "kernelcat.kernels.triton.fp8_gemm.device:"
FP8, BLOCK_K = "float8_e4m3fn", 128
WARPGROUP_ROWS = 64
REGISTERS = {2: (232, 40), 3: (152, 40)}
"""Consumers -> registers of a thread that multiplies, and of one that loads."""
RESERVED_BYTES = 2048
"""Shared memory of a program besides its stages and scales."""


@dataclass(frozen=True)
class Tile(product.Tile):
    """A tile of D; a k-block is as deep as a block of scales."""

    k: int = BLOCK_K

    @property
    def warps(self) -> int:
        """Warps of a program, whose threads hold each sum twice: before and after promotion."""
        return 4 if self.m * self.n <= 64 * 128 else 8

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory that a stage of both operands takes."""
        return (self.m + self.n) * BLOCK_K

    @property
    def constants(self) -> dict[str, int]:
        return {"BLOCK_M": self.m, "BLOCK_N": self.n}


# ---- programs ----------------------------------------------------------------------------------


def _can_store_by_tma(problem: Problem) -> bool:
    """Whether rows of D take a multiple of 16 bytes, as TMA needs."""
    return bool(problem["N"] % 8 == 0)


def _pointers() -> dict[str, triton.Argument]:
    return {
        "a": triton.pointer("a", FP8),
        "a_scale": triton.pointer("a_scale", "float32"),
        "b": triton.pointer("b", FP8),
        "b_scale": triton.pointer("b_scale", "float32"),
        "d": triton.pointer("d", "bfloat16"),
    }


def _descriptors(problem: Problem, tile: Tile, tma_store: bool) -> dict[str, triton.Argument]:
    """The arguments with TMA descriptors of a and b, and with ``tma_store`` of d too."""
    m, n, k = problem["M"], problem["N"], problem["K"]
    arrays = _pointers() | {
        "a": triton.descriptor("a", FP8, (m, k), (tile.m, BLOCK_K)),
        "b": triton.descriptor("b", FP8, (n, k), (tile.n, BLOCK_K)),
    }
    if tma_store:
        arrays["d"] = triton.descriptor("d", "bfloat16", (m, n), (tile.m, tile.n))
    return arrays


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    tile = Tile.of(config)
    grid = (ceil(problem["M"] / tile.m), ceil(problem["N"] / tile.n), 1)
    arguments = _pointers() | sizes(problem)
    launch = triton.step(
        KERNELS + "naive", grid, arguments, tile.constants, num_warps=4, num_stages=1
    )
    return Program((launch,))


def _tma(problem: Problem, config: Config, gpu: Gpu) -> Program:
    """One launch over (tiles, split_k)."""
    if is_empty(problem):
        return Program(())
    tile, splits, stages = Tile.of(config), config["split_k"], config["stages"]
    tma_store = splits == 1 and _can_store_by_tma(problem)
    k_blocks = split_k.depth(tile, problem, splits) // BLOCK_K
    arguments = {
        **_descriptors(problem, tile, tma_store),
        **split_k.arguments(),
        **sizes(problem, 1),
        "split_blocks": triton.integer(k_blocks, divisor=1),
    }
    constants = {
        **tile.constants,
        "GROUP_M": GROUP_M,
        "SPLIT_K": splits,
        "SWAP": tile.m < 64,
        "STAGES": stages,
        "TMA_STORE": tma_store,
    }
    launch = triton.step(
        KERNELS + "tma", (tile.count(problem), splits, 1), arguments, constants,
        num_warps=tile.warps, num_stages=stages,
    )  # fmt: skip
    return Program((launch,), split_k.workspaces(tile, problem, splits))


def _persistent(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    tile, stages = Tile.of(config), config["stages"]
    num_programs = gpu.sms * config["per_sm"]
    tma_store = _can_store_by_tma(problem)
    launch = triton.step(
        KERNELS + "persistent",
        (min(num_programs, tile.count(problem)), 1, 1),
        _descriptors(problem, tile, tma_store) | sizes(problem, 1),
        {
            **tile.constants,
            "GROUP_M": GROUP_M,
            "NUM_PROGRAMS": num_programs,
            "STAGES": stages,
            "TMA_STORE": tma_store,
            "WARP_SPECIALIZE": gpu.arch in BLACKWELL,
        },
        num_warps=tile.warps,
        num_stages=stages,
    )
    return Program((launch,))


def _ring_stages(consumers: int, gpu: Gpu) -> int:
    """As many stages as fit beside the tiles through which D is stored."""
    tile = Tile(consumers * WARPGROUP_ROWS, BLOCK_K)
    return ring.num_stages(tile.stage_bytes, 2 * tile.m * tile.n, gpu)


def _gluon(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    m, n, k, consumers = problem["M"], problem["N"], problem["K"], config["consumers"]
    num_tiles = Tile(consumers * WARPGROUP_ROWS, BLOCK_K).count(problem)
    arguments = {
        **_pointers(),
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
        (min(gpu.sms, num_tiles), 1, 1), arguments, constants, num_warps=ring.CONSUMER_WARPS,
    )  # fmt: skip
    return Program((launch,))


# ---- which configurations can run, and which are worth a try -------------------------------------


def _illegal_depth(problem: Problem) -> str | None:
    k = problem["K"]
    if k == 0 or k % 16:
        return f"K={k} must be a positive multiple of 16: TMA needs rows of a multiple of 16 bytes"
    return None


def _program_bytes(config: Config, d_bytes: int = 0) -> int:
    """Shared memory of a program whose stores of D take ``d_bytes``."""
    tile, stages = Tile.of(config), config["stages"]
    scale_bytes = 4 * (tile.m + 4) * stages
    return tile.stage_bytes * stages + scale_bytes + d_bytes + RESERVED_BYTES


def _unpromising_tile(config: Config, problem: Problem, min_m: int) -> str | None:
    """``min_m`` is the least height of tiles that there is."""
    tile, stages, m = Tile.of(config), config["stages"], problem["M"]
    if tile.stage_bytes * stages * config.get("per_sm", 1) < MIN_BYTES_IN_FLIGHT:
        return f"{stages} stages are too few to cover the latency of memory"
    if tile.m > min_m and tile.m >= 2 * m:
        return f"tiles of {tile.m} rows are at least half empty for M={m}"
    if tile.m <= 32 and m > tile.m:
        return f"tiles of {tile.m} rows read B more often than M={m} needs"
    return None


def _illegal_tma(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    reason = _illegal_depth(problem)
    return reason or product.illegal_stages(config["stages"], _program_bytes(config), gpu)


def _unpromising_tma(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile, m = Tile.of(config), problem["M"]
    if tile.m * tile.n < 64 * 128 and m > 64:
        return f"tiles of {tile.m} x {tile.n} read both operands too often for M={m}"
    return split_k.unpromising_splits(
        tile, problem, config["split_k"], gpu, max_waves=4, min_k_blocks=4
    ) or _unpromising_tile(config, problem, min_m=16)


def _persistent_bytes(config: Config) -> int:
    tile = Tile.of(config)
    return _program_bytes(config, 2 * tile.m * tile.n)


def _illegal_persistent(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    reason = _illegal_depth(problem)
    return reason or product.illegal_stages(config["stages"], _persistent_bytes(config), gpu)


def _unpromising_persistent(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    per_sm = config["per_sm"]
    if per_sm > 1 and Tile.of(config).warps == 8:
        return f"{per_sm} programs of 8 warps do not fit into the registers of an SM"
    if _persistent_bytes(config) * per_sm > gpu.shared_bytes:
        return f"{per_sm} programs do not fit into the shared memory of an SM"
    return _unpromising_tile(config, problem, min_m=64)


def _illegal_gluon(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if reason := _illegal_depth(problem):
        return reason
    if not _can_store_by_tma(problem):
        return f"N={problem['N']} must be a multiple of 8: rows of D are stored by TMA"
    return ring.illegal_stages(_ring_stages(config["consumers"], gpu), gpu)


def _unpromising_gluon(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    rows = config["consumers"] * WARPGROUP_ROWS
    if rows >= 2 * problem["M"]:
        return f"tiles of {rows} rows are at least half empty for M={problem['M']}"
    return None


# ---- which one without measuring ---------------------------------------------------------------


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The cost model's time, longer where programs are too few or nothing overlaps with promotion.

    A float8 product multiplies and moves as much as a bfloat16 product of half the depth.
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
    num_programs = max(tile.count(problem) * split, 1)
    memory_us = cost_model.copy_us(m * k + n * k + 2 * m * n, gpu)
    memory_us *= gpu.sms / min(num_programs, gpu.sms)
    return max(us, memory_us) if stages else us + memory_us


NAIVE = Implementation(
    entry="fp8_gemm",
    language="triton",
    variant="naive",
    summary="one small tile a program, masked loads; any shape",
    archs=("sm_89+",),
    space={"tile": ("32x32", "32x64", "64x64")},
    illegal=product.illegal_naive,
    program=_naive,
    estimate=_estimate,
    rank=0,
)

TMA = Implementation(
    entry="fp8_gemm",
    language="triton",
    variant="tma",
    summary="tensor descriptors, warpgroup products promoted to float32, few rows transposed, "
    "split-K",
    archs=HOPPER,
    space={
        "stages": (6, 4, 3),  # of equal estimates the first is the default
        "tile": (
            "16x64", "16x128", "32x64", "32x128", "64x64", "64x128", "128x64", "128x128",
        ),
        "split_k": (1, 2, 4, 8),
    },
    illegal=_illegal_tma,
    unpromising=_unpromising_tma,
    program=_tma,
    estimate=_estimate,
    techniques={"tma": "UTMALDG", "wgmma": "QGMMA"},
    rank=2,
)  # fmt: skip

PERSISTENT = Implementation(
    entry="fp8_gemm",
    language="triton",
    variant="persistent",
    summary="programs over many tiles, stores overlapped with the next tile's loads",
    archs=HOPPER,
    space={"stages": (6, 4, 3, 2), "tile": ("64x128", "128x64", "128x128"), "per_sm": (1, 2, 3)},
    illegal=_illegal_persistent,
    unpromising=_unpromising_persistent,
    program=_persistent,
    estimate=_estimate,
    techniques={"tma": "UTMALDG", "tma_store": "UTMASTG", "wgmma": "QGMMA"},
    rank=1,  # below tma, which splits K where tiles are few
)


GLUON = Implementation(
    entry="fp8_gemm",
    language="triton",
    variant="gluon",
    summary="specialized warps: one loads, two or three warpgroups multiply and promote (Gluon)",
    archs=HOPPER,
    space={"consumers": (2, 3), "group_m": (8, 16)},
    illegal=_illegal_gluon,
    unpromising=_unpromising_gluon,
    program=_gluon,
    estimate=_estimate,
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

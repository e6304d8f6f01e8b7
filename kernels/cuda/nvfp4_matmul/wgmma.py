"""`nvfp4_matmul` for many rows: wgmma with weights in registers, decoded from a ring."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    Int64,
    Pointer,
    Program,
    Step,
    TensorMap,
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.gemm.persistent import overlapped_us
from kernelcat.kernels.cuda.nvfp4_matmul.operands import (
    EPILOGUE,
    activation,
    cpp,
    is_empty,
    is_nvfp4,
    k_tiles,
    math_dtype,
    row_tiles,
    sizes,
    types,
    why_not_tiles,
)
from kernelcat.reference._fp4_tiles import TILE_COLS, TILE_ROWS
from kernelcat.reference.nvfp4_matmul import ENTRY, FP8
from kernelcat.runtime.gpu import KB, Gpu

MIN_STAGES = 3
BLOCK_M, BLOCK_K = 128, 128
"""Rows of W a tile, and columns a stage."""
CONSUMERS = 2
"""Warpgroups that multiply."""
GROUP_M = 16
"""Tile rows of W in a group of the order: W's tiles are small, so there are many."""
SPACE = {
    "tile": ("128x64", "128x128", "128x192", "128x256"),
    "split_k": (1, 2, 3, 4, 5, 6, 8),
}
"""
tile : rows of W x rows of A
split_k : blocks of a cluster, which split a tile's k range
"""


@dataclass(frozen=True)
class Plan:
    """A configuration in numbers, for one problem: what is tiled is D^T."""

    m: int
    n: int
    k: int
    block_n: int  # rows of A
    split_k: int
    is_paired: bool  # columns of D: two rows of W make one
    scale_block: int
    sms: int

    @staticmethod
    def of(config: Config, problem: Problem, gpu: Gpu) -> Plan:
        return Plan(
            *(int(problem[axis]) for axis in "MNK"),
            int(config["tile"].split("x")[1]),
            int(config["split_k"]),
            problem["activation"] == "swiglu",
            16 if problem["format"] == "nvfp4" else 32,
            gpu.sms,
        )

    @property
    def tiles(self) -> int:
        return ceil(self.n / BLOCK_M) * ceil(self.m / self.block_n)

    @property
    def k_blocks(self) -> int:
        return ceil(self.k / BLOCK_K)

    @property
    def clusters(self) -> int:
        """That run at a time."""
        return self.sms // self.split_k

    @property
    def stage_bytes(self) -> int:
        """Rows of A in 16 bits, codes and scales; whole atoms of the swizzle."""
        weights = BLOCK_M * (BLOCK_K // 2 + BLOCK_K // self.scale_block)
        return 2 * self.block_n * BLOCK_K + ceil(weights / KB) * KB

    @property
    def inbox_bytes(self) -> int:
        """Sums of the columns that a block finishes, from each of the others, and a barrier."""
        cols = 32 if self.is_paired else 16  # of a group that one block finishes
        own = ceil(self.block_n // cols / self.split_k) * cols
        return CONSUMERS * ((self.split_k - 1) * own * BLOCK_M // CONSUMERS * 4 + 16)

    def _rest_bytes(self) -> int:
        """Of shared memory beside the stages and their barriers, with room to align them."""
        return self.inbox_bytes + KB + 64

    def num_stages(self, gpu: Gpu) -> int:
        """As many as fit, two barriers with each."""
        return min((gpu.shared_bytes - self._rest_bytes()) // (self.stage_bytes + 16), 12)

    def shared_bytes(self, gpu: Gpu) -> int:
        return self.num_stages(gpu) * (self.stage_bytes + 16) + self._rest_bytes()


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    plan = Plan.of(config, problem, gpu)
    m, k, dtype = problem["M"], problem["K"], math_dtype(problem)
    is_float8 = problem["dtype"] == FP8
    map_a = TensorMap(
        "wide" if is_float8 else "a", dtype, (k, m), (2 * k,), (64, plan.block_n), 128,
        l2_promotion=128,
    )  # fmt: skip
    arguments = (
        f"kernelcat::{dtype}", types(problem)[1], is_nvfp4(problem), activation(problem),
        cpp(is_float8), plan.block_n, plan.num_stages(gpu), plan.split_k,
    )  # fmt: skip
    kernel = f"kernelcat::nvfp4_matmul_wgmma<{', '.join(map(str, arguments))}>"
    step = Step(
        CudaSource("nvfp4_matmul/wgmma.cu", kernel),
        (min(plan.tiles, plan.clusters) * plan.split_k, 1, 1),
        (map_a, *_weight_maps(plan, problem), *EPILOGUE, *sizes(problem), Int32(GROUP_M)),
        (CONSUMERS + 1) * 128,
        plan.shared_bytes(gpu),
        (plan.split_k, 1, 1),
        programmatic=True,
    )
    if not is_float8:
        return Program((step,))
    return Program((_widen_rows(m * k // 16, gpu), step), {"wide": 2 * m * k})


def _weight_maps(plan: Plan, problem: Problem) -> tuple[TensorMap, TensorMap]:
    """Tile rows of W and of its scales as rows of words, boxes of a stage."""
    rows, tiles = row_tiles(problem), k_tiles(problem)
    stage_tiles, stage_rows = BLOCK_K // TILE_COLS, BLOCK_M // TILE_ROWS

    def of(tensor: str, tile_bytes: int) -> TensorMap:
        words = tile_bytes // 4
        shape, box = (tiles * words, rows), (stage_tiles * words, stage_rows)
        return TensorMap(tensor, "int32", shape, (tiles * tile_bytes,), box)

    codes = TILE_ROWS * TILE_COLS // 2
    return of("w", codes), of("w_scale", 2 * codes // plan.scale_block)


def _widen_rows(vectors: int, gpu: Gpu) -> Step:
    """A in float8 to bfloat16, in a workspace."""
    source = CudaSource("nvfp4_matmul/widen_rows.cu", "kernelcat::nvfp4_matmul_widen_rows")
    blocks = min(ceil(vectors / 256), 8 * gpu.sms)
    params = (Pointer("a"), Pointer("wide"), Int64(vectors))
    return Step(source, (blocks, 1, 1), params, 256, programmatic=True)


# ---- which configurations serve ----------------------------------------------------------------


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    why = why_not_tiles(problem)
    if why or is_empty(problem):
        return why
    plan = Plan.of(config, problem, gpu)
    if plan.num_stages(gpu) < MIN_STAGES:
        return f"fewer than {MIN_STAGES} stages fit in {gpu.shared_bytes} bytes of shared memory"
    if plan.block_n > 64 and plan.block_n >= 2 * plan.m:
        return f"tiles of {plan.block_n} rows are at least half empty for M={plan.m}"
    if plan.block_n < 192 and plan.m >= 32 * plan.block_n:
        return f"tiles of {plan.block_n} rows decode W more often than M={plan.m} needs"
    if plan.split_k == 1:
        return None
    if plan.split_k * 2 > plan.k_blocks:
        return f"{plan.k_blocks} blocks of {BLOCK_K} are too few for {plan.split_k} splits"
    if plan.tiles > plan.clusters:
        return f"{plan.tiles} tiles in {plan.split_k} pieces are no single wave"
    return None


# ---- which one without measuring ---------------------------------------------------------------

_STAGE_US = {64: 0.40, 128: 0.62, 192: 0.88, 256: 1.12}
"""Rows of A a tile -> microseconds a stage: with few of them what decoding takes."""

_ENDS_US = 3.0
"""Until the first stage is there, and from the last one on."""

_TILE_US = 1.5
"""Storing a tile of 128 x 256 while nothing is multiplied."""

_EXCHANGE_US = 0.8
"""Sums on their way to the block that finishes them."""

_FIT = {1: 1.0, 2: 1.0, 3: 0.95, 4: 0.96}
"""Blocks of a cluster -> share of the SMs that such clusters fill: they do not leave a GPC."""


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Waves of tiles, a time a stage; or the memory's time."""
    plan = Plan.of(config, problem, gpu)
    waves = ceil(plan.tiles / max(int(plan.clusters * _FIT.get(plan.split_k, 0.84)), 1))
    busy_us = waves * ceil(plan.k_blocks / plan.split_k) * _STAGE_US[plan.block_n]
    busy_us += _ENDS_US + _TILE_US * plan.block_n / 256 * (waves - 1)
    busy_us += _EXCHANGE_US * (plan.split_k > 1)
    widen_us = 0.0
    if problem["dtype"] == FP8:
        widen_us = copy_us(3 * problem["M"] * problem["K"], gpu)
    return widen_us + overlapped_us(busy_us, ENTRY.bytes_moved(problem), gpu)


def _default(problem: Problem, gpu: Gpu) -> Config:
    serving = IMPLEMENTATION.configs(problem, gpu)
    fallback = Config({name: values[0] for name, values in SPACE.items()})
    return min(serving, key=lambda c: _estimate(problem, c, gpu), default=fallback)


IMPLEMENTATION = Implementation(
    entry="nvfp4_matmul",
    language="cuda",
    variant="wgmma",
    summary="for many rows: wgmma with weights in registers, decoded from a ring of packed ones",
    archs=("sm_90a",),
    space=SPACE,
    illegal=_reject,
    default=_default,
    program=_program,
    estimate=_estimate,
    techniques={
        "wgmma": "HGMMA",
        "tma": "UTMALDG",
        "mbarrier": "SYNCS",
        "register reallocation": "USETMAXREG",
        "dependent launch": "ACQBULK",
    },
    rank=2,
)

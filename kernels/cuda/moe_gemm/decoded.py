"""`moe_gemm` with weights of 4 or 8 bits on Hopper: wgmma multiplies weights decoded in registers.

Activations are multiplied in 16 bits. Two kinds are prepared by a launch of their own: float8
activations of 4-bit weights are widened, and columns of activations of float8 weights are put into
the order in which these weights are decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, erfc, sqrt

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    Pointer,
    Program,
    Step,
    TensorMap,
)
from kernelcat.catalog.spec import Problem
from kernelcat.dtypes import itemsize
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.common.packed_weights import (
    STAGE_COLS,
    STAGE_ROWS,
    stage_bytes,
    weight_maps,
)
from kernelcat.kernels.cuda.common.persistent import overlapped_us
from kernelcat.kernels.cuda.moe_gemm.combine import VECTOR, sum_step
from kernelcat.kernels.cuda.moe_gemm.operands import (
    GROUPS,
    d_cols,
    gating,
    is_empty,
    num_rows,
    weight_format,
)
from kernelcat.kernels.cuda.moe_gemm.plan import Tiling
from kernelcat.reference._experts import FP4, FP8
from kernelcat.reference._fp4 import BLOCKS
from kernelcat.reference._fp4_tiles import TILE_COLS, TILE_ROWS
from kernelcat.reference.moe_gemm import ENTRY
from kernelcat.runtime.gpu import KB, Gpu

MIN_STAGES, MAX_STAGES = 3, 12
SPACE = {
    "tile": (
        *("16x128", "32x128", "48x128", "64x128", "80x128", "96x128"),
        *("128x128", "144x128", "192x128", "256x128"),
        *("128x192", "128x256", "48x256", "16x256", "32x256"),
    )
}
"""tile : rows of an expert x rows of the expert's weights"""


WIDE_FLOAT8_TILES = ("16x256", "32x256", "48x256")
"""Tiles of float8 weights alone: few rows, and 256 rows of weights, whose ring holds more bytes in
flight than the rings of three thread blocks with 128 rows of weights."""
FLOAT8_TILES = (
    *("16x128", "32x128", "64x128", "80x128", "96x128", "128x128", "144x128"),
    *WIDE_FLOAT8_TILES,
)
"""Tiles of float8 weights: their sums and products fit in registers."""
FP4_TILES = tuple(
    tile for tile in SPACE["tile"] if tile != "144x128" and tile not in WIDE_FLOAT8_TILES
)
"""Tiles of 4-bit weights."""
MAX_GATHERED = 144
"""Rows for which a thread that gathers has registers."""
PREPARE_THREADS, PREPARE_VECTOR = 128, 8
"""Threads of a thread block that prepares activations, and columns of a thread."""


@dataclass(frozen=True)
class Plan(Tiling):
    """A configuration in numbers, for one problem. What is tiled is D^T."""

    scale_block: int
    """4-bit weights that share a scale; 0 for float8, whose scales are not in stages."""

    has_scaled_rows: bool
    """Whether each row and 128 columns of A have a scale."""

    is_uniform: bool
    """Whether tokens spread evenly over experts."""

    @staticmethod
    @lru_cache(256)  # limits, program and estimate ask for the same plan
    def of(config: Config, problem: Problem) -> Plan:
        scale_block = BLOCKS.get(problem["format"], 0)
        fields = Tiling.fields(config, problem)
        is_uniform = problem["skew"] == "uniform"
        return Plan(
            **fields,
            scale_block=scale_block,
            has_scaled_rows=_is_scaled(problem),
            is_uniform=is_uniform,
        )

    @property
    def num_tiles(self) -> float:
        """Tiles, estimated.

        Where tokens spread evenly, an expert's rows vary about their mean by its root: a tile of a
        few rows more than the mean holds all rows of nearly every expert.
        """
        if not self.is_uniform:
            return super().num_tiles
        mean = self.rows / max(self.active, 1)
        ends = range(self.block_m, int(mean + 4 * sqrt(mean)), self.block_m)
        # One block, and for each end the probability that an expert has more rows.
        row_blocks = 1 + sum(erfc((end - mean) / sqrt(2 * mean)) / 2 for end in ends)
        return self.active * row_blocks * self.num_col_blocks

    @property
    def num_k_blocks(self) -> int:
        return ceil(self.k / STAGE_COLS)

    @property
    def a_pitch(self) -> int:
        """Elements from one row of the activations that are multiplied to the next."""
        return self.k if self.scale_block else ceil(self.k / TILE_COLS) * TILE_COLS

    @property
    def tile_rows(self) -> int:
        """Tile rows of an expert's weights."""
        return ceil(self.n / TILE_ROWS)

    @property
    def tile_cols(self) -> int:
        """Tiles in a tile row."""
        return ceil(self.k / TILE_COLS)

    @property
    def stage_bytes(self) -> int:
        """Operands, padded to 1 KB; scales of the rows of A or of float8 weights; two barriers."""
        if self.scale_block:
            operand_bytes = stage_bytes(self.block_m, self.scale_block, self.block_n)
        else:
            operand_bytes = (2 * self.block_m + self.block_n) * STAGE_COLS
        scale_bytes = 4 * (self.block_m + 2) if self.has_scaled_rows else 0
        if not self.scale_block:
            scale_bytes = 16
        return operand_bytes + scale_bytes + 16

    @property
    def _rest_bytes(self) -> int:
        """The lists of tiles, unused scales, and room to align the stages."""
        return 8 * (self.experts + 1) + 16 + KB

    @property
    def blocks_per_sm(self) -> int:
        """Thread blocks that an SM runs at a time: three, if their sums need few registers."""
        return 3 if self.block_m < 64 and self.block_n == 128 else 1

    @property
    def num_threads(self) -> int:
        """One consumer warpgroup and a producer warp, or two or three and a producer warpgroup."""
        if self.blocks_per_sm > 1:
            return 160
        return 512 if self.block_n == 192 else 384

    def num_stages(self, gpu: Gpu) -> int:
        """As many as fit with their two barriers, at most ``MAX_STAGES``."""
        block_bytes = (gpu.shared_bytes + KB) // self.blocks_per_sm - KB  # each block takes 1 KB
        return min((block_bytes - self._rest_bytes) // self.stage_bytes, MAX_STAGES)

    def shared_bytes(self, gpu: Gpu) -> int:
        return self.num_stages(gpu) * self.stage_bytes + self._rest_bytes


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    """One launch; before it one that prepares activations, after it one that sums rows."""
    if is_empty(problem):
        return Program(())
    plan, combine, prepares = Plan.of(config, problem), problem["combine"], _prepares(problem)
    a, out = "a_prepared" if prepares else "a", "rows" if combine else "d"
    product, size = _product(problem, plan, a, out, gpu), itemsize(problem["dtype"])
    return Program(
        (
            *((_preparation(problem, plan.a_pitch),) if prepares else ()),
            product,
            *((sum_step(problem, d_cols(problem)),) if combine else ()),
        ),
        {
            **({a: size * _a_rows(problem) * plan.a_pitch} if prepares else {}),
            **({out: size * plan.rows * d_cols(problem)} if combine else {}),
        },
    )


def _is_scaled(problem: Problem) -> bool:
    """Whether each row and 128 columns of A have a scale."""
    return bool(problem["act_dtype"] == FP8)


def _prepares(problem: Problem) -> bool:
    """Whether activations go through a workspace."""
    return _is_scaled(problem) or problem["format"] == "fp8"


def _a_rows(problem: Problem) -> int:
    return int(problem["tokens"]) if problem["gather"] else num_rows(problem)


def _preparation(problem: Problem, pitch: int) -> Step:
    """The launch that widens activations, or puts their columns into the order of the weights."""
    name = "widen" if _is_scaled(problem) else "arrange"
    sizes = (problem["K"],) if _is_scaled(problem) else (problem["K"], pitch)
    return Step(
        instance(f"moe_gemm/{name}.cu", f"moe_gemm_{name}", problem["dtype"]),
        (_a_rows(problem), ceil(pitch / (PREPARE_VECTOR * PREPARE_THREADS)), 1),
        (Pointer("a"), Pointer("a_prepared"), *map(Int32, sizes)),
        PREPARE_THREADS,
        programmatic=True,
    )


def _product(problem: Problem, plan: Plan, a: str, out: str, gpu: Gpu) -> Step:
    gather, is_fp8 = problem["gather"], problem["format"] == "fp8"
    map_w, map_scales = _float8_maps(plan) if is_fp8 else _packed_maps(plan)
    map_a = map_w if gather else _activation_map(a, plan, problem)
    source = instance(
        "moe_gemm/decoded.cu",
        "moe_gemm_decoded",
        *(problem["dtype"], weight_format(problem), plan.block_m, plan.block_n),
        *(plan.num_stages(gpu), gating(problem), gather, _is_scaled(problem)),
    )
    sizes = (plan.rows, _a_rows(problem), problem["top_k"], plan.experts, plan.n, plan.a_pitch)
    return Step(
        source,
        (min(plan.max_tiles, plan.blocks_per_sm * gpu.sms), 1, 1),
        (
            *(map_a, map_w, map_scales),
            *map(Pointer, (a, "a_scale", "w_scale" if is_fp8 else "w_global_scale", "bias")),
            *(*GROUPS, Pointer(out)),
            *map(Int32, (*sizes, plan.group_m)),
        ),
        plan.num_threads,
        plan.shared_bytes(gpu),
        programmatic=True,
    )


def _packed_maps(plan: Plan) -> tuple[TensorMap, TensorMap]:
    tile_rows = plan.experts * plan.tile_rows
    return weight_maps(tile_rows, plan.tile_cols, plan.scale_block, plan.block_n)


def _float8_maps(plan: Plan) -> tuple[TensorMap, TensorMap]:
    """All experts' rows of W, in boxes of 128 bytes, and once more for the map that is not read."""
    shape, box = (plan.k, plan.experts * plan.n), (STAGE_COLS, plan.block_n)
    map_w = TensorMap("w", FP8, shape, (plan.k,), box, STAGE_COLS, l2_promotion=128)
    return map_w, map_w


def _activation_map(a: str, plan: Plan, problem: Problem) -> TensorMap:
    """Grouped rows of A, in boxes of 64 columns."""
    shape, box = (plan.a_pitch, plan.rows), (64, plan.block_m)
    return TensorMap(a, problem["dtype"], shape, (2 * plan.a_pitch,), box, 128, l2_promotion=128)


# ---- which configurations serve ----------------------------------------------------------------


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    format, dtype = problem["format"], problem["dtype"]
    if format not in ("fp8", *FP4):
        return f"weights in {format} need not be decoded: the variant wgmma multiplies them"
    if format in FP4 and problem["packing"] != "tiles":
        return "4-bit weights must be in the order of registers that kernelcat.fp4.prepack makes"
    if format == "fp8" and problem["act_dtype"] == FP8:
        return "float8 weights and activations need not be decoded: the variant wgmma serves them"
    if format == "mxfp4" and dtype == "float16":
        return "scales of MXFP4 leave float16's range: naive and Triton multiply them in float32"
    if problem["combine"] and problem["activation"] != "none":
        return "rows that are summed into tokens are stored without an activation"
    if problem["combine"] and problem["N"] % VECTOR:
        return f"N={problem['N']} must be a multiple of {VECTOR} where rows are summed"
    plan = Plan.of(config, problem)
    if plan.k == 0:
        return "there is nothing to multiply for K=0"
    if format == "fp8" and plan.k % 16:
        return f"float8 weights need K={plan.k} to be a multiple of 16"
    if config["tile"] not in (served := FLOAT8_TILES if format == "fp8" else FP4_TILES):
        return f"tiles of {format} weights are {', '.join(served)}: their sums fit in registers"
    if _is_scaled(problem) and plan.block_m not in (64, 128):
        return f"float8 activations need tiles of 64 or 128 rows, not {plan.block_m}"
    if plan.block_n > 128 and _is_scaled(problem):
        return f"tiles of {plan.block_n} rows of weights have no registers for float8 products"
    if problem["gather"] and plan.block_m > MAX_GATHERED:
        return f"a thread that gathers has no registers for its part of {plan.block_m} rows"
    if why := plan.why_too_large():
        return why
    if plan.num_stages(gpu) < MIN_STAGES:
        return f"fewer than {MIN_STAGES} stages fit in {gpu.shared_bytes} bytes of shared memory"
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if is_empty(problem):
        return None
    return Plan.of(config, problem).why_unpromising()


# ---- which one without measuring ---------------------------------------------------------------

_STAGE_US = {
    16: 0.44, 32: 0.50, 48: 0.60, 64: 0.70, 80: 0.75, 96: 0.79, 128: 0.88, 192: 1.1, 256: 1.4,
}  # fmt: skip
"""Rows of A in a tile -> microseconds that an SM takes for a stage of 128 rows of 4-bit weights."""
_WIDE_STAGE_US = {
    (128, 192): 1.18, (128, 256): 1.62, (16, 256): 0.99, (32, 256): 1.09, (48, 256): 0.93,
}  # fmt: skip
"""(Rows of A, rows of weights) in a tile -> microseconds that an SM takes for a stage.
That of 48 x 256 is from the race of dsv3-1024-fp8; 16 x 256 ties with two of 16 x 128 in
that of dsv3-64-fp8; 32 x 256 is not measured."""
_FLOAT8_STAGE_US = {16: 0.49, 32: 0.54, 64: 0.53, 80: 0.69, 96: 0.77, 128: 0.77, 144: 0.87}
"""Rows of A in a tile -> microseconds that an SM takes for a stage of float8 weights."""

_TILE_US = 1.0
"""Storing a tile of 128 x 128 while nothing is multiplied."""


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Waves of tiles, each as long as its stages take; or the memory's time."""
    if is_empty(problem):
        return LAUNCH_US
    plan = Plan.of(config, problem)
    waves = max(plan.num_tiles / gpu.sms, 1.0)
    if plan.block_n > STAGE_ROWS:
        stage_us = _WIDE_STAGE_US[plan.block_m, plan.block_n]
    else:
        stage_us = (_STAGE_US if plan.scale_block else _FLOAT8_STAGE_US)[plan.block_m]
    store_us = _TILE_US * plan.block_m / 128 * plan.block_n / 128
    tile_us = plan.num_k_blocks * stage_us + store_us
    us = overlapped_us(waves * tile_us, ENTRY.bytes_moved(problem), gpu)
    if problem["combine"]:
        us += copy_us(4 * plan.rows * d_cols(problem), gpu) - LAUNCH_US / 2
    if _prepares(problem):
        us += copy_us(4 * _a_rows(problem) * plan.k, gpu) - LAUNCH_US / 2
    return us


IMPLEMENTATION = Implementation(
    entry="moe_gemm",
    language="cuda",
    variant="decoded",
    summary="4-bit and float8 weights, decoded from a ring to registers that wgmma reads",
    archs=("sm_90a",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    program=_program,
    estimate=_estimate,
    techniques={
        "wgmma": "HGMMA",
        "tma": "UTMALDG",
        "mbarrier": "SYNCS",
        "dependent launch": "ACQBULK",
    },
    rank=2,
)

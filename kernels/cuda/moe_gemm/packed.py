"""`moe_gemm` with packed 4-bit weights on Hopper: wgmma multiplies weights decoded in registers."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US
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
from kernelcat.kernels.cuda.common.launch import MAX_BLOCKS, instance
from kernelcat.kernels.cuda.common.packed_weights import STAGE_COLS, stage_bytes, weight_maps
from kernelcat.kernels.cuda.common.persistent import overlapped_us
from kernelcat.kernels.cuda.moe_gemm.operands import GROUPS, gating, is_empty
from kernelcat.kernels.cuda.moe_gemm.plan import Tiling
from kernelcat.reference._experts import FP4
from kernelcat.reference._fp4 import BLOCKS
from kernelcat.reference._fp4_tiles import TILE_COLS, TILE_ROWS
from kernelcat.reference.moe_gemm import ENTRY
from kernelcat.runtime.gpu import KB, Gpu

MIN_STAGES, MAX_STAGES = 3, 12
SPACE = {"tile": ("16x128", "32x128", "48x128", "64x128", "128x128", "192x128", "256x128")}
"""tile : rows of an expert x rows of the expert's weights"""


@dataclass(frozen=True)
class Plan(Tiling):
    """A configuration in numbers, for one problem. What is tiled is D^T."""

    scale_block: int
    """Weights that share a scale."""

    @staticmethod
    def of(config: Config, problem: Problem) -> Plan:
        return Plan(**Tiling.fields(config, problem), scale_block=BLOCKS[problem["format"]])

    @property
    def num_k_blocks(self) -> int:
        return ceil(self.k / STAGE_COLS)

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
        return stage_bytes(self.block_m, self.scale_block)

    @property
    def _rest_bytes(self) -> int:
        """The lists of tiles, and room to align the stages."""
        return 8 * (self.experts + 1) + KB

    @property
    def blocks_per_sm(self) -> int:
        """Thread blocks that an SM runs at a time: three, if their sums need few registers."""
        return 3 if self.block_m < 64 else 1

    @property
    def num_threads(self) -> int:
        """One consumer warpgroup and a producer warp, or two and a producer warpgroup."""
        return 160 if self.blocks_per_sm > 1 else 384

    def num_stages(self, gpu: Gpu) -> int:
        """As many as fit with their two barriers, at most ``MAX_STAGES``."""
        block_bytes = (gpu.shared_bytes + KB) // self.blocks_per_sm - KB  # each block takes 1 KB
        return min((block_bytes - self._rest_bytes) // (self.stage_bytes + 16), MAX_STAGES)

    def shared_bytes(self, gpu: Gpu) -> int:
        return self.num_stages(gpu) * (self.stage_bytes + 16) + self._rest_bytes


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    plan, gather = Plan.of(config, problem), problem["gather"]
    map_w, map_scales = weight_maps(plan.experts * plan.tile_rows, plan.tile_cols, plan.scale_block)
    map_a = map_w if gather else _activation_map(plan, problem)
    source = instance(
        "moe_gemm/packed.cu",
        "moe_gemm_packed",
        *(problem["dtype"], problem["format"] == "nvfp4", plan.block_m, plan.num_stages(gpu)),
        *(gating(problem), gather),
    )
    sizes = (plan.rows, problem["top_k"], plan.experts, plan.n, plan.k)
    step = Step(
        source,
        (min(plan.max_tiles, plan.blocks_per_sm * gpu.sms), 1, 1),
        (
            *(map_a, map_w, map_scales),
            *map(Pointer, ("a", "w_global_scale", "bias")),
            *(*GROUPS, Pointer("d")),
            *map(Int32, (*sizes, plan.group_m)),
        ),
        plan.num_threads,
        plan.shared_bytes(gpu),
        programmatic=True,
    )
    return Program((step,))


def _activation_map(plan: Plan, problem: Problem) -> TensorMap:
    """Grouped rows of A, in boxes of 64 columns."""
    shape, box = (plan.k, plan.rows), (64, plan.block_m)
    return TensorMap("a", problem["dtype"], shape, (2 * plan.k,), box, 128, l2_promotion=128)


# ---- which configurations serve ----------------------------------------------------------------


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["format"] not in FP4 or problem["packing"] != "tiles":
        return (
            "weights must be in 4 bits, in the order of registers that kernelcat.fp4.prepack makes"
        )
    if problem["act_dtype"] != problem["dtype"]:
        return "activations must have 16 bits, as what the weights are decoded to"
    if problem["format"] == "mxfp4" and problem["dtype"] == "float16":
        return "scales of MXFP4 leave float16's range: naive and Triton multiply them in float32"
    if problem["combine"]:
        return "rows are not summed here: D has the rounded rows of all experts"
    plan = Plan.of(config, problem)
    if plan.k == 0:
        return "there is nothing to multiply for K=0"
    if problem["gather"] and plan.block_m > 128:
        return f"a thread that gathers has no registers for its part of {plan.block_m} rows"
    if plan.experts * plan.tile_rows >= 1 << 31 or plan.max_tiles > MAX_BLOCKS:
        return f"{plan.experts} x {plan.n} rows of weights are more than 32-bit indices reach"
    if plan.num_stages(gpu) < MIN_STAGES:
        return f"fewer than {MIN_STAGES} stages fit in {gpu.shared_bytes} bytes of shared memory"
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if is_empty(problem):
        return None
    return Plan.of(config, problem).why_unpromising()


# ---- which one without measuring ---------------------------------------------------------------

_STAGE_US = {16: 0.35, 32: 0.40, 48: 0.45, 64: 0.60, 128: 0.68, 192: 0.88, 256: 1.12}
"""Rows of A in a tile -> microseconds that an SM takes for a stage."""

_TILE_US = 1.0
"""Storing a tile of 128 x 128 while nothing is multiplied."""


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Waves of tiles, each as long as its stages take; or the memory's time."""
    if is_empty(problem):
        return LAUNCH_US
    plan = Plan.of(config, problem)
    waves = max(plan.num_tiles / gpu.sms, 1.0)
    tile_us = plan.num_k_blocks * _STAGE_US[plan.block_m] + _TILE_US * plan.block_m / 128
    return overlapped_us(waves * tile_us, ENTRY.bytes_moved(problem), gpu)


IMPLEMENTATION = Implementation(
    entry="moe_gemm",
    language="cuda",
    variant="packed",
    summary="4-bit weights: a ring of packed tiles, decoded to registers, which wgmma reads",
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

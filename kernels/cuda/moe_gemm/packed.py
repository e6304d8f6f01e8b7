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
from kernelcat.kernels.cuda.common.persistent import overlapped_us
from kernelcat.kernels.cuda.moe_gemm.operands import GROUPS, gating, is_empty, num_rows
from kernelcat.reference._assignments import active
from kernelcat.reference._experts import FP4
from kernelcat.reference._fp4 import BLOCKS
from kernelcat.reference._fp4_tiles import TILE_COLS, TILE_ROWS
from kernelcat.reference.moe_gemm import ENTRY
from kernelcat.runtime.gpu import KB, Gpu

MIN_STAGES, MAX_STAGES = 3, 12
BLOCK_N, BLOCK_K = 128, 128
"""Rows of W in a tile, and columns of A and W in a stage."""
CONSUMERS = 2
"""Warpgroups that multiply."""
GROUP_ROWS = 1024
"""Rows of A that make a group in the order of an expert's tiles."""
SPACE = {"tile": ("64x128", "128x128", "192x128", "256x128")}
"""tile : rows of an expert x rows of the expert's weights"""


@dataclass(frozen=True)
class Plan:
    """A configuration in numbers, for one problem. What is tiled is D^T."""

    block_m: int
    scale_block: int
    """Weights that share a scale."""
    experts: int
    n: int
    k: int
    rows: int
    active: int
    """Experts that serve a token, estimated."""

    @staticmethod
    def of(config: Config, problem: Problem) -> Plan:
        return Plan(
            int(config["tile"].split("x")[0]),
            BLOCKS[problem["format"]],
            problem["experts"],
            problem["N"],
            problem["K"],
            num_rows(problem),
            active(problem),
        )

    @property
    def num_k_blocks(self) -> int:
        return ceil(self.k / BLOCK_K)

    @property
    def tile_rows(self) -> int:
        """Tile rows of an expert's weights."""
        return ceil(self.n / TILE_ROWS)

    @property
    def tile_cols(self) -> int:
        """Tiles in a tile row."""
        return ceil(self.k / TILE_COLS)

    @property
    def max_tiles(self) -> int:
        """The most tiles that any offsets make."""
        row_blocks = self.rows // self.block_m + min(self.experts, self.rows)
        return row_blocks * ceil(self.n / BLOCK_N)

    @property
    def num_tiles(self) -> float:
        """Tiles, estimated: on average half of an expert's last block of rows is empty."""
        row_blocks = max(self.rows / self.block_m + self.active / 2, self.active)
        return row_blocks * ceil(self.n / BLOCK_N)

    @property
    def stage_bytes(self) -> int:
        """Rows of A in 16 bits, codes and scales, padded to the next stage's alignment of 1 KB."""
        weights = BLOCK_N * (BLOCK_K // 2 + BLOCK_K // self.scale_block)
        return 2 * self.block_m * BLOCK_K + ceil(weights / KB) * KB

    @property
    def _rest_bytes(self) -> int:
        """The lists of tiles, and room to align the stages."""
        return 8 * (self.experts + 1) + KB

    def num_stages(self, gpu: Gpu) -> int:
        """As many as fit with their two barriers, at most ``MAX_STAGES``."""
        return min((gpu.shared_bytes - self._rest_bytes) // (self.stage_bytes + 16), MAX_STAGES)

    def shared_bytes(self, gpu: Gpu) -> int:
        return self.num_stages(gpu) * (self.stage_bytes + 16) + self._rest_bytes


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    plan, gather = Plan.of(config, problem), problem["gather"]
    map_w, map_scales = _weight_maps(plan)
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
        (min(plan.max_tiles, gpu.sms), 1, 1),
        (
            *(map_a, map_w, map_scales),
            *map(Pointer, ("a", "w_global_scale", "bias")),
            *(*GROUPS, Pointer("d")),
            *map(Int32, (*sizes, max(GROUP_ROWS // plan.block_m, 1))),
        ),
        (CONSUMERS + 1) * 128,
        plan.shared_bytes(gpu),
        programmatic=True,
    )
    return Program((step,))


def _activation_map(plan: Plan, problem: Problem) -> TensorMap:
    """Grouped rows of A, in boxes of 64 columns."""
    shape, box = (plan.k, plan.rows), (64, plan.block_m)
    return TensorMap("a", problem["dtype"], shape, (2 * plan.k,), box, 128, l2_promotion=128)


def _weight_maps(plan: Plan) -> tuple[TensorMap, TensorMap]:
    """Maps of codes and scales: a tile row of W is a row of 32-bit words, a box fills a stage."""
    rows, stage_tiles = plan.experts * plan.tile_rows, BLOCK_K // TILE_COLS

    def map_of(tensor: str, tile_bytes: int) -> TensorMap:
        words = tile_bytes // 4
        shape, box = (plan.tile_cols * words, rows), (stage_tiles * words, BLOCK_N // TILE_ROWS)
        return TensorMap(tensor, "int32", shape, (plan.tile_cols * tile_bytes,), box)

    code_bytes = TILE_ROWS * TILE_COLS // 2
    return map_of("w", code_bytes), map_of("w_scale", 2 * code_bytes // plan.scale_block)


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
    plan = Plan.of(config, problem)
    expert_rows = plan.rows / max(plan.active, 1)
    if plan.block_m > 64 and plan.block_m >= 4 * expert_rows:
        return f"blocks of {plan.block_m} rows are mostly empty at {expert_rows:.3g} an expert"
    if plan.block_m == 64 and expert_rows > 256:
        return f"blocks of 64 rows decode weights too often at {expert_rows:.3g} rows an expert"
    return None


# ---- which one without measuring ---------------------------------------------------------------

_STAGE_US = {64: 0.40, 128: 0.62, 192: 0.88, 256: 1.12}
"""Rows of A in a tile -> microseconds that a stage takes, from nvfp4_matmul."""

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
        "register reallocation": "USETMAXREG",
        "dependent launch": "ACQBULK",
    },
    rank=2,
)

"""`moe_gemm` by wgmma on Hopper: the tile's shape is tuned."""

from __future__ import annotations

from math import ceil

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
from kernelcat.kernels.cuda.common.persistent import overlapped_us
from kernelcat.kernels.cuda.moe_gemm.combine import VECTOR, finish_step, sum_step
from kernelcat.kernels.cuda.moe_gemm.operands import (
    GROUPS,
    d_cols,
    gating,
    is_empty,
    num_rows,
)
from kernelcat.kernels.cuda.moe_gemm.plan import PAIR, ROW_BYTES, Plan, Tiling
from kernelcat.reference._experts import FP8
from kernelcat.reference.moe_gemm import ENTRY
from kernelcat.runtime.gpu import Gpu

MIN_STAGES = 3

TILES = ("64x128", "64x256", "128x128", "128x192", "128x256", "256x128")
"""Tiles that one or two consumer warpgroups compute together."""

PAIRED = tuple(f"{tile}{PAIR}" for tile in ("128x192", "128x256", "256x128", "2x128x192"))
"""Tiles of which a cluster of two thread blocks computes two that share their weights."""

SPACE = {
    "tile": (*TILES, "2x128x128", "2x128x192", *PAIRED),
    "combine": ("ordered", "atomic"),
}
"""
tile : rows of an expert x rows of the expert's weights; 2x: two consumer warpgroups take turns, so
    that one multiplies its tile while the other one stores; pair: a cluster of two thread blocks
    computes two tiles below each other, and each loads half of their weights for both
combine : how rows are summed into tokens: in the order of slots, from rows in 16 bits, by a second
    launch; or by atomic additions in float32, in whatever order tiles end
"""


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    plan, is_atomic = Plan.of(config, problem), config["combine"] == "atomic"
    product = _product(problem, plan, is_atomic, gpu)
    if not problem["combine"]:
        return Program((product,))
    if is_atomic:
        sum_bytes = 4 * problem["tokens"] * _pitch(problem)
        return Program((product, finish_step(problem, _pitch(problem))), {"sums": sum_bytes})
    row_bytes = itemsize(problem["dtype"]) * plan.rows * _pitch(problem)
    return Program((product, sum_step(problem, _pitch(problem))), {"rows": row_bytes})


def _pitch(problem: Problem) -> int:
    """Elements from one row of the product's result to the next."""
    cols = d_cols(problem)
    return ceil(cols / VECTOR) * VECTOR if problem["combine"] else cols


def _product(problem: Problem, plan: Plan, is_atomic: bool, gpu: Gpu) -> Step:
    """The grouped product; with ``combine`` into a workspace."""
    gather = problem["gather"]
    out = "d" if not problem["combine"] else "sums" if is_atomic else "rows"
    w_rows, w_box = plan.experts * plan.n, plan.block_n // plan.cluster_size
    map_w = _operand_map("w", problem, plan, w_rows, w_box)
    map_a = map_w if gather else _operand_map("a", problem, plan, plan.rows, plan.block_m)
    source = instance(
        "moe_gemm/wgmma.cu",
        "moe_gemm_wgmma",
        *(problem["dtype"], problem["act_dtype"], plan.block_m, plan.block_n),
        *(
            plan.num_stages(gpu),
            gating(problem),
            gather,
            is_atomic,
            plan.takes_turns,
            plan.makes_pairs,
        ),
    )
    a_rows = problem["tokens"] if gather else plan.rows
    sizes = (plan.rows, a_rows, problem["top_k"], plan.experts, plan.n, plan.k, _pitch(problem))
    return Step(
        source,
        (plan.num_blocks(gpu), 1, 1),
        (
            *(map_a, map_w, *map(Pointer, ("a", "a_scale", "w_scale", "bias")), *GROUPS),
            *map(Pointer, ("gates", out)),
            *map(Int32, (*sizes, plan.group_m)),
        ),
        plan.num_threads,
        plan.shared_bytes(gpu),
        (plan.cluster_size, 1, 1),
        programmatic=True,
    )


def _operand_map(name: str, problem: Problem, plan: Plan, rows: int, box_rows: int) -> TensorMap:
    """A or all experts' weights, (``rows``, K), in boxes of ``box_rows`` x 128 bytes.

    A miss brings 128 bytes into L2, one row of a box.
    """
    k, size = plan.k, plan.element_bytes
    box = (plan.block_k, box_rows)
    return TensorMap(
        name, problem["act_dtype"], (k, rows), (size * k,), box, ROW_BYTES, l2_promotion=128
    )


# ---- which configurations serve ----------------------------------------------------------------


def why_not_multiplied(problem: Problem, tiling: Tiling) -> str | None:
    """Why wgmma cannot multiply the operands as they are stored, in CUDA and CuTe; or None."""
    format, act_dtype, k = problem["format"], problem["act_dtype"], tiling.k
    if format != act_dtype and (format, act_dtype) != ("fp8", FP8):
        return f"weights in {format} and activations in {act_dtype} are not multiplied here"
    if problem["combine"] and problem["activation"] != "none":
        return "rows that are summed into tokens are stored without an activation"
    element_bytes = itemsize(act_dtype)
    divisor = 16 // element_bytes
    if k == 0 or k % divisor:
        return (
            f"K={k} must be a positive multiple of {divisor}: TMA needs rows of a multiple of "
            "16 bytes"
        )
    if element_bytes == 1 and tiling.block_n > 192:
        return f"sums and products of {tiling.block_n} columns do not fit in registers"
    return tiling.why_too_large()


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    plan = Plan.of(config, problem)
    if why := why_not_multiplied(problem, plan):
        return why
    if config["combine"] == "atomic" and not problem["combine"]:
        return "no rows are summed into tokens, by atomics or otherwise"
    if plan.takes_turns and plan.element_bytes == 1:
        return "sums and products of a whole tile of float8 do not fit in registers"
    if plan.makes_pairs and plan.element_bytes == 1:
        return "a tile of float8 in a pair leaves no registers for what loads its scales"
    if config["combine"] == "atomic" and plan.takes_turns and plan.block_n == 192:
        return "a whole tile of 128 x 192 leaves no registers for atomic sums"
    if plan.takes_turns and problem["gather"] and problem["tokens"] * plan.k >= 1 << 35:
        return f"{problem['tokens']} rows of K={plan.k} are more than 32-bit offsets reach"
    if problem["gather"] and plan.block_m > 128:
        return f"a thread that gathers has no registers for its part of {plan.block_m} rows"
    if plan.num_stages(gpu) < MIN_STAGES:
        return f"fewer than {MIN_STAGES} stages fit in {gpu.shared_bytes} bytes of shared memory"
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    plan = Plan.of(config, problem)
    if why := plan.why_unpromising():
        return why
    if plan.takes_turns and plan.num_tiles < 2 * gpu.sms:
        return f"{plan.num_tiles:.3g} tiles leave consumers that take turns without one"
    if plan.makes_pairs and plan.expert_rows < 2 * plan.block_m:
        return (
            f"{plan.expert_rows:.3g} rows an expert have no second block of {plan.block_m} that "
            "could share weights"
        )
    if plan.block_n >= 2 * plan.n and plan.block_n > 128:
        return f"tiles of {plan.block_n} columns are mostly empty at N={plan.n}"
    return None


# ---- which one without measuring ---------------------------------------------------------------

_RATE = {128: 0.88, 192: 0.93, 256: 0.95}
"""BLOCK_N -> rate of wgmma over that of the widest one, from gemm."""

_L2_BYTES = 75e9
"""Bytes that L2 gives one SM in a second when all SMs load."""

_STORE_US = 2.0
"""Storing a tile of 128 x 256 while nothing is multiplied."""


_PAIRS_SHARE = 0.95
"""Time of tiles in pairs over that of the same tiles alone: they read a third less from L2."""

_TURNS_SHARE = {(False, False): 0.94, (False, True): 0.94, (True, False): 1.09, (True, True): 1.02}
"""Whether rows are gathered, and tiles are in pairs -> time of consumers that take turns over that
of consumers that share a tile."""


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Waves of tiles, each as long as its products or its operands take; or the memory's time."""
    plan = Plan.of(config, problem)
    area = plan.block_m * plan.block_n
    peak = gpu.flops[problem["act_dtype"]] / gpu.sms * 0.8 * _RATE[plan.block_n]
    math_us = 2 * area * plan.block_k / peak * 1e6
    load_us = plan.stage_bytes / _L2_BYTES * 1e6
    waves = max(plan.num_tiles / gpu.sms, 1.0)
    busy_us = waves * (plan.num_k_blocks * max(math_us, load_us) + _STORE_US * area / (128 * 256))
    if plan.makes_pairs:
        busy_us *= _PAIRS_SHARE
    if plan.takes_turns:
        busy_us *= _TURNS_SHARE[problem["gather"], plan.makes_pairs]
    us = overlapped_us(busy_us, ENTRY.bytes_moved(problem), gpu)
    if not problem["combine"]:
        return us
    if config["combine"] == "atomic":
        return us + copy_us(8 * num_rows(problem) * d_cols(problem), gpu) + LAUNCH_US / 2
    row_bytes = 2 * itemsize(problem["dtype"]) * num_rows(problem)
    return us + copy_us(row_bytes * d_cols(problem), gpu) - LAUNCH_US / 2


IMPLEMENTATION = Implementation(
    entry="moe_gemm",
    language="cuda",
    variant="wgmma",
    summary="persistent, warp-specialized: tiles found on the device; rows gathered by cp.async",
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
        "warp vote": "VOTE",
        "dependent launch": "ACQBULK",
    },
    rank=1,
)

"""`moe_gemm` in Triton: naive, tiled (every format), tma (weights and ungathered rows by TMA).

Finding an expert's tiles from the offsets on the device is also in MegaBlocks (Gale et al. 2022)
and in OpenAI's triton_kernels.
"""

from math import ceil

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.dtypes import itemsize
from kernelcat.jit import triton
from kernelcat.kernels.triton.common.architectures import HOPPER
from kernelcat.kernels.triton.common.experts import illegal_type, weight_types
from kernelcat.kernels.triton.common.grid import MAX_GRID_Y
from kernelcat.kernels.triton.common.product import (
    GROUP_M,
    WARPGROUP_ACCUMULATORS,
    Tile,
    illegal_stages,
)
from kernelcat.reference._assignments import active, row_blocks
from kernelcat.reference._experts import FP4, FP8
from kernelcat.reference.moe_gemm import A_ROWS, ENTRY, out_cols
from kernelcat.runtime.gpu import Gpu

KERNELS = "kernelcat.kernels.triton.moe_gemm.device:"
COMBINE_BLOCK = 1024
"""Columns of D that a program of the second kernel computes."""
RESERVED_BYTES = 2048
"""Shared memory of a program besides its stages."""


# ---- programs ----------------------------------------------------------------------------------


def _num_rows(problem: Problem) -> int:
    """Rows that are grouped by expert, those of dropped assignments included."""
    return int(problem["tokens"] * problem["top_k"])


def _d_rows(problem: Problem) -> int:
    return int(problem["tokens"]) if problem["combine"] else _num_rows(problem)


def _d_cols(problem: Problem) -> int:
    return int(out_cols(problem.values))


def _is_empty(problem: Problem) -> bool:
    """Whether D has no elements."""
    return _d_rows(problem) * _d_cols(problem) == 0


def _pointers(problem: Problem, *names: str) -> dict[str, triton.Argument]:
    dtype = problem["dtype"]
    w_type, scale_type = weight_types(problem)
    types = {
        "a": problem["act_dtype"], "a_scale": "float32", "w": w_type, "w_scale": scale_type,
        "global_scale": "float32", "bias": dtype, "offsets": "int32", "order": "int32",
        "position": "int32", "gates": "float32", "residual": dtype, "d": dtype,
    }  # fmt: skip
    tensors = {"global_scale": "w_global_scale"}
    return {name: triton.pointer(tensors.get(name, name), types[name]) for name in names}


OPERANDS = ("a", "a_scale", "w", "w_scale", "global_scale", "bias", "offsets", "order")


def _sizes(problem: Problem) -> dict[str, triton.Argument]:
    return {
        "top_k": triton.integer(problem["top_k"], divisor=1),
        "N": triton.integer(problem["N"]),
        "K": triton.integer(problem["K"]),
        "A_ROWS": triton.integer(A_ROWS.of(problem.values), divisor=1),
    }


def _constants(problem: Problem) -> dict[str, int | str | bool]:
    experts = problem["experts"]
    return {
        "FORMAT": problem["format"],
        "IN_TILES": problem["packing"] == "tiles",
        "A_IN_FP8": problem["act_dtype"] == FP8,
        "GATHER": problem["gather"],
        "HAS_BIAS": problem["bias"],
        "ACTIVATION": problem["activation"],
        "EXPERTS": experts,
        "MAX_EXPERTS": 1 << experts.bit_length(),
    }


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    block = config["block"]
    step = triton.step(
        KERNELS + "naive",
        (_d_rows(problem), ceil(problem["N"] / block), 1),
        _pointers(problem, *OPERANDS, "position", "gates", "residual", "d") | _sizes(problem),
        {
            **_constants(problem),
            "COMBINE": problem["combine"],
            "HAS_RESIDUAL": problem["residual"],
            "BLOCK_N": block,
            "BLOCK_K": 64,
        },
        num_warps=4,
        num_stages=1,
    )
    return Program((step,))


def _max_tiles(problem: Problem, tile: Tile) -> int:
    """The most tiles that any offsets make, rows without an assignment included."""
    rows = _num_rows(problem)
    row_blocks = rows // tile.m + min(problem["experts"] + 1, rows)
    return row_blocks * ceil(problem["N"] / tile.n)


def _tiled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _grouped(problem, config, _pointers(problem, *OPERANDS), by_tma=False)


def _tma(problem: Problem, config: Config, gpu: Gpu) -> Program:
    arguments, tile = _pointers(problem, *OPERANDS), Tile.of(config)
    n, k = problem["N"], problem["K"]
    w_rows = problem["experts"] * n
    arguments["w"] = triton.descriptor("w", problem["act_dtype"], (w_rows, k), (tile.n, tile.k))
    if not problem["gather"]:
        shape = (A_ROWS.of(problem.values), k)
        arguments["a"] = triton.descriptor("a", problem["act_dtype"], shape, (tile.m, tile.k))
    return _grouped(problem, config, arguments, by_tma=True)


def _grouped(
    problem: Problem, config: Config, arguments: dict[str, triton.Argument], by_tma: bool
) -> Program:
    """The grouped product, and with ``combine`` the weighted sums of its rows."""
    if _is_empty(problem):
        return Program(())
    tile, is_combined = Tile.of(config), problem["combine"]
    rows = triton.pointer("rows", problem["dtype"])
    step = triton.step(
        KERNELS + "tiled",
        (_max_tiles(problem, tile), 1, 1),
        {
            **arguments,
            "out": rows if is_combined else _pointers(problem, "d")["d"],
            "num_rows": triton.integer(_num_rows(problem), divisor=1),
            **_sizes(problem),
        },
        {
            **_constants(problem),
            "CLEAR": not is_combined,
            "BY_TMA": by_tma,
            "SWAP": tile.m < 64 or problem["format"] in FP4,
            "DEPENDENT": False,
            **tile.constants,
            "GROUP_M": GROUP_M,
        },
        num_warps=tile.warps,
        num_stages=config["stages"],
    )
    if not is_combined:
        return Program((step,))
    row_bytes = itemsize(problem["dtype"]) * _num_rows(problem) * _d_cols(problem)
    return Program((step, _sum_step(problem)), {"rows": row_bytes})


def _sum_step(problem: Problem) -> Step:
    """The weighted sums of the rows in the workspace, in the order of slots."""
    cols = _d_cols(problem)
    return triton.step(
        KERNELS + "combine",
        (problem["tokens"], ceil(cols / COMBINE_BLOCK), 1),
        {
            "rows": triton.pointer("rows", problem["dtype"]),
            **_pointers(problem, "position", "gates", "residual", "d"),
            "top_k": triton.integer(problem["top_k"], divisor=1),
            "num_cols": triton.integer(cols),
        },
        {"HAS_RESIDUAL": problem["residual"], "BLOCK": COMBINE_BLOCK, "DEPENDENT": False},
        num_warps=4,
        num_stages=1,
    )


# ---- which configurations can run, and which are worth a try -------------------------------------


def _illegal_naive(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["N"] > MAX_GRID_Y * config["block"]:
        return f"N={problem['N']} takes more than {MAX_GRID_Y} programs on a second axis"
    return illegal_type(problem, gpu)


def _illegal_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile, stages = Tile.of(config), config["stages"]
    if problem["packing"] == "tiles" and (stages > 3 or tile.m > 64):
        return (
            f"tiles of {tile.m} rows and {stages} stages: Triton 3.6 overwrites packed weights "
            "that wgmma still reads; at most 64 rows and 3 stages are right"
        )
    if _max_tiles(problem, tile) >= 1 << 31:
        return f"{_max_tiles(problem, tile)} tiles are more than a grid has"
    stage_bytes = tile.stage_bytes * stages + RESERVED_BYTES
    return illegal_stages(stages, stage_bytes, gpu) or illegal_type(problem, gpu)


def _illegal_tma(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return why_not_by_tma(problem) or _illegal_tiled(config, problem, gpu)


def why_not_by_tma(problem: Problem) -> str | None:
    """Why TMA can load no tiles of the operands, or None."""
    format, act_dtype, k = problem["format"], problem["act_dtype"], problem["K"]
    if (act_dtype == FP8) != (format == "fp8") or format in FP4:
        return f"weights in {format} and activations in {act_dtype} are not multiplied by TMA"
    if k == 0 or k % 16:
        return f"K={k} must be a positive multiple of 16: TMA needs rows of a multiple of 16 bytes"
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile, rows = Tile.of(config), _expert_rows(problem)
    if tile.m > 16 and tile.m >= 4 * rows:
        return f"tiles of {tile.m} rows are mostly empty at {rows:.3g} rows an expert"
    if tile.m <= 32 and rows > 4 * tile.m:
        return f"tiles of {tile.m} rows read weights too often at {rows:.3g} rows an expert"
    is_scaled = problem["act_dtype"] == FP8 or problem["format"] == "fp8"
    if is_scaled and 2 * tile.m * tile.n > WARPGROUP_ACCUMULATORS * tile.warps // 4:
        return f"sums of {tile.m} x {tile.n}, and products to be scaled, exceed the registers"
    return None


def _expert_rows(problem: Problem) -> float:
    """Rows of an expert that has any, on average."""
    return _num_rows(problem) / max(active(problem), 1)


# ---- estimates -----------------------------------------------------------------------------------

_NAIVE_FLOPS = 2e12
"""Operations a second of the baseline, a guess: it multiplies without tensor cores."""


def _estimate_naive(problem: Problem, config: Config, gpu: Gpu) -> float:
    memory_us = cost_model.copy_us(ENTRY.bytes_moved(problem), gpu)
    return memory_us + ENTRY.flops(problem) / _NAIVE_FLOPS * 1e6


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Tiles of all experts as one product, or the memory's time."""
    tile, rows = Tile.of(config), _num_rows(problem)
    is_float8 = problem["act_dtype"] == FP8 and problem["format"] == "fp8"
    us = cost_model.tiled_gemm_us(
        ceil(row_blocks(problem, tile.m)) * tile.m, problem["N"],
        ceil(problem["K"] / (2 if is_float8 else 1)),
        block_m=tile.m, block_n=tile.n, split_k=1, gpu=gpu, dtype="bfloat16",
        efficiency=0.65 if tile.m * tile.n >= 128 * 128 else 0.5,
    )  # fmt: skip
    memory_us = cost_model.copy_us(ENTRY.bytes_moved(problem), gpu)
    sum_us = cost_model.copy_us(4 * rows * _d_cols(problem) if problem["combine"] else 0, gpu)
    return max(us, memory_us) + sum_us


NAIVE = Implementation(
    entry="moe_gemm",
    language="triton",
    variant="naive",
    summary="a program for each row of D and a block of columns; every format",
    archs=("sm_80+",),
    space={"block": (32, 64)},
    illegal=_illegal_naive,
    program=_naive,
    estimate=_estimate_naive,
    rank=0,
)

TILED = Implementation(
    entry="moe_gemm",
    language="triton",
    variant="tiled",
    summary="one tile of one expert a program, found from the offsets; pipelined; every format",
    archs=("sm_80+",),
    space={
        "stages": (4, 3),  # of equal estimates the first is the default
        "tile": (
            "16x64x128", "16x128x128", "32x128x64", "64x128x64", "128x128x64", "128x256x64",
        ),
    },
    illegal=_illegal_tiled,
    unpromising=_unpromising,
    program=_tiled,
    estimate=_estimate,
    techniques={"cp_async": "LDGSTS"},
    rank=1,
)  # fmt: skip

TMA = Implementation(
    entry="moe_gemm",
    language="triton",
    variant="tma",
    summary="tiled with weights, and rows that are not gathered, by TMA",
    archs=HOPPER,
    space={
        "stages": (4, 3),
        "tile": (
            "16x128x128", "32x128x64", "64x128x64", "64x256x64", "128x128x64", "128x256x64",
            "128x128x128",
        ),
    },
    illegal=_illegal_tma,
    unpromising=_unpromising,
    program=_tma,
    estimate=_estimate,
    techniques={"tma": "UTMALDG"},
    rank=2,
)  # fmt: skip

IMPLEMENTATIONS = (NAIVE, TILED, TMA)

"""`qkv_rope_write` for tens of tokens: `rms_norm`, then a grid of products by tensor cores.

The thread block that ends last in a tile of heads rotates the heads and stores them. Its weights
are on their way while the rows are normalized.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.composition import composed, renamed
from kernelcat.catalog.cost_model import BANDWIDTH_EFFICIENCY, LAUNCH_US
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
from kernelcat.kernels.cuda import rms_norm
from kernelcat.kernels.cuda.common.cache_write import head_sizes, head_writer, num_heads
from kernelcat.kernels.cuda.gemm.operands import BLOCK_K
from kernelcat.reference.qkv_rope_write import ENTRY, PROJECTIONS
from kernelcat.runtime.gpu import KB, Gpu

WGMMA_ROWS = 64
PADDED_TOKENS = (16, 32, 64, 128)
"""kTokens: columns of a wgmma."""
MAX_HEAD_DIM = 128
NUM_THREADS = 192
"""kNumThreads: a warpgroup that multiplies, a warp that loads, one that finds pages."""
SPACE = {"split_k": (3, 1, 2, 4, 5, 6, 8), "ring_kb": (96, 192)}
"""
split_k : splits of the columns, each a thread block
ring_kb : KB of a thread block's ring at most; two thread blocks with 96 share an SM
"""
NORM_NAMES = {"weight": "norm_weight", "y": "normalized"}
"""Name in `rms_norm` -> name here."""

NORM_US = 3.6
"""The launch that normalizes, until the second one may read its rows."""
REDUCTION_US = 1.2
"""Until the thread block that ends last in a tile sees the sums of the others."""
STORE_US = 2.2
"""From the last sum to the last store: angles, rotation."""
SM_BYTES_PER_US = 75e3
"""Bytes that L2 gives one SM in a microsecond when all SMs load."""


def _tile_rows(problem: Problem) -> int:
    """kRows: rows of weights of a tile, whole heads."""
    return max(WGMMA_ROWS, int(problem["head_dim"]))


def _padded_tokens(problem: Problem) -> int:
    return next(tokens for tokens in PADDED_TOKENS if tokens >= problem["tokens"])


def _num_tiles(problem: Problem) -> int:
    return num_heads(problem) * int(problem["head_dim"]) // _tile_rows(problem)


def _num_k_blocks(problem: Problem) -> int:
    return ceil(problem["hidden"] / BLOCK_K)


def _stage_bytes(problem: Problem) -> int:
    return 2 * BLOCK_K * (_tile_rows(problem) + _padded_tokens(problem))


def _num_stages(problem: Problem, config: Config) -> int:
    return int(config["ring_kb"] * KB // _stage_bytes(problem))


def _shared_bytes(problem: Problem, config: Config) -> int:
    """sizeof(ProductShared), and room to align it to 1 KB."""
    num_stages = _num_stages(problem, config)
    more = 8 * _padded_tokens(problem) + 16 * num_stages + 16
    size = num_stages * _stage_bytes(problem) + more
    return ceil(size / KB) * KB + KB


def _norm(problem: Problem) -> Problem:
    """The rows that are multiplied."""
    return Problem.of(
        "rms_norm", M=problem["tokens"], N=problem["hidden"], dtype=problem["dtype"],
        out_format="same", residual=False, eps=problem["eps"],
    )  # fmt: skip


def norm_config(norm: Problem, gpu: Gpu) -> Config:
    """The configuration of the launch that normalizes."""
    return rms_norm.REGISTERS.default(norm, gpu)


def _map(name: str, problem: Problem, rows: int, box_rows: int) -> TensorMap:
    hidden = problem["hidden"]
    shape, box = (hidden, rows), (BLOCK_K, box_rows)
    return TensorMap(name, problem["dtype"], shape, (2 * hidden,), box, 128, l2_promotion=128)


def _product_step(problem: Problem, config: Config) -> Step:
    tokens, tile_rows = _padded_tokens(problem), _tile_rows(problem)
    weights = (
        _map(f"w{name}", problem, problem[axis] * problem["head_dim"], tile_rows)
        for name, axis in PROJECTIONS.items()
    )
    arrays = [tensor.name for tensor in ENTRY.tensors]
    rest = arrays[arrays.index("block_table") :]
    return Step(
        head_writer(problem, "products", tokens, _num_stages(problem, config)),
        (_num_tiles(problem) * config["split_k"], 1, 1),
        (
            _map("normalized", problem, problem["tokens"], tokens),
            *weights,
            *map(Pointer, (*rest, "partials", "counters")),
            *head_sizes(problem),
            *map(Int32, (problem["hidden"], config["split_k"])),
        ),
        NUM_THREADS,
        _shared_bytes(problem, config),
        programmatic=True,
    )


def _workspaces(problem: Problem, config: Config) -> dict[str, int]:
    splits, num_tiles = config["split_k"], _num_tiles(problem)
    sums = num_tiles * splits * _tile_rows(problem) * _padded_tokens(problem)
    return {
        "normalized": 2 * problem["tokens"] * problem["hidden"],
        "partials": 4 * sums * (splits > 1),
        "counters": 4 * num_tiles * (splits > 1),
    }


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if not problem["tokens"]:
        return Program(())
    norm = _norm(problem)
    first = rms_norm.REGISTERS.program(norm, norm_config(norm, gpu), gpu)
    absent = {"global_scale": 0, "scale": 0, "residual": 0}
    return composed(
        renamed(first, NORM_NAMES),
        Program((_product_step(problem, config),)),
        workspaces=_workspaces(problem, config) | absent,
    )


# ---- which configurations serve, and which one is chosen -----------------------------------------


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return _illegal_sizes(problem) or _illegal_norm(problem, gpu) or _illegal_ring(config, problem)


def _illegal_sizes(problem: Problem) -> str | None:
    tokens, head_dim, hidden = (problem[axis] for axis in ("tokens", "head_dim", "hidden"))
    if tokens > PADDED_TOKENS[-1]:
        return f"tokens={tokens} are more than the {PADDED_TOKENS[-1]} of a tile"
    if head_dim > MAX_HEAD_DIM or _tile_rows(problem) % WGMMA_ROWS:
        return f"head_dim={head_dim}: a tile of {WGMMA_ROWS} or {MAX_HEAD_DIM} rows is a whole head"
    if hidden == 0 or hidden % 8:
        return (
            f"hidden={hidden} must be a positive multiple of 8: TMA needs rows of a multiple of "
            "16 bytes"
        )
    for axis in ("heads", "kv_heads"):
        rows = problem[axis] * head_dim
        if rows == 0 or rows % _tile_rows(problem):
            return f"{axis}={problem[axis]} must make tiles of {_tile_rows(problem)} rows"
    return None


def _illegal_norm(problem: Problem, gpu: Gpu) -> str | None:
    norm = _norm(problem)
    why = rms_norm.ENTRY.constraint(norm) if rms_norm.ENTRY.constraint else None
    why = why or rms_norm.REGISTERS.why_not(norm_config(norm, gpu), norm, gpu)
    return f"the norm: {why}" if why else None


def _illegal_ring(config: Config, problem: Problem) -> str | None:
    if config["split_k"] > _num_k_blocks(problem):
        return (
            f"hidden={problem['hidden']} has {_num_k_blocks(problem)} k-blocks of {BLOCK_K}, and "
            f"each of {config['split_k']} splits needs one"
        )
    return None


def _residents(config: Config) -> int:
    """Thread blocks of an SM at a time."""
    return 2 if config["ring_kb"] <= 96 else 1


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    blocks, room = _num_tiles(problem) * config["split_k"], gpu.sms * _residents(config)
    if config["split_k"] > 1 and blocks > room:
        return f"{blocks} thread blocks are more than the {room} that run at a time"
    if config["split_k"] * 2 > max(_num_k_blocks(problem), 2):
        return f"{config['split_k']} splits have fewer than two k-blocks each"
    return None


def _late_us(num_bytes: int, early_bytes: int, rate: float) -> float:
    """Microseconds for what has not arrived by the end of the norm; ``rate`` in bytes each."""
    return num_bytes / rate - min(early_bytes / rate, NORM_US)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The norm, during which the first stages' weights arrive; then the rest of the weights from
    memory or the stages from L2, the reduction, and the stores.
    """
    splits = config["split_k"]
    blocks = _num_tiles(problem) * splits
    waves = ceil(blocks / (gpu.sms * _residents(config)))
    block_bytes = ceil(_num_k_blocks(problem) / splits) * _stage_bytes(problem)
    residents = min(_residents(config), ceil(blocks / gpu.sms))
    early_stages = min(_num_stages(problem, config), ceil(_num_k_blocks(problem) / splits))
    early_bytes = 2 * BLOCK_K * _tile_rows(problem) * early_stages
    memory_rate = BANDWIDTH_EFFICIENCY * gpu.bandwidth * 1e-6
    stream_us = max(
        _late_us(ENTRY.bytes_moved(problem), early_bytes * blocks, memory_rate),
        _late_us(waves * residents * block_bytes, residents * early_bytes, SM_BYTES_PER_US),
    )
    reduced = 4 * _tile_rows(problem) * _padded_tokens(problem) * (splits + 1) / 20e3
    reduction_us = REDUCTION_US + reduced if splits > 1 else 0.0
    return LAUNCH_US + NORM_US + stream_us + reduction_us + STORE_US


IMPLEMENTATION = Implementation(
    entry="qkv_rope_write",
    language="cuda",
    variant="products",
    summary="for tens of tokens: rms_norm, then TMA and wgmma over splits; the last one rotates",
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

"""What the host sides of `flashmla`'s kernels share: parameters, limits, programs, estimates."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from kernelcat.catalog.cost_model import BANDWIDTH_EFFICIENCY, LAUNCH_US, copy_us
from kernelcat.catalog.implementation import (
    Float32,
    Int32,
    Int64,
    Param,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cuda.flashmla.lengths import lengths_of
from kernelcat.kernels.cute.common.dependent_launch import has_dependent_launch
from kernelcat.kernels.cute.common.paged_cache import illegal_slots
from kernelcat.reference._mla_row import LATENT, PACKED, ROW
from kernelcat.reference._sequences import query_groups
from kernelcat.reference.flashmla import ENTRY, PACKED_TYPE
from kernelcat.runtime.gpu import Gpu

TENSORS = ("q", "kv_cache", "block_table", "kv_lens", "cu_q", "out", "lse")
SIZES = ("batch", "tokens", "heads", "pages", "table_width")
PITCH = LATENT + 4
"""Floats of a row's partial result: sums of values, row max, row sum, and two unused."""
GROUPS = 4
"""Groups of threads that merge a row together, where rows are few."""
MAX_GRID = 65535
"""Thread blocks of a grid along y and z."""


def is_packed(problem: Problem) -> bool:
    """Whether the cache has rows of 656 bytes, with float8 latents."""
    return bool(problem["kv_dtype"] == PACKED_TYPE)


def is_empty(problem: Problem) -> bool:
    """Whether there are no queries."""
    return problem["batch"] == 0 or problem["tokens"] == 0


def kernel_constants(problem: Problem) -> dict[str, int | str | bool]:
    """Constants that every kernel is compiled with."""
    return {
        "dtype": problem["dtype"],
        "packed": is_packed(problem),
        "page_size": problem["page_size"],
    }


def tensor_kinds(problem: Problem) -> tuple[str, ...]:
    """Kinds of the parameters in ``TENSORS``; packed rows are bytes."""
    dtype = "*" + problem["dtype"]
    cache = "*uint8" if is_packed(problem) else dtype
    return (dtype, cache, *["*int32"] * 3, dtype, "*float32")


def parameters(
    problem: Problem, scratch: tuple[Param, ...] = (), *numbers: int
) -> tuple[Param, ...]:
    """All parameters of a kernel; ``scratch`` and ``numbers`` are those of one variant only."""
    return (
        *map(Pointer, TENSORS),
        *scratch,
        *(Int32(problem[name]) for name in SIZES),
        *map(Int32, numbers),
        Float32(float(problem["sm_scale"])),
    )


def illegal_problem(problem: Problem, gpu: Gpu) -> str | None:
    """Why no kernel serves the problem."""
    if is_packed(problem) and "float8_e4m3fn" not in gpu.flops:
        return f"{gpu.sku} has no float8: kv_dtype must be the dtype of q"
    return illegal_slots(problem)


def num_rows(problem: Problem) -> int:
    """Rows of the longest sequence: the heads of one query token after another."""
    return int(problem["max_q"] * problem["heads"])


def num_row_tiles(problem: Problem, block_m: int) -> int:
    """Tiles of rows of the longest sequence."""
    return ceil(num_rows(problem) / block_m)


def illegal_size(problem: Problem, gpu: Gpu) -> str | None:
    """Why kernels on tensor cores do not serve the problem."""
    if reason := illegal_problem(problem, gpu):
        return reason
    if max(problem["batch"], problem["tokens"]) > MAX_GRID:
        return f"a grid has at most {MAX_GRID} thread blocks for sequences or for query tokens"
    if (rows := problem["tokens"] * problem["heads"]) >= 1 << 31:
        return f"{rows} rows are more than 32-bit indices reach"
    if is_empty(problem):
        return "there are no queries"
    return None


FEW_TILES = 4
"""Tiles of tokens that a thread block may take alone while most SMs are idle: a merge costs as
much."""


def unpromising_splits(
    problem: Problem, block_m: int, block_n: int, splits: int, resident_ctas: int
) -> str | None:
    """Why some splits have no tile of tokens, or SMs are full without them or idle with them.

    ``resident_ctas`` thread blocks run at once.
    """
    max_splits = max(1, problem["table_width"] * problem["page_size"] // block_n)
    tiles = num_row_tiles(problem, block_m) * problem["batch"]
    if splits > max_splits:
        return f"the {max_splits} tiles of tokens are fewer than {splits} splits"
    # Thread blocks of four waves even out sequences of unequal length, and twice as many those of
    # which most are short.
    mean_tiles = problem["pages"] * problem["page_size"] / max(problem["batch"], 1) / block_n
    waves = 8 if 4 * mean_tiles < max_splits else 4
    if splits > 1 and tiles * splits > waves * resident_ctas:
        return "fewer splits fill the SMs too"
    if FEW_TILES * splits < max_splits and 4 * tiles * splits <= resident_ctas:
        return "at least three quarters of the SMs are idle"
    return None


def attend(
    problem: Problem,
    gpu: Gpu,
    kernel: str,
    constants: Mapping[str, int | str | bool],
    *,
    block_m: int,
    splits: int,
    threads: int,
    cluster: int = 1,
) -> Program:
    """``splits`` thread blocks to a tile of ``block_m`` rows, and a kernel that merges them."""
    if is_empty(problem):
        return Program(())
    row_tiles = ceil(num_row_tiles(problem, block_m) / cluster) * cluster
    compiled = {
        **kernel_constants(problem),
        **constants,
        "split": splits > 1,
        "programmatic": has_dependent_launch(gpu),
    }
    kinds = (*tensor_kinds(problem), "*float32", *["int32"] * 7, "float32")
    source = CuteSource(f"flashmla.{kernel}", kinds, tuple(compiled.items()))
    workspaces: dict[str, int] = {}
    partial: Param = Int64(0)
    if splits > 1:
        workspaces = {"partial": 4 * PITCH * block_m * splits * row_tiles * problem["batch"]}
        partial = Pointer("partial")
    params = parameters(problem, (partial,), row_tiles, splits)
    grid = (row_tiles, splits, problem["batch"])
    steps = [Step(source, grid, params, block=threads, cluster=(cluster, 1, 1))]
    if splits > 1:
        steps.append(_combine(problem, gpu, block_m, constants, row_tiles, splits))
    return Program(tuple(steps), workspaces)


def _combine(
    problem: Problem,
    gpu: Gpu,
    block_m: int,
    constants: Mapping[str, int | str | bool],
    row_tiles: int,
    splits: int,
) -> Step:
    """The kernel that merges the partial results of the splits."""
    are_few = problem["tokens"] * problem["heads"] <= 4 * gpu.sms
    groups = GROUPS if are_few and splits >= 2 * GROUPS else 1
    compiled: dict[str, int | str | bool] = {
        "dtype": problem["dtype"],
        "block_m": block_m,
        "block_n": constants["block_n"],
        "groups": groups,
        "programmatic": has_dependent_launch(gpu),
    }
    kinds = (
        "*float32", "*int32", "*int32", "*" + problem["dtype"], "*float32", *["int32"] * 5,
    )  # fmt: skip
    source = CuteSource("flashmla.combine:Combine", kinds, tuple(compiled.items()))
    params = (
        *map(Pointer, ("partial", "kv_lens", "cu_q", "out", "lse")),
        *(Int32(problem[name]) for name in ("batch", "tokens", "heads")),
        Int32(row_tiles),
        Int32(splits),
    )
    grid = (problem["heads"], problem["tokens"], 1)
    return Step(source, grid, params, block=groups * LATENT // 4)


def row_bytes(problem: Problem) -> int:
    """Bytes of a token in the cache."""
    return PACKED if is_packed(problem) else 2 * ROW


START_US = 2.0
"""Microseconds of a thread block to load queries and a first tile, and to store the result."""
MERGE_US = 1.8
"""Microseconds of the second kernel, which merges the splits."""
PARTIAL_ROW_US = 1.35e-3
"""Microseconds to write a row's partial result and to read it in the second kernel. This and the
other times are fitted to 399 times on an H200."""
IDLE_US = 0.9
"""Microseconds of a thread block that reads a length and ends; those of a cluster wait for each
other."""


QUEUE = 0.35
"""Share of the others' work after which a thread block of the longest sequence begins, where not
all of them run at once: sequences come in any order, and the longest rarely is the chunk."""


def attend_us(
    problem: Problem,
    gpu: Gpu,
    block_m: int,
    block_n: int,
    splits: int,
    resident_ctas: int,
    tile_us: float,
    bandwidth_share: float,
    cluster: int = 1,
    is_causal: bool = False,
) -> float:
    """Time of the waves of thread blocks, ``tile_us`` for a tile of tokens, or of the bytes.

    ``is_causal``: row tiles end at the last token that they see, and the longest of each sequence
    begin first.
    """
    if is_empty(problem):
        return LAUNCH_US
    lengths = lengths_of(problem)
    groups = [(g, g.sequences * ceil(g.queries * problem["heads"] / block_m))
              for g in query_groups(problem)]  # fmt: skip
    tiles = sum(
        lengths.tiles(g.tokens - is_causal * (g.queries - 1) / 2, block_n) * row_tiles
        for g, row_tiles in groups
    ) / sum(row_tiles for _, row_tiles in groups)
    # The grid has the row tiles of the longest query for each sequence. One of each is not full.
    grid_tiles = num_row_tiles(problem, block_m) * problem["batch"]
    full_tiles = problem["tokens"] * problem["heads"] // block_m
    row_tiles = min(grid_tiles, full_tiles + problem["batch"])
    used, alone = lengths.used_splits(block_n, splits)
    ctas = row_tiles * used
    waves = ctas / resident_ctas
    efficiency = BANDWIDTH_EFFICIENCY * bandwidth_share * min(1.0, waves)
    memory_us = copy_us(ENTRY.bytes_moved(problem), gpu, efficiency)
    is_even = lengths.spread == 0 and problem["tokens"] == problem["batch"] * problem["max_q"]
    if is_even and not is_causal:  # thread blocks of equal work end together, in waves
        wave_us = ceil(tiles / splits) * tile_us + START_US
        busy_us = max(wave_us, memory_us / max(waves, 1.0)) * int(waves)
        busy_us += wave_us if waves > int(waves) else 0.0
    else:
        busy_us = (row_tiles * tiles * tile_us + ctas * START_US) / resident_ctas
        longest_us = ceil(ceil(lengths.longest / block_n) / splits) * tile_us + START_US
        queue_us = 0.0
        if waves > 1 and (not is_causal or len(groups) > 1):
            busy_us = max(busy_us, memory_us)
            queue_us = QUEUE * min(busy_us, longest_us)
        busy_us = max(busy_us, longest_us) + queue_us
    # Thread blocks that find no rows, or no tile of tokens.
    idle_ctas = grid_tiles * splits - ctas
    busy_us += idle_ctas / resident_ctas * IDLE_US * cluster
    merge_us = 0.0
    if splits > 1:
        partial_rows = problem["tokens"] * problem["heads"] * (used - alone)
        merge_us = MERGE_US + PARTIAL_ROW_US * partial_rows
    return LAUNCH_US + max(busy_us, memory_us) + merge_us

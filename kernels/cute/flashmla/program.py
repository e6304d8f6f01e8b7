"""What the host sides of `flashmla`'s kernels share: parameters, rows of tiles, splits."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from kernelcat.catalog.cost_model import BANDWIDTH_EFFICIENCY, L2_TO_DRAM, LAUNCH_US, copy_us
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
from kernelcat.reference._mla_row import LATENT, PACKED, ROW
from kernelcat.reference.flashmla import ENTRY, PACKED_TYPE
from kernelcat.reference.paged_attn import tokens_read
from kernelcat.runtime.gpu import Gpu

TENSORS = ("q", "kv_cache", "block_table", "kv_lens", "cu_q", "out", "lse")
SIZES = ("batch", "tokens", "heads", "pages", "table_width")
PITCH = LATENT + 4
"""Floats of a row's partial sums: the values, their maximum, the sum of weights, and nothing."""


GROUPS = 4
"""Of threads that share the parts of a row, where rows are few."""


def is_packed(problem: Problem) -> bool:
    return bool(problem["kv_dtype"] == PACKED_TYPE)


def is_empty(problem: Problem) -> bool:
    return problem["batch"] == 0 or problem["tokens"] == 0


def compiled_in(problem: Problem) -> dict[str, int | str | bool]:
    """What every kernel has compiled in."""
    return {
        "dtype": problem["dtype"],
        "packed": is_packed(problem),
        "page_size": problem["page_size"],
    }


def tensor_kinds(problem: Problem) -> tuple[str, ...]:
    """Of the tensors; packed rows are bytes."""
    dtype = "*" + problem["dtype"]
    cache = "*uint8" if is_packed(problem) else dtype
    return (dtype, cache, *["*int32"] * 3, dtype, "*float32")


def parameters(
    problem: Problem, scratch: tuple[Param, ...] = (), *numbers: int
) -> tuple[Param, ...]:
    """Tensors, scratch memory, sizes, what a variant wants to know besides, and the scale."""
    return (
        *map(Pointer, TENSORS),
        *scratch,
        *(Int32(problem[name]) for name in SIZES),
        *map(Int32, numbers),
        Float32(float(problem["sm_scale"])),
    )


def why_not(problem: Problem, gpu: Gpu) -> str | None:
    if is_packed(problem) and "float8_e4m3fn" not in gpu.flops:
        return f"{gpu.sku} has no float8"
    if max(problem["pages"], problem["table_width"] + 1) * problem["page_size"] >= 1 << 31:
        return "more slots than 32-bit indices reach"
    return None


def num_rows(problem: Problem) -> int:
    """Rows of the longest sequence: a query token's heads, token after token."""
    return int(problem["max_q"] * problem["heads"])


def row_tiles(problem: Problem, block_m: int) -> int:
    return ceil(num_rows(problem) / block_m)


def is_programmatic(gpu: Gpu) -> bool:
    """Whether a kernel may be launched while the one before it runs."""
    return int(gpu.arch.strip("sm_af")) >= 90


def grid_reject(problem: Problem) -> str | None:
    if problem["batch"] > 65535 or problem["tokens"] > 65535:
        return "more sequences or query tokens than a grid has CTAs"
    if problem["tokens"] * problem["heads"] >= 1 << 31:
        return "more rows than 32-bit indices reach"
    if is_empty(problem):
        return "nothing to do"
    return None


def splits_reject(
    problem: Problem, block_m: int, block_n: int, splits: int, slots: int
) -> str | None:
    """``slots`` CTAs run at once; each of ``splits`` should have a tile, and a place to run."""
    room = problem["table_width"] * problem["page_size"]
    most = max(1, room // block_n)
    tiles = row_tiles(problem, block_m) * problem["batch"]
    if splits > most:
        return f"{splits} CTAs share fewer tiles of tokens"
    if splits > 1 and tiles * splits > 4 * slots:  # unequal sequences want more than one wave
        return "the SMs are full with fewer splits"
    if 2 * splits <= most and 4 * tiles * splits <= slots:
        return "three quarters of the SMs or more are idle"
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
    """``splits`` CTAs to a tile of ``block_m`` rows, and what adds up what they found."""
    if is_empty(problem):
        return Program(())
    tiles = row_tiles(problem, block_m)
    tiles = ceil(tiles / cluster) * cluster
    compiled = {
        **compiled_in(problem),
        **constants,
        "split": splits > 1,
        "programmatic": is_programmatic(gpu),
    }
    kinds = (*tensor_kinds(problem), "*float32", *["int32"] * 7, "float32")
    source = CuteSource(f"flashmla.{kernel}", kinds, tuple(compiled.items()))
    workspaces: dict[str, int] = {}
    partial: Param = Int64(0)
    if splits > 1:
        workspaces = {"partial": 4 * PITCH * block_m * splits * tiles * problem["batch"]}
        partial = Pointer("partial")
    params = parameters(problem, (partial,), tiles, splits)
    grid = (tiles, splits, problem["batch"])
    steps = [Step(source, grid, params, block=threads, cluster=(cluster, 1, 1))]
    if splits > 1:
        steps.append(_combine(problem, gpu, block_m, constants, tiles, splits))
    return Program(tuple(steps), workspaces)


def _combine(
    problem: Problem,
    gpu: Gpu,
    block_m: int,
    constants: Mapping[str, int | str | bool],
    tiles: int,
    splits: int,
) -> Step:
    are_few = problem["tokens"] * problem["heads"] <= 4 * gpu.sms
    groups = GROUPS if are_few and splits >= 2 * GROUPS else 1
    compiled: dict[str, int | str | bool] = {
        "dtype": problem["dtype"],
        "block_m": block_m,
        "block_n": constants["block_n"],
        "groups": groups,
        "programmatic": is_programmatic(gpu),
    }
    kinds = (
        "*float32", "*int32", "*int32", "*" + problem["dtype"], "*float32", *["int32"] * 5,
    )  # fmt: skip
    source = CuteSource("flashmla.combine:Combine", kinds, tuple(compiled.items()))
    params = (
        *map(Pointer, ("partial", "kv_lens", "cu_q", "out", "lse")),
        *(Int32(problem[name]) for name in ("batch", "tokens", "heads")),
        Int32(tiles),
        Int32(splits),
    )
    grid = (problem["heads"], problem["tokens"], 1)
    return Step(source, grid, params, block=groups * LATENT // 4)


def row_bytes(problem: Problem) -> int:
    """Of a token in the cache."""
    return PACKED if is_packed(problem) else 2 * ROW


START_US = 4.0
"""Of a CTA: queries and the first tile on their way, and storing the result."""


def attend_us(
    problem: Problem,
    gpu: Gpu,
    block_m: int,
    block_n: int,
    splits: int,
    slots: int,
    tile_us: float,
    flow: float,
) -> float:
    """Waves of CTAs that spend ``tile_us`` on a tile, or bytes at ``flow`` of the bandwidth."""
    if is_empty(problem):
        return LAUNCH_US
    tokens = tokens_read(problem) / problem["batch"]
    tiles = max(1.0, tokens / block_n)
    ctas = row_tiles(problem, block_m) * problem["batch"] * min(splits, ceil(tiles))
    # Unequal CTAs follow each other without waves; equal ones end together.
    waves = ctas / slots if problem["lengths"] == "ragged" else ceil(ctas / slots)
    math_us = max(waves, 1.0) * (ceil(tiles / splits) * tile_us + START_US)
    idle = min(1.0, ctas / slots)
    memory_us = copy_us(ENTRY.bytes_moved(problem), gpu, BANDWIDTH_EFFICIENCY * flow * idle)
    merge_us = 0.0
    if splits > 1:
        merge_us = LAUNCH_US + copy_us(8 * PITCH * block_m * ctas, gpu, L2_TO_DRAM)
    return LAUNCH_US + max(math_us, memory_us) + merge_us

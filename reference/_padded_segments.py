"""Triton kernels that a peer without a router of its own needs: a sort and a weighted sum.

The sort groups assignments by expert, in one of two forms. :func:`sort` pads each group to whole
tiles of rows, the input that `humming`, FlashInfer's and vLLM's kernels take; :func:`group` leaves
no gaps, the input that QuACK takes. Two launches: the first program counts while all others fill
the padded rows, then every program scatters a part. Rows of an expert are in no fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

CHUNK = 1024
"""Assignments that a program scatters."""
TILES = 16
"""Tiles whose expert a program of the scatter stores."""


@triton.jit
def _count(ids, rows, tile_offsets, row_ends, cursor, num_ids, num_rows, EXPERTS: tl.constexpr,
           TILE: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    if program > 0:
        if rows is not None:
            row = (program - 1) * CHUNK + tl.arange(0, CHUNK)
            tl.store(rows + row, num_ids, mask=row < num_rows)
    else:
        counts = tl.zeros([2 * EXPERTS], tl.int32)
        for first in range(0, num_ids, CHUNK):
            at = first + tl.arange(0, CHUNK)
            chunk = tl.load(ids + at, mask=at < num_ids, other=EXPERTS)
            counts += tl.histogram(chunk.to(tl.int32), 2 * EXPERTS)
        expert = tl.arange(0, 2 * EXPERTS)
        is_expert = expert < EXPERTS
        tiles = tl.where(is_expert, (counts + TILE - 1) // TILE, 0)
        end = tl.cumsum(tiles, 0)
        first_row = (end - tiles) * TILE
        tl.store(tile_offsets, 0)
        tl.store(tile_offsets + 1 + expert, end, mask=is_expert)
        tl.store(row_ends + expert, first_row + counts, mask=is_expert)
        tl.store(cursor + expert, first_row, mask=is_expert)


@triton.jit
def _claim_rows(ids, cursor, num_ids, CHUNK: tl.constexpr):
    """Assignments of a chunk, which of them exist, and a row for each one in its expert's group."""
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    is_id = at < num_ids
    expert = tl.load(ids + at, mask=is_id, other=0).to(tl.int32)
    return at, is_id, tl.atomic_add(cursor + expert, 1, mask=is_id)


@triton.jit
def _scatter_padded(ids, cursor, rows, tile_offsets, row_ends, tile_experts, tile_ends, total,
                    num_ids, num_tiles, EXPERTS: tl.constexpr, TILE: tl.constexpr,
                    CHUNK: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    at, is_id, row = _claim_rows(ids, cursor, num_ids, CHUNK)
    tl.store(rows + row, at, mask=is_id)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    end = tl.load(tile_offsets + 1 + tl.arange(0, EXPERTS))
    owner = tl.sum((end[None, :] <= tile[:, None]).to(tl.int32), 1)
    is_used = owner < EXPERTS
    row_end = tl.load(row_ends + owner, mask=is_used, other=0)
    tl.store(tile_experts + tile, tl.where(is_used, owner, 0), mask=tile < num_tiles)
    tl.store(tile_ends + tile, tl.minimum(row_end, (tile + 1) * TILE), mask=tile < num_tiles)
    if tl.program_id(0) == 0:
        tl.store(total, tl.max(end, 0) * TILE)


@triton.jit
def _scatter_grouped(ids, cursor, tokens, position, num_ids, TOP_K: tl.constexpr,
                     CHUNK: tl.constexpr):  # fmt: skip
    at, is_id, row = _claim_rows(ids, cursor, num_ids, CHUNK)
    tl.store(tokens + row, at // TOP_K, mask=is_id)
    tl.store(position + at, row, mask=is_id)


@triton.jit
def _weighted_sum(y, position, gates, out, hidden, TOP_K: tl.constexpr, COLS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    sums = tl.zeros([COLS], tl.float32)
    for slot in tl.static_range(TOP_K):
        row = token * TOP_K + slot
        gate, num_cols = tl.load(gates + row).to(tl.float32), hidden
        if position is not None:
            row = tl.load(position + row).to(tl.int64)
            num_cols = tl.where(row >= 0, hidden, 0)
        value = tl.load(y + row * hidden + col, mask=col < num_cols, other=0)
        sums += gate * value.to(tl.float32)
    tl.store(out + token * hidden + col, sums.to(out.dtype.element_ty), mask=col < hidden)


@dataclass(frozen=True)
class Segments:
    """Assignments in padded groups.

    Attributes
    ----------
    rows : (padded rows,) int32: row -> assignment, or the number of assignments for padding
    tile_experts : (tiles,) int32: tile of rows -> expert
    tile_ends : (tiles,) int32: tile -> end of its rows that are no padding
    used_tiles : (1,) int32: tiles in use
    total : (1,) int32: padded rows in use
    """

    rows: Any
    tile_experts: Any
    tile_ends: Any
    used_tiles: Any
    total: Any


@dataclass(frozen=True)
class Groups:
    """Assignments in groups without gaps.

    Attributes
    ----------
    offsets : (experts + 1,) int32: expert e has rows offsets[e] to offsets[e + 1] - 1
    tokens : (assignments,) int32: row -> token
    position : (assignments,) int32: assignment -> row
    """

    offsets: Any
    tokens: Any
    position: Any


def _counted(ids, experts: int, tile: int, rows=None):
    """Ends of groups as ``_count`` stores them: tile offsets, ends of rows, first rows."""
    size, num_rows = ids.numel(), 0 if rows is None else rows.numel()
    padded = triton.next_power_of_2(experts)
    tile_offsets, row_ends, cursor = (
        torch.empty(length, device=ids.device, dtype=torch.int32)
        for length in (padded + 1, padded, padded)
    )
    grid = (1 + triton.cdiv(num_rows, CHUNK),)
    _count[grid](
        ids, rows, tile_offsets, row_ends, cursor, size, num_rows, padded, tile, CHUNK, num_warps=8
    )
    return tile_offsets, row_ends, cursor


def sort(ids, experts: int, tile: int) -> Segments:
    """Groups of ``ids`` (tokens, top_k), an integer type, padded to multiples of ``tile`` rows."""
    size = ids.numel()
    num_tiles = size if size <= experts else experts + (size - experts) // tile
    rows, tile_experts, tile_ends, total = (
        torch.empty(length, device=ids.device, dtype=torch.int32)
        for length in (num_tiles * tile, num_tiles, num_tiles, 1)
    )
    tile_offsets, row_ends, cursor = _counted(ids, experts, tile, rows)
    grid = (max(triton.cdiv(size, CHUNK), triton.cdiv(num_tiles, TILES)),)
    _scatter_padded[grid](
        ids, cursor, rows, tile_offsets, row_ends, tile_experts, tile_ends, total, size, num_tiles,
        row_ends.numel(), tile, CHUNK, TILES,
    )  # fmt: skip
    return Segments(rows, tile_experts, tile_ends, tile_offsets[-1:], total)


def group(ids, experts: int) -> Groups:
    """Groups of ``ids`` (tokens, top_k), an integer type."""
    size = ids.numel()
    tokens, position = (torch.empty(size, device=ids.device, dtype=torch.int32) for _ in range(2))
    offsets, _, cursor = _counted(ids, experts, 1)
    grid = (triton.cdiv(size, CHUNK),)
    _scatter_grouped[grid](ids, cursor, tokens, position, size, ids.shape[1], CHUNK)
    return Groups(offsets[: experts + 1], tokens, position)


def weighted_sum(y, gates, out, position=None) -> None:
    """out[t] = sum over slots of gates[t, slot] * y[row of the assignment].

    The row of assignment a = t * top_k + slot is ``position[a]``, or a without ``position``; an
    assignment in row -1 adds nothing. ``y`` is (tokens * top_k, hidden), ``gates`` (tokens, top_k)
    and ``out`` (tokens, hidden).
    """
    tokens, top_k = gates.shape
    hidden = out.shape[1]
    grid = (tokens, triton.cdiv(hidden, 512))
    _weighted_sum[grid](y, position, gates, out, hidden, top_k, 512)

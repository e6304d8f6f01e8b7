"""Triton kernels that a peer without a router of its own needs: a sort and a weighted sum.

The sort groups assignments by expert and pads each group to whole tiles of rows, the input that
`humming` and vLLM's kernels take. Two launches: the first program counts while all others fill the
padded rows, then every program scatters a part. Rows of an expert are in no fixed order.
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
def _count(ids, rows, ends, cursor, num_ids, num_rows, EXPERTS: tl.constexpr, TILE: tl.constexpr,
           CHUNK: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    if program > 0:
        row = (program - 1) * CHUNK + tl.arange(0, CHUNK)
        tl.store(rows + row, num_ids, mask=row < num_rows)
    else:
        counts = tl.zeros([2 * EXPERTS], tl.int32)
        for first in range(0, num_ids, CHUNK):
            at = first + tl.arange(0, CHUNK)
            chunk = tl.load(ids + at, mask=at < num_ids, other=EXPERTS)
            counts += tl.histogram(chunk.to(tl.int32), 2 * EXPERTS)
        expert = tl.arange(0, 2 * EXPERTS)
        tiles = tl.where(expert < EXPERTS, (counts + TILE - 1) // TILE, 0)
        end = tl.cumsum(tiles, 0)
        tl.store(ends + expert, end, mask=expert < EXPERTS)
        tl.store(cursor + expert, (end - tiles) * TILE, mask=expert < EXPERTS)


@triton.jit
def _scatter(ids, rows, ends, cursor, tile_experts, total, num_ids, num_tiles,
             EXPERTS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
             TILES: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    at = program * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + at, mask=at < num_ids, other=0).to(tl.int32)
    row = tl.atomic_add(cursor + expert, 1, mask=at < num_ids)
    tl.store(rows + row, at, mask=at < num_ids)
    tile = program * TILES + tl.arange(0, TILES)
    end = tl.load(ends + tl.arange(0, EXPERTS))
    owner = tl.sum((end[None, :] <= tile[:, None]).to(tl.int32), 1)
    tl.store(tile_experts + tile, tl.where(owner < EXPERTS, owner, 0), mask=tile < num_tiles)
    if program == 0:
        tl.store(total, tl.max(end, 0) * TILE)


@triton.jit
def _weighted_sum(y, gates, out, hidden, TOP_K: tl.constexpr, COLS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    sums = tl.zeros([COLS], tl.float32)
    for slot in tl.static_range(TOP_K):
        row = tl.load(y + (token * TOP_K + slot) * hidden + col, mask=col < hidden, other=0)
        sums += tl.load(gates + token * TOP_K + slot).to(tl.float32) * row.to(tl.float32)
    tl.store(out + token * hidden + col, sums.to(out.dtype.element_ty), mask=col < hidden)


@dataclass(frozen=True)
class Segments:
    """Assignments in padded groups.

    Attributes
    ----------
    rows : (padded rows,) int32: row -> assignment, or the number of assignments for padding
    tile_experts : (tiles,) int32: tile of rows -> expert
    total : (1,) int32: padded rows in use
    """

    rows: Any
    tile_experts: Any
    total: Any


def sort(ids, experts: int, tile: int) -> Segments:
    """Groups of ``ids`` (tokens, top_k), an integer type, padded to multiples of ``tile`` rows.

    ``experts`` is a power of two.
    """
    size = ids.numel()
    num_tiles = size if size <= experts else experts + (size - experts) // tile
    rows, tile_experts, total, ends, cursor = (
        torch.empty(length, device=ids.device, dtype=torch.int32)
        for length in (num_tiles * tile, num_tiles, 1, experts, experts)
    )
    grid = (1 + triton.cdiv(rows.numel(), CHUNK),)
    _count[grid](ids, rows, ends, cursor, size, rows.numel(), experts, tile, CHUNK, num_warps=8)
    grid = (max(triton.cdiv(size, CHUNK), triton.cdiv(num_tiles, TILES)),)
    _scatter[grid](
        ids, rows, ends, cursor, tile_experts, total, size, num_tiles, experts, tile, CHUNK, TILES
    )
    return Segments(rows, tile_experts, total)


def weighted_sum(y, gates, out) -> None:
    """out[t] = sum over slots of gates[t, slot] * y[t * top_k + slot].

    ``y`` is (tokens * top_k, hidden), ``gates`` (tokens, top_k) and ``out`` (tokens, hidden).
    """
    tokens, top_k = gates.shape
    hidden = out.shape[1]
    _weighted_sum[tokens, triton.cdiv(hidden, 512)](y, gates, out, hidden, top_k, 512)

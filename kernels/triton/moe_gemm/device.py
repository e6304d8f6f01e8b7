"""Triton kernels of `moe_gemm`: rows grouped by expert times their expert's weights.

All arrays have contiguous rows:

    a (A_ROWS, K); tokens where GATHER. a_scale (K/128, A_ROWS) float32 for A in float8
    w, w_scale: see common/device/experts.py; global_scale (experts,), bias (experts, N)
    offsets (experts + 1,), order (rows,), position and gates (tokens, top_k)
    residual, d (tokens, columns); d (rows, columns) without COMBINE
    rows (rows, columns): what `combine` sums, of D's type

EXPERTS is the number of experts, MAX_EXPERTS a power of two above that number.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.dependent_launch import await_previous
from kernelcat.kernels.triton.common.device.experts import (
    activate,
    finish_sums,
    load_block_scales,
    load_values,
    load_weights,
    result_cols,
)
from kernelcat.kernels.triton.common.device.tile_order import locate_tile

# ---- naive -------------------------------------------------------------------------------------


@triton.jit
def find_expert(offsets, row, EXPERTS: tl.constexpr, MAX_EXPERTS: tl.constexpr):
    """The expert that serves a row: as many as have their last row before the row."""
    experts = tl.arange(0, MAX_EXPERTS)
    ends = tl.load(offsets + 1 + experts, mask=experts < EXPERTS, other=2147483647)
    return tl.sum((ends <= row).to(tl.int32))


@triton.jit
def finished_row(
    a, a_scale, w, w_scale, global_scale, bias, offsets, order, row, col, top_k, N, K, A_ROWS,
    FORMAT: tl.constexpr, IN_TILES: tl.constexpr, A_IN_FP8: tl.constexpr, GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    EXPERTS: tl.constexpr, MAX_EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The result of a row from columns ``col`` of the product on, (1, columns) float32."""
    # 4-bit weights beside A in 16 bits are rounded to A's type.
    dtype: tl.constexpr = tl.float32 if A_IN_FP8 else a.dtype.element_ty
    expert = find_expert(offsets, row, EXPERTS, MAX_EXPERTS)
    source = row
    if GATHER:
        source = tl.load(order + row) // top_k
    z = tl.zeros((1, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        x = tl.load(a + source.to(tl.int64) * K + ks, mask=ks < K, other=0.0).to(tl.float32)
        if A_IN_FP8:
            x *= tl.load(a_scale + k // 128 * A_ROWS + source)
        weights = load_values(
            w, w_scale, expert, col, k, N, K, dtype, FORMAT, IN_TILES, BLOCK_N, BLOCK_K
        )
        z += tl.sum(weights * x[None, :], axis=1)[None, :]
    z = finish_sums(z, global_scale, bias, expert, col, N, FORMAT, HAS_BIAS)
    return activate(z, ACTIVATION)


@triton.jit
def naive(
    a, a_scale, w, w_scale, global_scale, bias, offsets, order, position, gates, residual, d,
    top_k, N, K, A_ROWS,
    FORMAT: tl.constexpr, IN_TILES: tl.constexpr, A_IN_FP8: tl.constexpr, GATHER: tl.constexpr,
    COMBINE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, EXPERTS: tl.constexpr, MAX_EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program for each row of D and BLOCK_N columns of the product: the baseline to beat."""
    d_row, col = tl.program_id(0), tl.program_id(1) * BLOCK_N
    d_N: tl.constexpr = BLOCK_N if ACTIVATION == "none" else BLOCK_N // 2
    cols = result_cols(col, ACTIVATION) + tl.arange(0, d_N)[None, :]
    num_cols = result_cols(N, ACTIVATION)
    offsets_of_d = d_row.to(tl.int64) * num_cols + cols
    result = tl.zeros((1, d_N), tl.float32)
    if HAS_RESIDUAL:
        values = tl.load(residual + offsets_of_d, mask=cols < num_cols, other=0.0)
        result += values.to(tl.float32)
    for slot in range(top_k if COMBINE else 1):
        row, gate = d_row, 1.0
        if COMBINE:
            row = tl.load(position + d_row * top_k + slot)
            gate = tl.load(gates + d_row * top_k + slot)
        if (row >= 0) & (row < tl.load(offsets + EXPERTS)):
            result += gate * finished_row(
                a, a_scale, w, w_scale, global_scale, bias, offsets, order, row, col, top_k, N, K,
                A_ROWS, FORMAT, IN_TILES, A_IN_FP8, GATHER, HAS_BIAS, ACTIVATION,
                EXPERTS, MAX_EXPERTS, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    tl.store(d + offsets_of_d, result.to(d.dtype.element_ty), mask=cols < num_cols)


# ---- tiled -------------------------------------------------------------------------------------


@triton.jit
def locate_expert(
    offsets, tile, num_rows, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EXPERTS: tl.constexpr, MAX_EXPERTS: tl.constexpr,
):  # fmt: skip
    """The expert of a tile; its first row, the end of its rows, and the tile's place among its own.

    Tiles of expert 0 come first. Rows without an assignment count as those of expert EXPERTS; for a
    tile past the last one a greater number is returned.
    """
    experts = tl.arange(0, MAX_EXPERTS)
    begins = tl.load(offsets + experts, mask=experts <= EXPERTS, other=0)
    ends = tl.load(offsets + 1 + experts, mask=experts < EXPERTS, other=0)
    ends = tl.where(experts == EXPERTS, num_rows, ends)
    num_tiles = tl.cdiv(ends - begins, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    num_tiles = tl.where(experts <= EXPERTS, num_tiles, 0)
    tile_ends = tl.cumsum(num_tiles)
    expert = tl.sum((tile_ends <= tile).to(tl.int32))
    is_own = experts == expert
    first_tile = tl.sum(tl.where(is_own, tile_ends - num_tiles, 0))
    begin, end = tl.sum(tl.where(is_own, begins, 0)), tl.sum(tl.where(is_own, ends, 0))
    return expert, begin, end, tile - first_tile


@triton.jit
def product(
    a, a_scale, w, w_scale, sources, expert, row, col, depth, N, K, A_ROWS,
    FORMAT: tl.constexpr, IN_TILES: tl.constexpr, A_IN_FP8: tl.constexpr, BY_TMA: tl.constexpr,
    A_BY_TMA: tl.constexpr, SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows ``sources`` (BLOCK_M,) of A times BLOCK_N rows of an expert's weights, over ``depth``.

    With SWAP the transposed product is computed: then weights that are decoded are the operand
    that tensor cores take from registers, and few rows fill the instruction. BY_TMA, w is a
    descriptor of (experts * N, K), and A_BY_TMA a one of (A_ROWS, K), read from ``row`` on.
    """
    FP4: tl.constexpr = FORMAT == "mxfp4" or FORMAT == "nvfp4"
    a_type: tl.constexpr = a.dtype if A_BY_TMA else a.dtype.element_ty
    dtype: tl.constexpr = tl.bfloat16 if FP4 and A_IN_FP8 else a_type
    ks = tl.arange(0, BLOCK_K)
    cols = col + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, depth, BLOCK_K):
        if A_BY_TMA:
            a_tile = a.load([row, k])
        else:
            a_rows = a + sources[:, None].to(tl.int64) * K + (k + ks)[None, :]
            a_tile = tl.load(a_rows, mask=(ks < K - k)[None, :], other=0.0).to(dtype)
        if BY_TMA:
            w_tile = w.load([expert * N + col, k])
        else:
            w_tile = load_weights(
                w, w_scale, expert, col, k, N, K, dtype, FORMAT, IN_TILES, BLOCK_N, BLOCK_K
            )
        left, right = (w_tile, a_tile) if SWAP else (a_tile, w_tile)
        if A_IN_FP8 or FORMAT == "fp8":
            scale = tl.full((BLOCK_M, BLOCK_N), 1.0, tl.float32)
            if A_IN_FP8:
                scale *= tl.load(a_scale + k // 128 * A_ROWS + sources)[:, None]
            if FORMAT == "fp8":
                scale *= load_block_scales(w_scale, expert, cols, k, N, K)[None, :]
            acc += tl.dot(left, right.T) * (scale.T if SWAP else scale)
        else:
            acc = tl.dot(left, right.T, acc)
    return acc.T if SWAP else acc


@triton.jit
def tiled(
    a, a_scale, w, w_scale, global_scale, bias, offsets, order, out, num_rows, top_k, N, K, A_ROWS,
    FORMAT: tl.constexpr, IN_TILES: tl.constexpr, A_IN_FP8: tl.constexpr, GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, CLEAR: tl.constexpr,
    BY_TMA: tl.constexpr, SWAP: tl.constexpr, DEPENDENT: tl.constexpr,
    EXPERTS: tl.constexpr, MAX_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """One tile of one expert a program; programs past the last tile end at once.

    ``out`` is d or rows, (num_rows, columns). With CLEAR the rows without an assignment are
    tiles too, whose sums are zero.
    """
    await_previous(DEPENDENT)
    expert, begin, end, tile = locate_expert(
        offsets, tl.program_id(0), num_rows, N, BLOCK_M, BLOCK_N, EXPERTS, MAX_EXPERTS
    )
    is_served = expert < EXPERTS
    if is_served | ((expert == EXPERTS) & CLEAR):
        tile_m, tile_n = locate_tile(tile, end - begin, N, BLOCK_M, BLOCK_N, GROUP_M)
        row, col = begin + tile_m * BLOCK_M, tile_n * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        # Instead of rows past the end row 0 is read: their results are not stored.
        sources = tl.where(rows < end, rows, 0)
        if GATHER:
            sources = tl.load(order + rows, mask=rows < end, other=0) // top_k
        depth = tl.where(is_served, K, 0)
        expert = tl.where(is_served, expert, 0)
        z = product(
            a, a_scale, w, w_scale, sources, expert, row, col, depth, N, K, A_ROWS, FORMAT,
            IN_TILES, A_IN_FP8, BY_TMA, BY_TMA and not GATHER, SWAP, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        z = finish_sums(z, global_scale, bias, expert, col, N, FORMAT, HAS_BIAS)
        result = tl.where(is_served, activate(z, ACTIVATION), 0.0)
        num_cols = result_cols(N, ACTIVATION)
        cols = result_cols(col, ACTIVATION) + tl.arange(0, result.shape[1])
        places = rows[:, None].to(tl.int64) * num_cols + cols[None, :]
        inside = (rows < end)[:, None] & (cols < num_cols)[None, :]
        tl.store(out + places, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine(
    rows, position, gates, residual, d, top_k, num_cols,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a token: the sum of gates times partial rows, in the order of the slots."""
    await_previous(DEPENDENT)
    token = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = token.to(tl.int64) * num_cols + cols
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + place, mask=cols < num_cols, other=0.0).to(tl.float32)
    for slot in range(top_k):
        row = tl.load(position + token * top_k + slot)
        gate = tl.load(gates + token * top_k + slot)
        partial = rows + tl.maximum(row, 0).to(tl.int64) * num_cols + cols
        values = tl.load(partial, mask=cols < num_cols, other=0.0)
        total += tl.where(row >= 0, gate * values, 0.0)
    tl.store(d + place, total.to(d.dtype.element_ty), mask=cols < num_cols)

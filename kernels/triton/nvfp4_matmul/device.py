"""Triton kernels of `nvfp4_matmul`: weights are decoded in registers, sums are float32.

Products are made transposed, W A^T: weights are then the operand that tensor cores take from
registers, and few rows of A make a narrow tile.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.gemm.device import sum_splits, tile_of
from kernelcat.kernels.triton.gemm.epilogue import finish
from kernelcat.kernels.triton.nvfp4_quantize.fp4 import (
    mxfp4_factors,
    nvfp4_factors,
    scale_place,
    spread,
    unpacked,
)


@triton.jit
def scaled(values, scales, NVFP4: tl.constexpr):
    """Float32 values of codes, times their blocks' scales."""
    return values * (
        spread(nvfp4_factors(scales), 16) if NVFP4 else spread(mxfp4_factors(scales), 32)
    )


@triton.jit
def coded_rows(
    codes, scale, rows, k, num_rows, K,
    dtype: tl.constexpr, NVFP4: tl.constexpr, SWIZZLED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Values [rows, k : k + BLOCK_K], zeros past the edges, of codes in rows."""
    SIZE: tl.constexpr = 16 if NVFP4 else 32
    halves, blocks = k // 2 + tl.arange(0, BLOCK_K // 2), k // SIZE + tl.arange(0, BLOCK_K // SIZE)
    at = rows[:, None].to(tl.int64) * (K // 2) + halves[None, :]
    inside = (rows < num_rows)[:, None]
    pairs = tl.load(codes + at, mask=inside & (halves < K // 2)[None, :], other=0)
    at = scale_place(rows, blocks, K // SIZE, SWIZZLED)
    scales = tl.load(scale + at, mask=inside & (blocks < K // SIZE)[None, :], other=0)
    return scaled(unpacked(pairs), scales, NVFP4).to(dtype)


@triton.jit
def weight_tiles(
    w, w_scale, cols, k, N, K, dtype: tl.constexpr, NVFP4: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The same of weights in tiles of 16 x 64 (reference/_fp4_tiles.py), code by code."""
    EACH: tl.constexpr = 4 if NVFP4 else 2
    SIZE: tl.constexpr = 16 if NVFP4 else 32
    ks, blocks = k + tl.arange(0, BLOCK_K), k // SIZE + tl.arange(0, BLOCK_K // SIZE)
    tiles = tl.cdiv(K, 64)
    tile = (cols // 16).to(tl.int64)[:, None] * tiles
    nibble = cols[:, None] % 16 // 8 + (ks % 16 // 8 * 2 + ks % 2 * 4)[None, :]
    lane = cols[:, None] % 8 * 4 + (ks % 8 // 2)[None, :]
    within = lane * 16 + (ks % 64 // 16 * 4)[None, :] + nibble // 2
    inside = (cols < N)[:, None] & (ks < K)[None, :]
    codes = tl.load(w + (tile + (ks // 64)[None, :]) * 512 + within, mask=inside, other=0)
    bits = (codes.to(tl.int32) >> (nibble % 2 * 4)) << 28
    tiny = ((bits >> 6) & -0x7E400000).to(tl.float32, bitcast=True)

    within = (cols % 8 * 2 + cols % 16 // 8)[:, None] * EACH + (blocks % EACH)[None, :]
    inside = (cols < N)[:, None] & (blocks < K // SIZE)[None, :]
    at = (tile + (blocks // EACH)[None, :]) * (16 * EACH) + within
    scales = tl.load(w_scale + at, mask=inside, other=0)
    return scaled(tiny * 8.507059173023462e37, scales, NVFP4).to(dtype)


@triton.jit
def product(
    a, a_block_scale, w, w_scale, row, col, k_begin, k_end, M, N, K,
    NVFP4: tl.constexpr, TILES: tl.constexpr, CODED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(W A^T)[col:, row:] over [k_begin, k_end), without the global scale. CODED is A in 4 bits."""
    kind: tl.constexpr = tl.float16 if a.dtype.element_ty == tl.float16 else tl.bfloat16
    rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    a_rows = a + tl.where(rows < M, rows, 0)[:, None].to(tl.int64) * K
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(k_begin, k_end, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        if CODED:
            a_tile = coded_rows(a, a_block_scale, rows, k, M, K, kind, NVFP4, True, BLOCK_K)
        else:
            a_tile = tl.load(a_rows + ks[None, :], mask=(ks < K)[None, :], other=0.0).to(kind)
        if TILES:
            w_tile = weight_tiles(w, w_scale, cols, k, N, K, kind, NVFP4, BLOCK_K)
        else:
            w_tile = coded_rows(w, w_scale, cols, k, N, K, kind, NVFP4, CODED, BLOCK_K)
        acc = tl.dot(w_tile, a_tile.T, acc)
    return acc.T


@triton.jit
def write(
    acc, global_scale, a_scale, bias, d, row, col, M, N,
    NVFP4: tl.constexpr, HAS_A_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """What comes of a tile of A @ W^T, to D."""
    if NVFP4:
        acc *= tl.load(global_scale)
    if HAS_A_SCALE:
        rows = row + tl.arange(0, acc.shape[0])
        acc *= tl.load(a_scale + rows, mask=rows < M, other=0.0)[:, None]
    finish(acc, bias, bias, d, row, col, M, N, HAS_BIAS, ACTIVATION, False, False)


@triton.jit
def naive(
    a, w, w_scale, global_scale, a_scale, a_block_scale, bias, d, M, N, K,
    NVFP4: tl.constexpr, TILES: tl.constexpr, CODED: tl.constexpr, HAS_A_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One small tile a program, nothing overlapped: the baseline to beat."""
    row, col = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    acc = product(
        a, a_block_scale, w, w_scale, row, col, 0, K, M, N, K, NVFP4, TILES, CODED,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    write(
        acc, global_scale, a_scale, bias, d, row, col, M, N,
        NVFP4, HAS_A_SCALE, HAS_BIAS, ACTIVATION,
    )  # fmt: skip


@triton.jit
def tiled(
    a, w, w_scale, global_scale, a_scale, a_block_scale, bias, d, partials, arrivals,
    M, N, K, split_depth,
    NVFP4: tl.constexpr, TILES: tl.constexpr, CODED: tl.constexpr, HAS_A_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """A tile a program in grouped order, software-pipelined; program axis 1 splits K."""
    tile, split = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
    k_begin = split * split_depth
    k_end = min(K, k_begin + split_depth)
    acc = product(
        a, a_block_scale, w, w_scale, row, col, k_begin, k_end, M, N, K, NVFP4, TILES, CODED,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    acc, last = sum_splits(acc, partials, arrivals, tile, split, SPLIT_K)
    if last:
        write(
            acc, global_scale, a_scale, bias, d, row, col, M, N,
            NVFP4, HAS_A_SCALE, HAS_BIAS, ACTIVATION,
        )  # fmt: skip

"""Triton kernels of `nvfp4_matmul`: weights are decoded in registers, accumulators are float32.

Products are computed transposed, W A^T: the weights are then the operand that tensor cores take
from registers, and few rows of A make a narrow tile.

    a (M, K), or bytes (M, K / 2) with a_block_scale, swizzled, for A in 4 bits
    w bytes (N, K / 2) with w_scale (N, K / block); or both in tiles (reference/_fp4_tiles.py)
    global_scale (1,) float32 of NVFP4, a_scale (M,) float32, bias (N,)
    d (M, N), or (M, N // 2) for the activation swiglu
    partials (tiles, SPLIT_K, BLOCK_M * BLOCK_N) float32, arrivals (tiles,) int32
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.epilogue import finish_tile
from kernelcat.kernels.triton.common.device.fp4_weights import load_rows, load_tiles
from kernelcat.kernels.triton.common.device.split_k import sum_splits
from kernelcat.kernels.triton.common.device.tile_order import locate_tile


@triton.jit
def product(
    a, a_block_scale, w, w_scale, row, col, k_begin, k_end, M, N, K,
    NVFP4: tl.constexpr, W_IN_TILES: tl.constexpr, A_IN_FP4: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Tile (BLOCK_M, BLOCK_N) at (row, col) of A W^T over [k_begin, k_end), not globally scaled."""
    dtype: tl.constexpr = tl.float16 if a.dtype.element_ty == tl.float16 else tl.bfloat16
    rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    a_rows = a + tl.where(rows < M, rows, 0)[:, None].to(tl.int64) * K
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(k_begin, k_end, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        if A_IN_FP4:
            a_tile = load_rows(a, a_block_scale, rows, k, M, K, dtype, NVFP4, True, BLOCK_K)
        else:
            a_tile = tl.load(a_rows + ks[None, :], mask=(ks < K)[None, :], other=0.0).to(dtype)
        if W_IN_TILES:
            w_tile = load_tiles(w, w_scale, cols, k, N, K, dtype, NVFP4, BLOCK_K)
        else:
            w_tile = load_rows(w, w_scale, cols, k, N, K, dtype, NVFP4, A_IN_FP4, BLOCK_K)
        acc = tl.dot(w_tile, a_tile.T, acc)
    return acc.T


@triton.jit
def scale_and_finish(
    acc, global_scale, a_scale, bias, d, row, col, M, N,
    NVFP4: tl.constexpr, HAS_A_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Scale acc (BLOCK_M, BLOCK_N), apply the epilogue, and store to D at (row, col)."""
    if NVFP4:
        acc *= tl.load(global_scale)
    if HAS_A_SCALE:
        rows = row + tl.arange(0, acc.shape[0])
        acc *= tl.load(a_scale + rows, mask=rows < M, other=0.0)[:, None]
    finish_tile(acc, bias, bias, d, row, col, M, N, HAS_BIAS, ACTIVATION, False, False)


@triton.jit
def naive(
    a, w, w_scale, global_scale, a_scale, a_block_scale, bias, d, M, N, K,
    NVFP4: tl.constexpr, W_IN_TILES: tl.constexpr, A_IN_FP4: tl.constexpr,
    HAS_A_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One small tile a program, nothing overlapped: the baseline to beat."""
    row, col = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    acc = product(
        a, a_block_scale, w, w_scale, row, col, 0, K, M, N, K, NVFP4, W_IN_TILES, A_IN_FP4,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    scale_and_finish(
        acc, global_scale, a_scale, bias, d, row, col, M, N,
        NVFP4, HAS_A_SCALE, HAS_BIAS, ACTIVATION,
    )  # fmt: skip


@triton.jit
def tiled(
    a, w, w_scale, global_scale, a_scale, a_block_scale, bias, d, partials, arrivals,
    M, N, K, split_depth,
    NVFP4: tl.constexpr, W_IN_TILES: tl.constexpr, A_IN_FP4: tl.constexpr,
    HAS_A_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """One tile a program in grouped order, software-pipelined; program axis 1 splits K."""
    tile, split = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = locate_tile(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
    k_begin = split * split_depth
    k_end = min(K, k_begin + split_depth)
    acc = product(
        a, a_block_scale, w, w_scale, row, col, k_begin, k_end, M, N, K, NVFP4, W_IN_TILES,
        A_IN_FP4, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    acc, is_last = sum_splits(acc, partials, arrivals, tile, split, SPLIT_K)
    if is_last:
        scale_and_finish(
            acc, global_scale, a_scale, bias, d, row, col, M, N,
            NVFP4, HAS_A_SCALE, HAS_BIAS, ACTIVATION,
        )  # fmt: skip

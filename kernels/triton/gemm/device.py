"""Triton kernels of `gemm`: D = activation(A @ B^T + bias) + residual, float32 accumulators.

All arrays have contiguous rows:

    a (M, K), b (N, K), bias (N,)
    residual and d (M, N), or (M, N // 2) for the activation swiglu
    partials (tiles, SPLIT_K, BLOCK_M * BLOCK_N) float32, arrivals (tiles,) int32
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.epilogue import finish_tile
from kernelcat.kernels.triton.common.device.pointer_product import pointer_product
from kernelcat.kernels.triton.common.device.split_k import sum_splits
from kernelcat.kernels.triton.common.device.tile_order import locate_tile


@triton.jit
def naive(
    a, b, bias, residual, d, M, N, K,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One small tile a program, masked loads, nothing overlapped: the baseline to beat."""
    row, col = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        a_mask, b_mask = (rows < M)[:, None] & (ks < K), (cols < N)[:, None] & (ks < K)
        a_tile = tl.load(a + rows[:, None].to(tl.int64) * K + ks, mask=a_mask, other=0.0)
        b_tile = tl.load(b + cols[:, None].to(tl.int64) * K + ks, mask=b_mask, other=0.0)
        acc = tl.dot(a_tile, b_tile.T, acc)
    finish_tile(
        acc, bias, residual, d, row, col, M, N,
        HAS_BIAS, ACTIVATION, HAS_RESIDUAL, TMA_STORE=False,
    )  # fmt: skip


@triton.jit
def tiled(
    a, b, bias, residual, d, partials, arrivals, M, N, K, split_depth,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """One tile a program in grouped order, software-pipelined; program axis 1 splits K."""
    tile, split = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = locate_tile(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
    k_begin = split * split_depth
    k_end = min(K, k_begin + split_depth)
    acc = pointer_product(a, b, row, col, k_begin, k_end, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K)
    acc, is_last = sum_splits(acc, partials, arrivals, tile, split, SPLIT_K)
    if is_last:
        finish_tile(
            acc, bias, residual, d, row, col, M, N,
            HAS_BIAS, ACTIVATION, HAS_RESIDUAL, TMA_STORE=False,
        )  # fmt: skip


@triton.jit
def descriptor_product(
    x,  # descriptor of (rows, K)
    y,  # descriptor of (cols, K)
    row, col, k_begin, k_end,
    BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """X[row:, k_begin:k_end] @ Y[col:, k_begin:k_end]^T; TMA fills in zeros past the edges."""
    acc = tl.zeros((BLOCK_ROW, BLOCK_COL), tl.float32)
    for k in range(k_begin, k_end, BLOCK_K):
        acc = tl.dot(x.load([row, k]), y.load([col, k]).T, acc)
    return acc


@triton.jit
def tma(
    a, b, bias, residual, d, partials, arrivals, M, N, K, split_depth,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr, SWAP: tl.constexpr, TMA_STORE: tl.constexpr,
):  # fmt: skip
    """`tiled` with a and b as descriptors; where TMA_STORE residual and d are descriptors too.

    SWAP computes D^T = B A^T, so that a tile of few rows still fills the 64 rows of a warpgroup's
    product.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = locate_tile(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
    k_begin = split * split_depth
    k_end = min(K, k_begin + split_depth)
    if SWAP:
        acc = descriptor_product(b, a, col, row, k_begin, k_end, BLOCK_N, BLOCK_M, BLOCK_K).T
    else:
        acc = descriptor_product(a, b, row, col, k_begin, k_end, BLOCK_M, BLOCK_N, BLOCK_K)
    acc, is_last = sum_splits(acc, partials, arrivals, tile, split, SPLIT_K)
    if is_last:
        finish_tile(
            acc, bias, residual, d, row, col, M, N,
            HAS_BIAS, ACTIVATION, HAS_RESIDUAL, TMA_STORE,
        )  # fmt: skip


@triton.jit
def persistent(
    a, b, bias, residual, d, M, N, K,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, NUM_PROGRAMS: tl.constexpr, SUBTILES: tl.constexpr,
    TMA_STORE: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """One program an SM, which takes tile after tile; both loops are flattened into one pipeline.

    While a tile is stored, the next one's operands are already on their way. With two SUBTILES the
    halves of a tile are stored one after the other, which leaves shared memory for one more stage.
    a and b are descriptors; where TMA_STORE residual and d are descriptors too.
    """
    num_tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(
        tl.program_id(0), num_tiles, NUM_PROGRAMS, flatten=True, warp_specialize=WARP_SPECIALIZE
    ):
        tile_m, tile_n = locate_tile(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = descriptor_product(a, b, row, col, 0, K, BLOCK_M, BLOCK_N, BLOCK_K)
        if SUBTILES == 2:
            halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            acc, right = tl.split(halves)
        finish_tile(
            acc, bias, residual, d, row, col, M, N,
            HAS_BIAS, ACTIVATION, HAS_RESIDUAL, TMA_STORE,
        )  # fmt: skip
        if SUBTILES == 2:
            finish_tile(
                right, bias, residual, d, row, col + BLOCK_N // 2, M, N,
                HAS_BIAS, ACTIVATION, HAS_RESIDUAL, TMA_STORE,
            )  # fmt: skip

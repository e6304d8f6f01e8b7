"""Triton kernels of `fp8_gemm`: D = A @ B^T, float8_e4m3fn with block scales, bfloat16 out.

All arrays have contiguous rows:

    a (M, K) with a_scale (K/128, M), b (N, K) with b_scale (N/128, K/128), d (M, N)
    partials (tiles, SPLIT_K, BLOCK_M * BLOCK_N) float32, arrivals (tiles,) int32

Tensor cores sum 128 products at a time, with less precision than float32; the scaled sums are added
up in float32. BLOCK_N divides 128, so that a tile takes one scale of B for a k-block.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.epilogue import locate_elements
from kernelcat.kernels.triton.common.device.split_k import sum_splits
from kernelcat.kernels.triton.common.device.tile_order import locate_tile


@triton.jit
def block_scale(a_scale, b_scale, rows, col, k_block, M, K):
    """Scales of ``rows`` (BLOCK_M,) of A, times the one scale of the tile's columns of B."""
    row_scale = tl.load(a_scale + k_block * M + rows, mask=rows < M, other=0.0)
    return row_scale * tl.load(b_scale + col // 128 * tl.cdiv(K, 128) + k_block)


@triton.jit
def store(d, acc, row, col, M, N, TMA_STORE: tl.constexpr):
    """Store acc (BLOCK_M, BLOCK_N), the tile at (row, col); d is a descriptor where TMA_STORE."""
    if TMA_STORE:
        d.store([row, col], acc.to(d.dtype))
    else:
        offsets, inside = locate_elements(acc, row, col, M, N)
        tl.store(d + offsets, acc.to(d.dtype.element_ty), mask=inside)


@triton.jit
def naive(
    a, a_scale, b, b_scale, d, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One small tile a program, masked loads, nothing overlapped: the baseline to beat."""
    row, col = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    a_rows, b_rows = a + rows[:, None].to(tl.int64) * K, b + cols[:, None].to(tl.int64) * K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k_block in range(tl.cdiv(K, 128)):
        ks = k_block * 128 + tl.arange(0, 128)
        a_tile = tl.load(a_rows + ks, mask=(rows < M)[:, None] & (ks < K), other=0.0)
        b_tile = tl.load(b_rows + ks, mask=(cols < N)[:, None] & (ks < K), other=0.0)
        scale = block_scale(a_scale, b_scale, rows, col, k_block, M, K)
        acc += tl.dot(a_tile, b_tile.T) * scale[:, None]
    store(d, acc, row, col, M, N, False)


@triton.jit
def promoted_product(
    a, a_scale, b, b_scale, row, col, k_begin, k_end, M, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tile at (row, col) of the product over k-blocks [k_begin, k_end).

    a and b are descriptors; TMA fills in zeros past the edges. Because the loop itself has STAGES,
    scales are copied ahead as operands are. SWAP computes B A^T, so that a tile of few rows still
    fills the 64 rows of a warpgroup's product.
    """
    rows = row + tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    for k_block in tl.range(k_begin, k_end, num_stages=STAGES):
        scale = block_scale(a_scale, b_scale, rows, col, k_block, M, K)
        a_tile, b_tile = a.load([row, k_block * 128]), b.load([col, k_block * 128])
        if SWAP:
            acc += tl.dot(b_tile, a_tile.T) * scale[None, :]
        else:
            acc += tl.dot(a_tile, b_tile.T) * scale[:, None]
    if SWAP:
        acc = acc.T
    return acc


@triton.jit
def tma(
    a, a_scale, b, b_scale, d, partials, arrivals, M, N, K, split_blocks,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
    SWAP: tl.constexpr, STAGES: tl.constexpr, TMA_STORE: tl.constexpr,
):  # fmt: skip
    """One tile a program in grouped order; program axis 1 splits K by split_blocks k-blocks each.

    a and b are descriptors, and d where TMA_STORE.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = locate_tile(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
    k_begin = split * split_blocks
    k_end = min(tl.cdiv(K, 128), k_begin + split_blocks)
    acc = promoted_product(
        a, a_scale, b, b_scale, row, col, k_begin, k_end, M, K, BLOCK_M, BLOCK_N, SWAP, STAGES
    )
    acc, is_last = sum_splits(acc, partials, arrivals, tile, split, SPLIT_K)
    if is_last:
        store(d, acc, row, col, M, N, TMA_STORE)


@triton.jit
def persistent(
    a, a_scale, b, b_scale, d, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr, NUM_PROGRAMS: tl.constexpr, STAGES: tl.constexpr,
    TMA_STORE: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """Programs that take tile after tile; both loops are flattened into one pipeline.

    While a tile is stored, the next one's operands are already on their way. a and b are
    descriptors, and d where TMA_STORE.
    """
    num_tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(
        tl.program_id(0), num_tiles, NUM_PROGRAMS, flatten=True, num_stages=STAGES,
        warp_specialize=WARP_SPECIALIZE,
    ):  # fmt: skip
        tile_m, tile_n = locate_tile(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = promoted_product(
            a, a_scale, b, b_scale, row, col, 0, tl.cdiv(K, 128), M, K, BLOCK_M, BLOCK_N,
            False, STAGES,
        )  # fmt: skip
        store(d, acc, row, col, M, N, TMA_STORE)

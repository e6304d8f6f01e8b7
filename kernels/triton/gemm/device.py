"""Triton kernels of `gemm`: D = activation(A @ B^T + bias) + residual, float32 accumulation.

A is (M, K), B is (N, K), both row-major; epilogue.py says what the rest is.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.gemm.epilogue import finish


@triton.jit
def tile_of(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Position of a tile: columns of GROUP_M tiles, so that neighbours share operands in L2."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    per_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_m = tile // per_group * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M)
    within = tile % per_group
    return first_m + within % group_m, within // group_m


@triton.jit
def sum_splits(acc, partials, arrivals, tile, split, SPLIT_K: tl.constexpr):
    """Deterministic split-K: the last program to arrive at a tile sums all partials, in order.

    partials is (tiles, SPLIT_K, tile elements) float32; arrivals counts per tile and is left zero.
    Returns the sum and whether this program is the last.
    """
    if SPLIT_K == 1:
        return acc, True
    SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
    within = (
        tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
    )
    base = partials + tile.to(tl.int64) * (SPLIT_K * SIZE) + within
    tl.store(base + split * SIZE, acc)
    tl.debug_barrier()  # every thread's partials before the one thread that counts
    last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if last:
        acc = tl.zeros_like(acc)
        for index in tl.range(SPLIT_K, loop_unroll_factor=2):
            acc += tl.load(base + index * SIZE, cache_modifier=".cg")
        tl.store(arrivals + tile, 0)
    return acc, last


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
    finish(
        acc, bias, residual, d, row, col, M, N,
        HAS_BIAS, ACTIVATION, HAS_RESIDUAL, DESCRIBED=False,
    )  # fmt: skip


@triton.jit
def pointer_product(
    a, b, row, col, k_begin, k_end, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A[row:, k_begin:k_end] @ B[col:, k_begin:k_end]^T through pipelined asynchronous copies.

    Rows past the end are read as row 0 (their results are not stored), so that only the last
    block of K needs a mask.
    """
    rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    a_rows = a + tl.where(rows < M, rows, 0)[:, None].to(tl.int64) * K + ks[None, :]
    b_rows = b + tl.where(cols < N, cols, 0)[:, None].to(tl.int64) * K + ks[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(k_begin, k_end, BLOCK_K):
        inside = (ks < K - k)[None, :]
        a_tile = tl.load(a_rows + k, mask=inside, other=0.0)
        b_tile = tl.load(b_rows + k, mask=inside, other=0.0)
        acc = tl.dot(a_tile, b_tile.T, acc)
    return acc


@triton.jit
def tiled(
    a, b, bias, residual, d, partials, arrivals, M, N, K, split_depth,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """A tile a program in grouped order, software-pipelined; program axis 1 splits K."""
    tile, split = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
    k_begin = split * split_depth
    k_end = min(K, k_begin + split_depth)
    acc = pointer_product(a, b, row, col, k_begin, k_end, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K)
    acc, last = sum_splits(acc, partials, arrivals, tile, split, SPLIT_K)
    if last:
        finish(
            acc, bias, residual, d, row, col, M, N,
            HAS_BIAS, ACTIVATION, HAS_RESIDUAL, DESCRIBED=False,
        )  # fmt: skip


@triton.jit
def descriptor_product(
    x, y, row, col, k_begin, k_end,
    BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """X[row:, k_begin:k_end] @ Y[col:, k_begin:k_end]^T; the copy engine fills zeros past edges."""
    acc = tl.zeros((BLOCK_ROW, BLOCK_COL), tl.float32)
    for k in range(k_begin, k_end, BLOCK_K):
        acc = tl.dot(x.load([row, k]), y.load([col, k]).T, acc)
    return acc


@triton.jit
def tma(
    a, b, bias, residual, d, partials, arrivals, M, N, K, split_depth,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr, SWAP: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """`tiled` through tensor descriptors a and b.

    SWAP computes D^T = B A^T, so that a tile of few rows still fills the 64 rows of a warpgroup's
    product. d is a descriptor with DESCRIBED, else a pointer.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
    k_begin = split * split_depth
    k_end = min(K, k_begin + split_depth)
    if SWAP:
        acc = descriptor_product(b, a, col, row, k_begin, k_end, BLOCK_N, BLOCK_M, BLOCK_K).T
    else:
        acc = descriptor_product(a, b, row, col, k_begin, k_end, BLOCK_M, BLOCK_N, BLOCK_K)
    acc, last = sum_splits(acc, partials, arrivals, tile, split, SPLIT_K)
    if last:
        finish(
            acc, bias, residual, d, row, col, M, N,
            HAS_BIAS, ACTIVATION, HAS_RESIDUAL, DESCRIBED,
        )  # fmt: skip


@triton.jit
def persistent(
    a, b, bias, residual, d, M, N, K,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, NUM_PROGRAMS: tl.constexpr, SUBTILES: tl.constexpr,
    DESCRIBED: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """A program an SM walks over tiles; both loops are flattened into one pipeline.

    While a tile is stored, the next one's operands are already on their way. SUBTILES 2 finishes
    and stores halves of a tile, which frees shared memory for one more stage.
    """
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(
        tl.program_id(0), tiles, NUM_PROGRAMS, flatten=True, warp_specialize=WARP_SPECIALIZE
    ):
        tile_m, tile_n = tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = descriptor_product(a, b, row, col, 0, K, BLOCK_M, BLOCK_N, BLOCK_K)
        if SUBTILES == 2:
            halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            acc, right = tl.split(halves)
        finish(
            acc, bias, residual, d, row, col, M, N,
            HAS_BIAS, ACTIVATION, HAS_RESIDUAL, DESCRIBED,
        )  # fmt: skip
        if SUBTILES == 2:
            finish(
                right, bias, residual, d, row, col + BLOCK_N // 2, M, N,
                HAS_BIAS, ACTIVATION, HAS_RESIDUAL, DESCRIBED,
            )  # fmt: skip

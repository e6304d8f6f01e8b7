"""Tiles of A @ B^T, A (M, K) and B (N, K) with contiguous rows, loaded through pointers."""

import triton
import triton.language as tl


@triton.jit
def pointer_product(
    a, b, row, col, k_begin, k_end, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A[row:, k_begin:k_end] @ B[col:, k_begin:k_end]^T through pipelined asynchronous copies.

    Instead of rows past the end row 0 is read, since their results are not stored. Then only the
    last k-block needs a mask.
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

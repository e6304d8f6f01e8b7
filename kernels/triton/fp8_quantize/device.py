"""Triton kernels of `fp8_quantize`: x (M, K) -> q (M, K) float8_e4m3fn, scale float32.

scale is (K/128, M) for blocks of one row, (M/128, K/128) for blocks of 128.
"""

import triton
import triton.language as tl


@triton.jit
def quantize(x, q, scale, M, K, BLOCK_ROWS: tl.constexpr, ROWS: tl.constexpr):
    """ROWS rows of one column of blocks a program; the columns of a row follow one another.

    A thread's elements stay in registers between the maximum and the division.
    """
    k_blocks = tl.cdiv(K, 128)
    row = tl.program_id(0) // k_blocks * ROWS
    k_block = tl.program_id(0) % k_blocks
    rows, cols = row + tl.arange(0, ROWS), k_block * 128 + tl.arange(0, 128)
    inside = (rows < M)[:, None] & (cols < K)[None, :]
    at = rows[:, None].to(tl.int64) * K + cols[None, :]
    values = tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    amax = tl.max(tl.abs(values), axis=1)
    if BLOCK_ROWS == 128:
        amax = tl.maximum(tl.max(amax, axis=0), 1e-10)
        inverse = tl.div_rn(448.0, amax)
        tl.store(scale + row // 128 * k_blocks + k_block, tl.div_rn(amax, 448.0))
    else:
        amax = tl.maximum(amax, 1e-10)
        inverse = tl.div_rn(448.0, amax)[:, None]
        tl.store(scale + k_block.to(tl.int64) * M + rows, tl.div_rn(amax, 448.0), mask=rows < M)
    tl.store(q + at, (values * inverse).to(q.dtype.element_ty), mask=inside)

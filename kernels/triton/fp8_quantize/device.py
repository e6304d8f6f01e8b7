"""Triton kernels of `fp8_quantize`: x (M, K) -> q (M, K) float8_e4m3fn, scale float32.

scale is (K/128, M) for blocks of one row, (M/128, K/128) for blocks of 128.
"""

import triton
import triton.language as tl


@triton.jit
def clamped(amax):
    """At least 1e-10, which keeps the scale of a block of zeros finite."""
    return tl.maximum(amax, 1e-10)


@triton.jit
def scale_of(amax):
    """A block's scale, correctly rounded."""
    return tl.div_rn(amax, 448.0)


@triton.jit
def inverse_of(amax):
    """What a block's elements are multiplied by, correctly rounded."""
    return tl.div_rn(448.0, amax)


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
        amax = clamped(tl.max(amax, axis=0))
        inverse = inverse_of(amax)
        tl.store(scale + row // 128 * k_blocks + k_block, scale_of(amax))
    else:
        amax = clamped(amax)
        inverse = inverse_of(amax)[:, None]
        tl.store(scale + k_block.to(tl.int64) * M + rows, scale_of(amax), mask=rows < M)
    tl.store(q + at, (values * inverse).to(q.dtype.element_ty), mask=inside)

"""Triton kernel of `fp8_quantize`: x -> q float8_e4m3fn, scale float32."""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.fp8 import clamp_amax, inverse_of, scale_of


@triton.jit
def quantize(
    x,  # (M, K)
    q,  # (M, K)
    scale,  # (K/128, M) for blocks of one row, (M/128, K/128) for blocks of 128 rows
    M, K, BLOCK_ROWS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one column of blocks a program; the columns of a row follow one another.

    A thread's elements stay in registers between the maximum and the multiplication.
    """
    k_blocks = tl.cdiv(K, 128)
    row = tl.program_id(0) // k_blocks * ROWS
    k_block = tl.program_id(0) % k_blocks
    rows, cols = row + tl.arange(0, ROWS), k_block * 128 + tl.arange(0, 128)
    inside = (rows < M)[:, None] & (cols < K)[None, :]
    offsets = rows[:, None].to(tl.int64) * K + cols[None, :]
    values = tl.load(x + offsets, mask=inside, other=0.0, eviction_policy="evict_first")
    values = values.to(tl.float32)
    amax = tl.max(tl.abs(values), axis=1)
    if BLOCK_ROWS == 128:
        amax = clamp_amax(tl.max(amax, axis=0))
        inverse = inverse_of(amax)
        tl.store(scale + row // 128 * k_blocks + k_block, scale_of(amax))
    else:
        amax = clamp_amax(amax)
        inverse = inverse_of(amax)[:, None]
        tl.store(scale + k_block.to(tl.int64) * M + rows, scale_of(amax), mask=rows < M)
    tl.store(q + offsets, (values * inverse).to(q.dtype.element_ty), mask=inside)

"""NVFP4 in registers: pairs of E2M1 values, and the scales of blocks of 16, to another type.

The values are 2^-7 of what they should be: their codes as bits of a float32 are 2^-126, and a
scale of 448 leaves room for 2^119. GROWTH makes up for it where it costs nothing.
"""

import triton
import triton.language as tl

GROWTH = tl.constexpr(128.0)
FACTOR = tl.constexpr(2.0**119)
CODE = tl.constexpr(-0x7E400000)
"""A float32's sign, the last two bits of its exponent and the first of its mantissa."""


@triton.jit
def from_highest(bits):
    """2^-126 of the values whose codes are the highest 4 bits of an int32."""
    return ((bits >> 6) & CODE).to(tl.float32, bitcast=True)


@triton.jit
def widened(pairs, scales, dtype: tl.constexpr):
    """(rows, 2 * columns) of bytes (rows, columns) and scales (rows, columns / 8), bytes too."""
    ROWS: tl.constexpr = pairs.shape[0]
    COLUMNS: tl.constexpr = pairs.shape[1]
    factors = scales.to(tl.float8e4nv, bitcast=True).to(tl.float32)[:, :, None] * FACTOR
    factors = tl.broadcast_to(factors, (ROWS, COLUMNS // 8, 8)).reshape(ROWS, COLUMNS)
    bits = pairs.to(tl.int32)
    low, high = from_highest(bits << 28) * factors, from_highest(bits << 24) * factors
    return tl.interleave(low.to(dtype), high.to(dtype))

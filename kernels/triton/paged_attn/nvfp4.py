"""NVFP4 keys and values in registers, decoded to 2^-7 of their values.

`decode_tiny` gives 2^-126 of a code's value. Multiplying by a block scale of 448 leaves room for a
factor of 2^119 in float32. GROWTH is the rest, and is applied where it costs nothing: to the scale
of the scores and to the accumulator.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.fp4 import decode_tiny

GROWTH = tl.constexpr(128.0)
"""What decoded values are still to be multiplied by."""
SCALE_FACTOR = tl.constexpr(2.0**119)


@triton.jit
def decode(pairs, scales, dtype: tl.constexpr):
    """Values / GROWTH (rows, 2 * columns) of bytes ``pairs`` (rows, columns).

    scales (rows, columns / 8) are bytes too, the E4M3 scales of blocks of 16 values.
    """
    ROWS: tl.constexpr = pairs.shape[0]
    COLUMNS: tl.constexpr = pairs.shape[1]
    factors = scales.to(tl.float8e4nv, bitcast=True).to(tl.float32)[:, :, None] * SCALE_FACTOR
    factors = tl.broadcast_to(factors, (ROWS, COLUMNS // 8, 8)).reshape(ROWS, COLUMNS)
    bits = pairs.to(tl.int32)
    low, high = decode_tiny(bits << 28) * factors, decode_tiny(bits << 24) * factors
    return tl.interleave(low.to(dtype), high.to(dtype))

"""Scales of blocks that are quantized to float8_e4m3fn, whose largest value is 448.

``amax`` is the largest magnitude of each block, of any shape.
"""

import triton
import triton.language as tl


@triton.jit
def clamp_amax(amax):
    """amax, 1e-10 at least: the inverse scale of a block of zeros stays finite."""
    return tl.maximum(amax, 1e-10)


@triton.jit
def scale_of(amax):
    """Scales of blocks, correctly rounded."""
    return tl.div_rn(amax, 448.0)


@triton.jit
def inverse_of(amax):
    """What elements of blocks are multiplied by, correctly rounded."""
    return tl.div_rn(448.0, amax)


@triton.jit
def quantize_rows(x, dtype: tl.constexpr):
    """Float32 x (rows, 128) in float8 type ``dtype``, and the scale of each row (rows,)."""
    amax = clamp_amax(tl.max(tl.abs(x), axis=1))
    return (x * inverse_of(amax)[:, None]).to(dtype), scale_of(amax)

"""NVFP4 and MXFP4 in registers: block scales, codes, and where scales lie.

Bits are put together by integer arithmetic, so that any architecture will do.
"""

import triton
import triton.language as tl

INFINITY = tl.constexpr(0x7F800000)
E4M3_BIAS = tl.constexpr(120 << 23)
"""What a float32's exponent is ahead of e4m3's, in place."""


@triton.jit
def scale_place(rows, cols, num_cols, SWIZZLED: tl.constexpr):
    """Offsets of scales (rows, cols) of ``num_cols`` a row; the 128x4 tiles of cuBLASLt."""
    if SWIZZLED:
        tiles = (rows // 128).to(tl.int64)[:, None] * tl.cdiv(num_cols, 4) + (cols // 4)[None, :]
        within = (rows % 32 * 16 + rows % 128 // 32 * 4)[:, None] + (cols % 4)[None, :]
        return tiles * 512 + within
    return rows.to(tl.int64)[:, None] * num_cols + cols[None, :]


@triton.jit
def nvfp4_scales(amax, global_scale):
    """E4M3 codes, never subnormal, of largest elements, and what elements are multiplied by."""
    per_six = tl.div_rn(1.0, 6.0 * global_scale)
    wanted = tl.minimum(tl.maximum(amax * per_six, 0.015625), 448.0)
    bits = wanted.to(tl.int32, bitcast=True)
    code = (bits + 0x7FFFF + ((bits >> 20) & 1) >> 20) - (E4M3_BIAS >> 20)
    scale = ((code << 20) + E4M3_BIAS).to(tl.float32, bitcast=True)
    return code, tl.div_rn(1.0, scale * global_scale)


@triton.jit
def mxfp4_scales(bits):
    """E8M0 codes of largest elements, given as float32's bits, and the inverse scales."""
    code = tl.maximum(tl.minimum(bits, 0x7F7FFFFF) >> 23, 2) - 2
    return code, ((254 - code) << 23).to(tl.float32, bitcast=True)


@triton.jit
def nearest_codes(y):
    """E2M1 codes, ties to even: adding a large power of two rounds to the step at ``y``."""
    size = tl.minimum(tl.abs(y), 6.0)
    power = tl.maximum(size, 1.0).to(tl.int32, bitcast=True) & INFINITY
    far = power + (22 << 23)
    rounded = (size + far.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    return (rounded - far + (power >> 22) - 254) | sign_of(y)


@triton.jit
def random_codes(y, random):
    """E2M1 codes, rounded up where 16 random bits carry (reference/_fp4.py, ``stochastic``)."""
    size = tl.minimum(tl.abs(y), 6.0)
    small = size < 1.0
    bits = tl.where(small, size + 1.0, size).to(tl.int32, bitcast=True)
    return ((bits + (random << 6) >> 22) - tl.where(small, 254, 252)) | sign_of(y)


@triton.jit
def sign_of(y):
    """A code's sign."""
    return (y.to(tl.int32, bitcast=True) >> 28) & 8


@triton.jit
def packed(codes):
    """(rows, columns) of codes -> (rows, columns / 2) of bytes, the first in the low half."""
    low, high = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def unpacked(pairs):
    """(rows, columns / 2) of bytes -> (rows, columns) of float32."""
    bits = pairs.to(tl.int32)
    codes = tl.interleave(bits << 28, bits << 24)
    # Sign, exponent and mantissa in place make 2^-126 of the value, 0.5 (a subnormal) included.
    tiny = ((codes >> 6) & -0x7E400000).to(tl.float32, bitcast=True)
    return tiny * 8.507059173023462e37


@triton.jit
def nvfp4_factors(scales):
    """Float32 of E4M3 bytes, NaN for both of its NaNs."""
    bits = scales.to(tl.int32)
    tiny = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), tiny * 1.329227995784916e36)


@triton.jit
def mxfp4_factors(scales):
    """Float32 of E8M0 bytes; the lowest is a subnormal."""
    bits = scales.to(tl.int32)
    edge = ((bits == 0) | (bits == 255)).to(tl.int32) << 22
    return ((bits << 23) | edge).to(tl.float32, bitcast=True)


@triton.jit
def spread(blocks, SIZE: tl.constexpr):
    """(rows, blocks) -> (rows, blocks * SIZE), each value SIZE times."""
    wide = tl.broadcast_to(blocks[:, :, None], (blocks.shape[0], blocks.shape[1], SIZE))
    return tl.reshape(wide, (blocks.shape[0], blocks.shape[1] * SIZE))

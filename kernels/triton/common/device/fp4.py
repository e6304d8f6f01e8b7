"""NVFP4 and MXFP4 in registers: codes, block scales, and where scales lie.

Codes are E2M1: a sign, two bits of exponent, one of mantissa. NVFP4 has an E4M3 scale for every 16
elements of a row, MXFP4 an E8M0 scale for every 32 (reference/_fp4.py). Floats are put together by
integer arithmetic, which every architecture has.
"""

import triton
import triton.language as tl

INFINITY = tl.constexpr(0x7F800000)
"""The bits of a float32's exponent; NaNs are above as integers."""
E4M3_BIAS = tl.constexpr(120 << 23)
"""The difference of the exponent biases of float32 and E4M3, in the place of the exponent."""


# ---- scales ------------------------------------------------------------------------------------


@triton.jit
def scale_place(rows, cols, num_cols, SWIZZLED: tl.constexpr):
    """Offsets (rows, cols) of the scales of ``rows`` x ``cols``, where a row has ``num_cols``.

    Swizzled scales lie in cuBLASLt's tiles of 128 x 4.
    """
    if SWIZZLED:
        tiles = (rows // 128).to(tl.int64)[:, None] * tl.cdiv(num_cols, 4) + (cols // 4)[None, :]
        in_tile = (rows % 32 * 16 + rows % 128 // 32 * 4)[:, None] + (cols % 4)[None, :]
        return tiles * 512 + in_tile
    return rows.to(tl.int64)[:, None] * num_cols + cols[None, :]


@triton.jit
def encode_nvfp4_scales(amax, global_scale):
    """E4M3 codes, never subnormal, for largest elements; and what to multiply the elements by."""
    per_six = tl.div_rn(1.0, 6.0 * global_scale)
    scale = tl.minimum(tl.maximum(amax * per_six, 0.015625), 448.0)
    bits = scale.to(tl.int32, bitcast=True)
    code = (bits + 0x7FFFF + ((bits >> 20) & 1) >> 20) - (E4M3_BIAS >> 20)
    rounded = ((code << 20) + E4M3_BIAS).to(tl.float32, bitcast=True)
    return code, tl.div_rn(1.0, rounded * global_scale)


@triton.jit
def encode_mxfp4_scales(amax_bits):
    """E8M0 codes for largest elements, given as the bits of a float32; and the inverse scales."""
    code = tl.maximum(tl.minimum(amax_bits, 0x7F7FFFFF) >> 23, 2) - 2
    return code, ((254 - code) << 23).to(tl.float32, bitcast=True)


@triton.jit
def decode_nvfp4_scales(codes):
    """Float32 values of E4M3 codes (bytes); NaN for both codes that mean NaN."""
    bits = codes.to(tl.int32)
    tiny = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), tiny * 1.329227995784916e36)  # 2^120


@triton.jit
def decode_mxfp4_scales(codes):
    """Float32 values of E8M0 codes (bytes); the least value is a subnormal."""
    bits = codes.to(tl.int32)
    edge = ((bits == 0) | (bits == 255)).to(tl.int32) << 22
    return ((bits << 23) | edge).to(tl.float32, bitcast=True)


@triton.jit
def repeat_columns(blocks, SIZE: tl.constexpr):
    """(rows, blocks) -> (rows, blocks * SIZE), each value SIZE times."""
    wide = tl.broadcast_to(blocks[:, :, None], (blocks.shape[0], blocks.shape[1], SIZE))
    return tl.reshape(wide, (blocks.shape[0], blocks.shape[1] * SIZE))


@triton.jit
def scale_blocks(values, scales, NVFP4: tl.constexpr):
    """Values (rows, columns) times the scales of their blocks, bytes (rows, blocks)."""
    return values * (
        repeat_columns(decode_nvfp4_scales(scales), 16)
        if NVFP4
        else repeat_columns(decode_mxfp4_scales(scales), 32)
    )


# ---- codes -------------------------------------------------------------------------------------


@triton.jit
def nearest_codes(y):
    """E2M1 codes of y, ties to even: adding a large power of two rounds to the step at ``y``."""
    size = tl.minimum(tl.abs(y), 6.0)
    power = tl.maximum(size, 1.0).to(tl.int32, bitcast=True) & INFINITY
    large = power + (22 << 23)
    rounded = (size + large.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    return (rounded - large + (power >> 22) - 254) | sign_bit(y)


@triton.jit
def random_codes(y, random):
    """E2M1 codes of y, rounded up where 16 random bits carry (reference/_fp4.py: stochastic)."""
    size = tl.minimum(tl.abs(y), 6.0)
    is_small = size < 1.0
    bits = tl.where(is_small, size + 1.0, size).to(tl.int32, bitcast=True)
    return ((bits + (random << 6) >> 22) - tl.where(is_small, 254, 252)) | sign_bit(y)


@triton.jit
def sign_bit(y):
    """The sign of y in the place that it has in a code."""
    return (y.to(tl.int32, bitcast=True) >> 28) & 8


@triton.jit
def pack_codes(codes):
    """Codes (rows, columns) -> bytes (rows, columns / 2), the first code in the low half."""
    low, high = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def unpack_codes(pairs):
    """Bytes (rows, columns / 2) -> float32 values of their codes (rows, columns)."""
    bits = pairs.to(tl.int32)
    return decode_tiny(tl.interleave(bits << 28, bits << 24)) * 8.507059173023462e37  # 2^126


@triton.jit
def decode_tiny(bits):
    """2^-126 of the values whose codes are the highest 4 bits of int32 ``bits``.

    The bits of a code are shifted into the fields of a float32; 0.5 becomes a subnormal.
    """
    return ((bits >> 6) & -0x7E400000).to(tl.float32, bitcast=True)

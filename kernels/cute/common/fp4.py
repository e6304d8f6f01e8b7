"""NVFP4 and MXFP4 in registers: scales, codes, and where scales lie in memory.

Results are those of reference/_fp4.py bit by bit.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernelcat.kernels.cute.common.bits import bits_of, float_of

E2M1_MAX = 6.0
MIN_SCALE, E4M3_MAX = 2.0**-6, 448.0
INFINITY_BITS = 0x7F800000
CODES = 8
"""Codes in a word."""
NAN_SCALE = {True: 0x7F, False: 0xFF}
"""The scale of a block with a NaN, of NVFP4 (True) and of MXFP4."""


def block_size(is_nvfp4: bool) -> int:
    """Elements that share a scale."""
    return 16 if is_nvfp4 else 32


@cute.jit
def scale_offset(row: Int64, col: Int32, num_cols: Int32, is_swizzled: cutlass.Constexpr):
    """Offset of scale (row, col) of ``num_cols`` a row; swizzled means cuBLASLt's 128 x 4 tiles."""
    if cutlass.const_expr(is_swizzled):
        tile_row = Int32(row % 128)
        tile = (row // 128) * cute.ceil_div(num_cols, 4) + col // 4
        offset = tile * 512 + Int64(tile_row % 32 * 16 + tile_row // 32 * 4 + col % 4)
    else:
        offset = row * num_cols + col
    return offset


@cute.jit
def scale_layout(m: Int32, k: Int32):
    """(bytes,): room for all scales in either order, with the padding of the swizzled one."""
    return cute.make_layout(cute.ceil_div(Int64(m), 128) * 128 * (k // CODES + 128))


@cute.jit
def reciprocal(x: Float32):
    """1 / x, correctly rounded."""
    return cute.arch.inline_ptx(
        "rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


@cute.jit
def max_magnitude(a: Float32, b: Float32):
    """The larger one of \\|a\\| and \\|b\\|; NaN where either is NaN."""
    return cute.arch.inline_ptx(
        """{
        .reg .f32 a, b;
        abs.f32 a, {$r0};
        abs.f32 b, {$r1};
        max.NaN.f32 {$w0}, a, b;
        }""",
        write_only_types=[Float32],
        read_only_args=[a, b],
    )


@cute.jit
def block_scale(amax: Float32, global_scale: Float32, is_nvfp4: cutlass.Constexpr):
    """A block's scale as a byte, and the factor that its elements are multiplied by.

    ``amax``, the largest magnitude of the block, is no NaN. The scale of NVFP4 is rounded to E4M3
    as a float32's bits, 20 of which E4M3 does not have; it is never subnormal.
    """
    if cutlass.const_expr(is_nvfp4):
        per_six = reciprocal(Float32(E2M1_MAX) * global_scale)
        scale = cute.arch.fmax(amax * per_six, Float32(MIN_SCALE))
        bits = bits_of(cute.arch.fmin(scale, Float32(E4M3_MAX)))
        rounded = (bits + Uint32(0x7FFFF) + ((bits >> 20) & 1)) >> 20
        inverse = reciprocal(float_of(rounded << 20) * global_scale)
        code = rounded - Uint32(120 << 3)
    else:
        power = bits_of(amax)
        if power > Uint32(INFINITY_BITS - 1):
            power = Uint32(INFINITY_BITS - 1)
        code = power >> 23
        if code < Uint32(2):
            code = Uint32(2)
        code = code - Uint32(2)
        inverse = float_of((Uint32(254) - code) << 23)
    return code, inverse


@cute.jit
def nearest_code(y: Float32):
    """The E2M1 code nearest to y, ties to even, saturated at 6.

    \\|y\\| is rounded by adding 2^22 times its power of two, at least 1: floats of that size are as
    far apart as the codes around \\|y\\|, by 1/2, 1 or 2.
    """
    return cute.arch.inline_ptx(
        """{
        .reg .f32 magnitude, base, sum;
        .reg .b32 power, code, sign;
        abs.f32 magnitude, {$r0};
        min.f32 magnitude, magnitude, 0f40C00000;
        max.f32 base, magnitude, 0f3F800000;
        mov.b32 power, base;
        and.b32 power, power, 0x7F800000;
        mov.b32 base, power;
        fma.rn.f32 sum, base, 0f4A800000, magnitude;
        mov.b32 code, sum;
        sub.u32 code, code, power;
        shr.u32 power, power, 22;
        add.u32 code, code, power;
        sub.u32 code, code, 0x0B0000FE;
        mov.b32 sign, {$r0};
        shr.u32 sign, sign, 28;
        lop3.b32 {$w0}, sign, 8, code, 0xEA;
        }""",
        write_only_types=[Uint32],
        read_only_args=[y],
    )


@cute.jit
def random_code(y: Float32, random_bits: Uint32):
    """An E2M1 code beside y, saturated at 6: the upper one where adding 16 random bits carries.

    The bits are added below the lowest bit of the code. Below 1, where codes are evenly spaced,
    \\|y\\| + 1 has the bits of the code.
    """
    return cute.arch.inline_ptx(
        """{
        .reg .f32 magnitude, shifted;
        .reg .b32 code, more, sign;
        .reg .pred small;
        abs.f32 magnitude, {$r0};
        min.f32 magnitude, magnitude, 0f40C00000;
        setp.lt.f32 small, magnitude, 0f3F800000;
        add.rn.f32 shifted, magnitude, 0f3F800000;
        selp.f32 magnitude, shifted, magnitude, small;
        selp.b32 more, 254, 252, small;
        shl.b32 code, {$r1}, 6;
        mov.b32 sign, magnitude;
        add.u32 code, code, sign;
        shr.u32 code, code, 22;
        sub.u32 code, code, more;
        mov.b32 sign, {$r0};
        shr.u32 sign, sign, 28;
        lop3.b32 {$w0}, sign, 8, code, 0xEA;
        }""",
        write_only_types=[Uint32],
        read_only_args=[y, random_bits],
    )


@cute.jit
def nearest_codes(
    y: cute.Tensor,  # (8,) float32
):
    """The nearest codes of eight values in a word, the first in its lowest bits."""
    word = Uint32(0)
    for i in cutlass.range_constexpr(CODES):
        word = word | (nearest_code(y[i]) << (4 * i))
    return word


@cute.jit
def random_codes(
    y: cute.Tensor,  # (8,) float32
    random_words: cute.Tensor,  # (4,): the bits of elements 2j (low half) and 2j + 1 in word j
):
    """Randomly rounded codes of eight values in a word, the first in its lowest bits."""
    word = Uint32(0)
    for i in cutlass.range_constexpr(CODES):
        random_bits = (random_words[i // 2] >> (16 * (i % 2))) & Uint32(0xFFFF)
        word = word | (random_code(y[i], random_bits) << (4 * i))
    return word


@cute.jit
def scale_value(code: Uint32, is_nvfp4: cutlass.Constexpr):
    """The float32 that a scale's byte stands for, NaN and subnormals included."""
    bits = code << 23
    if cutlass.const_expr(is_nvfp4):
        tiny = float_of(((code & 0x80) << 24) | ((code & 0x7F) << 20))
        bits = bits_of(tiny * Float32(2.0**120))
        if (code & 0x7F) == Uint32(0x7F):
            bits = Uint32(0x7FFFFFFF)
    else:
        if code == Uint32(0):
            bits = Uint32(1 << 22)
        if code == Uint32(0xFF):
            bits = Uint32(0x7FFFFFFF)
    return float_of(bits)


@cute.jit
def code_value(word: Uint32, i: cutlass.Constexpr):
    """The value of code i of the eight in a word.

    Sign, exponent and mantissa in their places in a float32 make 2^-126 of the value.
    """
    code = word >> (4 * i)
    return float_of(((code & 8) << 28) | ((code & 7) << 22)) * Float32(2.0**126)

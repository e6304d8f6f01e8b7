"""NVFP4 and MXFP4 in registers: scales, codes, and where scales lie. Bits are the oracle's."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernelcat.kernels.cute.common.bits import bits_of, float_of

E2M1_MAX = 6.0
LEAST_SCALE, E4M3_MAX = 2.0**-6, 448.0
INFINITY = 0x7F800000
CODES = 8
"""Codes of a word."""
NAN = {True: 0x7F, False: 0xFF}
"""Of NVFP4 or not: the scale of a block with a NaN."""


def block_size(nvfp4: bool) -> int:
    """Elements that share a scale."""
    return 16 if nvfp4 else 32


@cute.jit
def scale_place(row: Int64, col: Int32, num_cols: Int32, swizzled: cutlass.Constexpr):
    """Where the scale (row, col) of ``num_cols`` a row lies; cuBLASLt's tiles of 128 x 4."""
    if cutlass.const_expr(swizzled):
        within = Int32(row % 128)
        tile = (row // 128) * cute.ceil_div(num_cols, 4) + col // 4
        place = tile * 512 + Int64(within % 32 * 16 + within // 32 * 4 + col % 4)
    else:
        place = row * num_cols + col
    return place


@cute.jit
def scale_layout(m: Int32, k: Int32):
    """Bytes of scales, of either order: more than there may be of the swizzled one's padding."""
    return cute.make_layout(cute.ceil_div(Int64(m), 128) * 128 * (k // CODES + 128))


@cute.jit
def reciprocal(x: Float32):
    """1 / x, correctly rounded."""
    return cute.arch.inline_ptx(
        "rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


@cute.jit
def larger(a: Float32, b: Float32):
    """The larger magnitude, NaN if one is."""
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
def scale_of(amax: Float32, global_scale: Float32, nvfp4: cutlass.Constexpr):
    """A block's scale as a byte, and what its elements are multiplied by; ``amax`` is no NaN."""
    if cutlass.const_expr(nvfp4):
        per_six = reciprocal(Float32(E2M1_MAX) * global_scale)
        wanted = cute.arch.fmax(amax * per_six, Float32(LEAST_SCALE))
        bits = bits_of(cute.arch.fmin(wanted, Float32(E4M3_MAX)))
        rounded = (bits + Uint32(0x7FFFF) + ((bits >> 20) & 1)) >> 20
        inverse = reciprocal(float_of(rounded << 20) * global_scale)
        code = rounded - Uint32(120 << 3)
    else:
        power = bits_of(amax)
        if power > Uint32(INFINITY - 1):
            power = Uint32(INFINITY - 1)
        code = power >> 23
        if code < Uint32(2):
            code = Uint32(2)
        code = code - Uint32(2)
        inverse = float_of((Uint32(254) - code) << 23)
    return code, inverse


@cute.jit
def nearest_code(y: Float32):
    """A code, ties to even: 2^22 times 1, 2 or 4 is added, which leaves the step at \\|y\\|."""
    return cute.arch.inline_ptx(
        """{
        .reg .f32 size, least, sum;
        .reg .b32 power, code, sign;
        abs.f32 size, {$r0};
        min.f32 size, size, 0f40C00000;
        max.f32 least, size, 0f3F800000;
        mov.b32 power, least;
        and.b32 power, power, 0x7F800000;
        mov.b32 least, power;
        fma.rn.f32 sum, least, 0f4A800000, size;
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
def random_code(y: Float32, chance: Uint32):
    """A code, rounded up where 16 random bits carry into it."""
    return cute.arch.inline_ptx(
        """{
        .reg .f32 size, shifted;
        .reg .b32 code, more, sign;
        .reg .pred small;
        abs.f32 size, {$r0};
        min.f32 size, size, 0f40C00000;
        setp.lt.f32 small, size, 0f3F800000;
        add.rn.f32 shifted, size, 0f3F800000;
        selp.f32 size, shifted, size, small;
        selp.b32 more, 254, 252, small;
        shl.b32 code, {$r1}, 6;
        mov.b32 sign, size;
        add.u32 code, code, sign;
        shr.u32 code, code, 22;
        sub.u32 code, code, more;
        mov.b32 sign, {$r0};
        shr.u32 sign, sign, 28;
        lop3.b32 {$w0}, sign, 8, code, 0xEA;
        }""",
        write_only_types=[Uint32],
        read_only_args=[y, chance],
    )


@cute.jit
def nearest_codes(y: cute.Tensor):
    """Eight codes in a word, the first lowest."""
    word = Uint32(0)
    for i in cutlass.range_constexpr(CODES):
        word = word | (nearest_code(y[i]) << (4 * i))
    return word


@cute.jit
def random_codes(y: cute.Tensor, words: cute.Tensor):
    """The same with chance: word j has the bits of elements 2j (low) and 2j + 1."""
    word = Uint32(0)
    for i in cutlass.range_constexpr(CODES):
        chance = (words[i // 2] >> (16 * (i % 2))) & Uint32(0xFFFF)
        word = word | (random_code(y[i], chance) << (4 * i))
    return word


@cute.jit
def scale_value(code: Uint32, nvfp4: cutlass.Constexpr):
    """Float32 of a scale's byte: NaN for those that mean it, subnormals as they are."""
    bits = code << 23
    if cutlass.const_expr(nvfp4):
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
    """Value i of eight codes in a word, whose place in a float32 makes it 2^-126 of itself."""
    code = word >> (4 * i)
    return float_of(((code & 8) << 28) | ((code & 7) << 22)) * Float32(2.0**126)

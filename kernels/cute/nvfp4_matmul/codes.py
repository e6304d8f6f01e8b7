"""Decodes 4-bit codes into operands of tensor cores: two shifts and two masks for a pair, a scale.

A pair is codes i and i + 4 of a word: 16 bits apart, like the halves of a register. With sign,
exponent and mantissa in place, a code is a 16-bit float that is a power of two smaller than the
code's value: 2^126 in bfloat16, 2^14 in float16, subnormals included. Where the range of a scale
allows it, the scale is multiplied by that power, except for a factor ``LEFT``: NVFP4 weights are
then exactly 2^-8 of their values.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

LEFT = 256.0
"""The factor that sums of NVFP4 products have still to be multiplied by."""


@cute.jit
def fma2(x: Uint32, y: Uint32, half: cutlass.Constexpr):
    """x * y of the two 16-bit floats in each word: float16 with ``half``, else bfloat16."""
    name = "f16x2" if cutlass.const_expr(half) else "bf16x2"
    return cute.arch.inline_ptx(  # through registers: an operand must not be a number
        "{ .reg .b32 x, y, z; mov.b32 x, {$r0}; mov.b32 y, {$r1}; mov.b32 z, 0x80008000;"
        " fma.rn." + name + " {$w0}, x, y, z; }",
        write_only_types=[Uint32],
        read_only_args=[x, y],
    )


@cute.jit
def pair_bits(word: Uint32, i: cutlass.Constexpr, half: cutlass.Constexpr):
    """Codes i and i + 4, moved to the sign, exponent and mantissa of a register's halves."""
    places = 9 if cutlass.const_expr(half) else 6
    mask = 0x0E000E00 if cutlass.const_expr(half) else 0x01C001C0
    signs = (word << (12 - 4 * i)) & Uint32(0x80008000)
    shift = places - 4 * i
    moved = word << shift if cutlass.const_expr(shift >= 0) else word >> (-shift)
    return signs | (moved & Uint32(mask))


@cute.jit
def factors(scales, nvfp4: cutlass.Constexpr, half: cutlass.Constexpr):
    """Factors of a lane's 32 codes of a row: (2,) words, one for each 16 codes.

    A word has the factor twice, in both halves, or once as float32 for MXFP4 in float16. ``scales``
    are two bytes for NVFP4, each the scale of 16 codes, or one byte for MXFP4.
    """
    found = cute.make_rmem_tensor(2, Uint32)
    if cutlass.const_expr(nvfp4):
        # The bits of an E4M3 scale, moved in place, make 2^-8 of the scale in float16 and 2^-120
        # in bfloat16. Times 2^14 and 2^238 that is 2^6 and 2^118 of the scale: larger by as much
        # as codes are smaller, 2^14 and 2^126, but for 2^-8.
        for i in cutlass.range_constexpr(2):
            byte = (Uint32(scales) >> (8 * i)) & Uint32(0xFF)
            both = byte | (byte << 16)
            if cutlass.const_expr(half):
                found[i] = fma2(both << 7, Uint32(0x74007400), True)
            else:
                found[i] = fma2(
                    fma2(both << 4, Uint32(0x7B807B80), False), Uint32(0x7A807A80), False
                )
    elif cutlass.const_expr(half):
        # Most of these powers of two are outside the range of float16: they stay float32.
        bits = Uint32(scales) << 23
        if Uint32(scales) == Uint32(0):
            bits = Uint32(1 << 22)
        found[0] = bits
        found[1] = bits
    else:
        bits = Uint32(scales) << 7
        if Uint32(scales) == Uint32(0):
            bits = Uint32(1 << 6)
        found[0] = bits | (bits << 16)
        found[1] = found[0]
    return found


@cute.jit
def decoded_pair(
    word: Uint32,
    factor: Uint32,
    i: cutlass.Constexpr,
    nvfp4: cutlass.Constexpr,
    half: cutlass.Constexpr,
):
    """Weights i and i + 4 of a word as two 16-bit floats; NVFP4 weights are divided by ``LEFT``."""
    bits = pair_bits(word, i, half)
    if cutlass.const_expr(nvfp4):
        found = fma2(bits, factor, half)
    elif cutlass.const_expr(half):
        found = scaled_wide(fma2(bits, Uint32(0x74007400), True), factor)
    else:
        found = fma2(fma2(bits, Uint32(0x7E807E80), False), factor, False)
    return found


@cute.jit
def scaled_wide(pair: Uint32, factor: Uint32):
    """Two float16 times a float32, whose bits are ``factor``, rounded to float16."""
    return cute.arch.inline_ptx(
        """{
        .reg .b16 l, h;
        .reg .f32 x, y, scale;
        mov.b32 {l, h}, {$r0};
        mov.b32 scale, {$r1};
        cvt.f32.f16 x, l;
        cvt.f32.f16 y, h;
        mul.f32 x, x, scale;
        mul.f32 y, y, scale;
        cvt.rn.f16x2.f32 {$w0}, y, x;
        }""",
        write_only_types=[Uint32],
        read_only_args=[pair, factor],
    )


@cute.jit
def apart(
    words: cute.Tensor,  # (4,): eight neighbours of a row of A
    target: cute.Tensor,  # (4,), written
):
    """Pairs of elements i and i + 4 of A, as ``pair_bits`` pairs the codes that they multiply."""
    for i in cutlass.range_constexpr(2):
        low, high = cute.arch.inline_ptx(
            """{
            prmt.b32 {$w0}, {$r0}, {$r1}, 0x5410;
            prmt.b32 {$w1}, {$r0}, {$r1}, 0x7632;
            }""",
            write_only_types=[Uint32, Uint32],
            read_only_args=[words[i], words[i + 2]],
        )
        target[2 * i] = low
        target[2 * i + 1] = high

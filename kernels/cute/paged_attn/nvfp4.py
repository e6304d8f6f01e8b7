"""NVFP4's E2M1 values in registers."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint32


@cute.jit
def value_of(pair: Uint8, index: Int32):
    """The first (``index`` 0) or second (1) value of a pair.

    The bits of E2M1 become the sign, the last two bits of the exponent and the first bit of the
    mantissa of a float32. That number is 2^-126 times the value, in subnormals too.
    """
    return cute.arch.inline_ptx(
        """{
        .reg .b32 word;
        .reg .f32 tiny;
        shl.b32 word, {$r0}, {$r1};
        shr.s32 word, word, 6;
        and.b32 word, word, 0x81C00000;
        mov.b32 tiny, word;
        mul.f32 {$w0}, tiny, 0f7E800000;
        }""",
        write_only_types=[Float32],
        read_only_args=[Uint32(pair), Uint32(28 - 4 * index)],
    )

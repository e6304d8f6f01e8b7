"""NVFP4's E2M1 values in registers."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint32


@cute.jit
def value_of(pair: Uint8, index: Int32):
    """The first (0) or second (1) value of a pair.

    Its bits are put where a float32 has sign, the exponent's last two bits and the mantissa's
    first, which is 2^-126 of it.
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

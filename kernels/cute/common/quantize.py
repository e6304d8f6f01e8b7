"""Quantization to float8_e4m3fn with a scale for each block of values.

Every operation rounds to nearest, so that scales and codes are the same bit by bit everywhere.
"""

import cutlass.cute as cute
from cutlass import Float32, Uint32

BLOCK = 128
"""Columns that share a scale."""

E4M3_MAX = 448.0
MIN_AMAX = 1e-10
"""Keeps the inverse scale of a block of zeros finite."""


@cute.jit
def largest(amax: Float32, value: Float32):
    """The maximum of ``amax`` and \\|``value``\\|, by one instruction."""
    return cute.arch.fmax(amax, cute.math.absf(value))


@cute.jit
def scale_and_inverse(amax: Float32):
    """The scale of a block, and the factor that its elements are multiplied by."""
    amax = cute.arch.fmax(amax, Float32(MIN_AMAX))
    return divide(amax, Float32(E4M3_MAX)), divide(Float32(E4M3_MAX), amax)


@cute.jit
def divide(x: Float32, y: Float32):
    """x / y, correctly rounded whatever options the compiler gets."""
    return cute.arch.inline_ptx(
        "div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y]
    )


@cute.jit
def e4m3x4(
    values: cute.Tensor,  # (4,) float32
):
    """Four float8_e4m3fn in one word, rounded to nearest and saturated."""
    return cute.arch.inline_ptx(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};
        cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2};
        mov.b32 {$w0}, {low, high};
        }""",
        write_only_types=[Uint32],
        read_only_args=[values[i] for i in range(4)],
    )

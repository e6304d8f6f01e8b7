"""The arithmetic of quantization: every operation rounds to nearest, so that results are exact."""

import cutlass.cute as cute
from cutlass import Float32, Uint32

BLOCK = 128
E4M3_MAX = 448.0
LEAST_AMAX = 1e-10
"""Keeps the scale of a block of zeros finite."""


@cute.jit
def largest(amax: Float32, value: Float32):
    """The larger of ``amax`` and \\|``value``\\|; one instruction."""
    return cute.arch.fmax(amax, cute.math.absf(value))


@cute.jit
def scale_and_inverse(amax: Float32):
    """A block's scale, and what its elements are multiplied by."""
    amax = cute.arch.fmax(amax, Float32(LEAST_AMAX))
    return divide(amax, Float32(E4M3_MAX)), divide(Float32(E4M3_MAX), amax)


@cute.jit
def divide(x: Float32, y: Float32):
    """x / y, correctly rounded whatever the compiler's options say."""
    return cute.arch.inline_ptx(
        "div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y]
    )


@cute.jit
def e4m3x4(values: cute.Tensor):
    """Four float32 -> four float8_e4m3fn in one word, to nearest and saturating."""
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

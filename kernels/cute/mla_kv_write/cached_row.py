"""The arithmetic of a row of the latent cache.

Every operation rounds to nearest on its own, so that bytes are the same bit by bit everywhere.
"""

import cutlass.cute as cute
from cutlass import Float32, Uint32

from kernelcat.kernels.cute.common.bits import bits_of, float_of
from kernelcat.kernels.cute.common.quantize import E4M3_MAX, divide

MIN_SCALE = 1e-4
"""Scales are rounded up from this value or a larger one."""


@cute.jit
def rotated(x: Float32, y: Float32, cosine: Float32, sine: Float32):
    """The pair (x, y) after RoPE; products are rounded before they are added, never fused."""
    return cute.arch.inline_ptx(
        """{
        .reg .f32 a, b, c, d;
        mul.rn.f32 a, {$r0}, {$r2};
        mul.rn.f32 b, {$r1}, {$r3};
        mul.rn.f32 c, {$r1}, {$r2};
        mul.rn.f32 d, {$r0}, {$r3};
        sub.rn.f32 {$w0}, a, b;
        add.rn.f32 {$w1}, c, d;
        }""",
        write_only_types=[Float32, Float32],
        read_only_args=[x, y, cosine, sine],
    )


@cute.jit
def scale_and_inverse(amax: Float32):
    """The smallest power of two that is at least amax / 448 and ``MIN_SCALE``; and its inverse."""
    wanted = cute.arch.fmax(divide(amax, Float32(E4M3_MAX)), Float32(MIN_SCALE))
    exponent = (bits_of(wanted) + Uint32(0x7FFFFF)) & Uint32(0x7F800000)
    return float_of(exponent), float_of(Uint32(254 << 23) - exponent)

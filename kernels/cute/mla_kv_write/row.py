"""The arithmetic of a latent cache's row; every operation rounds to nearest, so bytes are exact."""

import cutlass.cute as cute
from cutlass import Float32, Uint32

from kernelcat.kernels.cute.common.quantize import E4M3_MAX, divide

LATENT, ROPE = 512, 64
ROW = LATENT + ROPE
"""Elements of a row: the latent, then the rotated part of the key."""
SCALED = 128
"""Float8 latents that share a scale."""
PACKED = LATENT + 4 * (LATENT // SCALED) + 2 * ROPE
"""Bytes of a row with float8 latents: those, their scales, and the rotated part in bfloat16."""
LEAST = 1e-4
"""Of what a scale is rounded up from."""


@cute.jit
def turned(x: Float32, y: Float32, cosine: Float32, sine: Float32):
    """The pair (x, y), turned: products are rounded before they are added, never fused."""
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
    """The least power of two that is not below amax / 448 and ``LEAST``; and its inverse."""
    least = cute.arch.fmax(divide(amax, Float32(E4M3_MAX)), Float32(LEAST))
    exponent = (bits_of(least) + Uint32(0x7FFFFF)) & Uint32(0x7F800000)
    return float_of(exponent), float_of(Uint32(254 << 23) - exponent)


@cute.jit
def bits_of(value: Float32):
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value]
    )


@cute.jit
def float_of(bits: Uint32):
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits]
    )

"""Pairs of 16-bit floating-point elements in words."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint32

from kernelcat.kernels.cute.common.bits import float_of


@cute.jit
def halves(word: Uint32, dtype: cutlass.Constexpr):
    """Both elements in float32, the one at the lower address first."""
    if cutlass.const_expr(dtype is BFloat16):
        low, high = float_of(word << Uint32(16)), float_of(word & Uint32(0xFFFF0000))
    else:
        low, high = cute.arch.inline_ptx(
            """{
            .reg .b16 low, high;
            mov.b32 {low, high}, {$r0};
            cvt.f32.f16 {$w0}, low;
            cvt.f32.f16 {$w1}, high;
            }""",
            write_only_types=[Float32, Float32],
            read_only_args=[word],
        )
    return low, high


@cute.jit
def joined(low: Float32, high: Float32, dtype: cutlass.Constexpr):
    """The word of both elements, rounded to nearest."""
    kind = "bf16x2" if cutlass.const_expr(dtype is BFloat16) else "f16x2"
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r1}}, {{$r0}};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )

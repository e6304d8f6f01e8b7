"""float8_e4m3fn in registers: from and to float32, and to the 16 bits of tensor cores."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint8, Uint16, Uint32


@cute.jit
def e4m3(value: Float32):
    """Rounds to nearest and saturates."""
    return Uint8(
        cute.arch.inline_ptx(
            "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};",
            write_only_types=[Uint16],
            read_only_args=[value, Float32(0)],
        )
    )


@cute.jit
def widen(word: Uint32, dtype: cutlass.Constexpr):
    """Converts the four elements of a word to ``dtype``, in two words; exact, NaN included."""
    if cutlass.const_expr(dtype is BFloat16):
        low, high = cute.arch.inline_ptx(
            """{
            .reg .b16 l, h, x0, x1, x2, x3;
            .reg .b32 low, high;
            .reg .f32 y0, y1, y2, y3;
            mov.b32 {l, h}, {$r0};
            cvt.rn.f16x2.e4m3x2 low, l;
            cvt.rn.f16x2.e4m3x2 high, h;
            mov.b32 {x0, x1}, low;
            mov.b32 {x2, x3}, high;
            cvt.f32.f16 y0, x0;
            cvt.f32.f16 y1, x1;
            cvt.f32.f16 y2, x2;
            cvt.f32.f16 y3, x3;
            cvt.rn.bf16x2.f32 {$w0}, y1, y0;
            cvt.rn.bf16x2.f32 {$w1}, y3, y2;
            }""",
            write_only_types=[Uint32, Uint32],
            read_only_args=[word],
        )
    else:
        low, high = cute.arch.inline_ptx(
            """{
            .reg .b16 l, h;
            mov.b32 {l, h}, {$r0};
            cvt.rn.f16x2.e4m3x2 {$w0}, l;
            cvt.rn.f16x2.e4m3x2 {$w1}, h;
            }""",
            write_only_types=[Uint32, Uint32],
            read_only_args=[word],
        )
    return low, high


@cute.jit
def even_odd(first: Uint32, second: Uint32):
    """Bytes 0 and 2 of both words in one word, bytes 1 and 3 in another."""
    return cute.arch.inline_ptx(
        """{
        prmt.b32 {$w0}, {$r0}, {$r1}, 0x6420;
        prmt.b32 {$w1}, {$r0}, {$r1}, 0x7531;
        }""",
        write_only_types=[Uint32, Uint32],
        read_only_args=[first, second],
    )


@cute.jit
def to_float(element: Uint8):
    """Converts one element by way of float16, which holds all values."""
    return cute.arch.inline_ptx(
        """{
        .reg .b32 pair;
        .reg .b16 low, high;
        cvt.rn.f16x2.e4m3x2 pair, {$r0};
        mov.b32 {low, high}, pair;
        cvt.f32.f16 {$w0}, low;
        }""",
        write_only_types=[Float32],
        read_only_args=[Uint16(element)],
    )

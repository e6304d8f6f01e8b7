"""What may happen before and while rows become codes: sums of squares, a transform, random bits."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32

from kernelcat.kernels.cute.common.fp4 import reciprocal, scale_place
from kernelcat.kernels.cute.common.quantize import divide

HADAMARD = 16
ROUNDS = 10


def _philox() -> str:
    """Philox-4x32-10 (Salmon et al., SC 2011) of a counter {c0, c1, 0, 0}."""
    lines = [
        ".reg .b32 c0, c1, c2, c3, k0, k1, a, b;",
        "mov.b32 c0, {$r2};", "mov.b32 c1, {$r3};", "mov.b32 c2, 0;", "mov.b32 c3, 0;",
        "mov.b32 k0, {$r0};", "mov.b32 k1, {$r1};",
    ]  # fmt: skip
    for _ in range(ROUNDS):
        lines += [
            "mul.hi.u32 a, c0, 0xD2511F53;", "mul.hi.u32 b, c2, 0xCD9E8D57;",
            "xor.b32 b, b, c1;", "xor.b32 b, b, k0;", "xor.b32 a, a, c3;", "xor.b32 a, a, k1;",
            "mul.lo.u32 c3, c0, 0xD2511F53;", "mul.lo.u32 c1, c2, 0xCD9E8D57;",
            "mov.b32 c0, b;", "mov.b32 c2, a;",
            "add.u32 k0, k0, 0x9E3779B9;", "add.u32 k1, k1, 0xBB67AE85;",
        ]  # fmt: skip
    lines += [f"mov.b32 {{$w{i}}}, c{i};" for i in range(4)]
    return "{\n" + "\n".join(lines) + "\n}"


PHILOX = _philox()


@cute.jit
def random_words(mSeed: cute.Tensor, place: Int64):
    """Four words of eight elements' place: two elements a word, each the highest 9 of its 16 bits.

    Sixteen elements share a counter, and two of them 16 bits: the low 9 and the high 9 of these.
    """
    group = place // 2
    first, second, third, fourth = cute.arch.inline_ptx(
        PHILOX,
        write_only_types=[Uint32] * 4,
        read_only_args=[mSeed[0], mSeed[1], Uint32(group), Uint32(group >> 32)],
    )
    if place % 2 == 1:
        first, second = third, fourth
    words = cute.make_rmem_tensor(4, Uint32)
    for i, word in enumerate((first, second)):
        words[2 * i] = ((word & 0x1FF) << 7) | ((word & 0xFF80) << 16)
        words[2 * i + 1] = (((word >> 16) & 0x1FF) << 7) | (word & Uint32(0xFF800000))
    return words


@cute.jit
def round_to_halves(y: cute.Tensor):
    """Leaves nine bits below a code, in place: 2^-14 times a value becomes a float16."""
    for i in cutlass.range_constexpr(cute.size(y)):
        y[i] = cute.arch.inline_ptx(
            """{
            .reg .f32 small;
            .reg .b16 half;
            mul.rn.f32 small, {$r0}, 0f38800000;
            cvt.rn.f16.f32 half, small;
            cvt.f32.f16 small, half;
            mul.rn.f32 {$w0}, small, 0f46800000;
            }""",
            write_only_types=[Float32],
            read_only_args=[y[i]],
        )


@cute.jit
def butterflies(h: cute.Tensor, step: cutlass.Constexpr):
    """Sums and differences of elements ``step`` apart, in place."""
    for i in cutlass.range_constexpr(cute.size(h)):
        if cutlass.const_expr(i & step == 0):
            first, second = h[i], h[i + step]
            h[i] = first + second
            h[i + step] = first - second


@cute.jit
def rotate(h: cute.Tensor, mSigns: cute.Tensor, lane: Int32):
    """The transform of the 16 elements that a lane and its neighbour have, in place."""
    second = lane % 2
    for i in cutlass.range_constexpr(HADAMARD // 2):
        h[i] = h[i] * mSigns[second * (HADAMARD // 2) + i]
    for step in cutlass.range_constexpr(3):
        butterflies(h, 1 << step)
    for i in cutlass.range_constexpr(HADAMARD // 2):
        own = h[i]
        other = cute.arch.shuffle_sync_bfly(own, 1)
        turned = own + other
        if second == 1:
            turned = other - own
        h[i] = turned * Float32(0.25)


@cute.jit
def neighbours_sum(values: cute.Tensor):
    """Of 2^n values: neighbours first, then neighbouring sums. Overwrites them."""
    size = cute.size(values)
    for level in cutlass.range_constexpr(1, size.bit_length()):
        for i in cutlass.range_constexpr(size >> level):
            values[i] = values[2 * i] + values[2 * i + 1]
    return values[0]


@cute.jit
def lanes_sum(value: Float32):
    """The same over the lanes of a warp, which all get it."""
    for level in cutlass.range_constexpr(5):
        value = value + cute.arch.shuffle_sync_bfly(value, 1 << level)
    return value


@cute.jit
def inverse_root(total: Float32, k: Int32, eps: Float32):
    """What a row is multiplied by: 1 / sqrt(total / k + eps), every step rounded to nearest."""
    root = cute.arch.inline_ptx(
        "sqrt.rn.f32 {$w0}, {$r0};",
        write_only_types=[Float32],
        read_only_args=[divide(total, Float32(k)) + eps],
    )
    return reciprocal(root)


@cute.jit
def clear_padding(
    mS: cute.Tensor,  # bytes of swizzled scales
    m: Int32,
    num_cols: Int32,
    index: Int64,
    stride: Int64,
):
    """Zeros below and beside (m, num_cols) scales, by thread ``index`` of ``stride``."""
    rows, cols = Int64(cute.ceil_div(m, 128) * 128), cute.ceil_div(num_cols, 4) * 4
    below, spare = (rows - m) * cols, cols - num_cols
    end, i = below + Int64(m) * spare, index
    while i < end:
        width, first_row, first_col, j = cols, Int64(m), Int32(0), i
        if i >= below:
            width, first_row, first_col, j = spare, Int64(0), num_cols, i - below
        row = first_row + j // width
        col = first_col + Int32(j - j // width * width)
        mS[scale_place(row, col, num_cols, True)] = Uint8(0)
        i = i + stride

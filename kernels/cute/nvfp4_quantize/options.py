"""Options of quantization: RMSNorm's sums, the Hadamard transform, random bits, cleared padding."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32

from kernelcat.kernels.cute.common.fp4 import reciprocal, scale_offset
from kernelcat.kernels.cute.common.quantize import divide

HADAMARD = 16
"""Elements that the transform mixes."""
ROUNDS = 10


def _philox() -> str:
    """PTX of Philox-4x32-10 (Salmon et al., SC 2011): four random words of a counter.

    The key is operands 0 and 1, the counter operands 2 and 3 and two zeros.
    """
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
def random_words(
    mSeed: cute.Tensor,  # (2,)
    word_idx: Int64,
):
    """Random bits for the eight elements of word ``word_idx`` of q: four words, two elements each.

    An element has nine bits, the highest of its half of a word. Sixteen elements share a call of
    Philox. Two elements share 16 random bits: one has the low nine of them, the other the high
    nine.
    """
    counter = word_idx // 2
    first, second, third, fourth = cute.arch.inline_ptx(
        PHILOX,
        write_only_types=[Uint32] * 4,
        read_only_args=[mSeed[0], mSeed[1], Uint32(counter), Uint32(counter >> 32)],
    )
    if word_idx % 2 == 1:
        first, second = third, fourth
    words = cute.make_rmem_tensor(4, Uint32)
    for i, word in enumerate((first, second)):
        words[2 * i] = ((word & 0x1FF) << 7) | ((word & 0xFF80) << 16)
        words[2 * i + 1] = (((word >> 16) & 0x1FF) << 7) | (word & Uint32(0xFF800000))
    return words


@cute.jit
def round_to_float16(
    y: cute.Tensor,  # (any number of) float32, overwritten
):
    """Round y to nine bits below a code: 2^-14 times a value is rounded to float16 and back."""
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
def butterflies(
    h: cute.Tensor,  # (2^n,) float32, overwritten
    step: cutlass.Constexpr,
):
    """Replace elements ``step`` apart by their sum and difference.

    Steps of 1, 2, 4 and 8 are the transform of 16 elements.
    """
    for i in cutlass.range_constexpr(cute.size(h)):
        if cutlass.const_expr(i & step == 0):
            first, second = h[i], h[i + step]
            h[i] = first + second
            h[i + step] = first - second


@cute.jit
def transform(
    h: cute.Tensor,  # (8,) float32, overwritten
    mSigns: cute.Tensor,  # (16,)
    lane: Int32,
):
    """The Hadamard transform of the 16 elements that an even lane and the next lane hold."""
    is_odd = lane % 2
    for i in cutlass.range_constexpr(HADAMARD // 2):
        h[i] = h[i] * mSigns[is_odd * (HADAMARD // 2) + i]
    for step in cutlass.range_constexpr(3):
        butterflies(h, 1 << step)
    for i in cutlass.range_constexpr(HADAMARD // 2):
        mine = h[i]
        other = cute.arch.shuffle_sync_bfly(mine, 1)
        value = mine + other
        if is_odd == 1:
            value = other - mine
        h[i] = value * Float32(0.25)


@cute.jit
def tree_sum(
    values: cute.Tensor,  # (2^n,) float32, overwritten
):
    """The sum of all values: first of neighbours, then of neighbouring sums, and so on."""
    size = cute.size(values)
    for level in cutlass.range_constexpr(1, size.bit_length()):
        for i in cutlass.range_constexpr(size >> level):
            values[i] = values[2 * i] + values[2 * i + 1]
    return values[0]


@cute.jit
def warp_sum(value: Float32):
    """The sum of ``value`` over the lanes of a warp in the order of ``tree_sum``, in all lanes."""
    for level in cutlass.range_constexpr(5):
        value = value + cute.arch.shuffle_sync_bfly(value, 1 << level)
    return value


@cute.jit
def inverse_rms(squares_sum: Float32, k: Int32, eps: Float32):
    """1 / sqrt(squares_sum / k + eps), every operation rounded to nearest."""
    root = cute.arch.inline_ptx(
        "sqrt.rn.f32 {$w0}, {$r0};",
        write_only_types=[Float32],
        read_only_args=[divide(squares_sum, Float32(k)) + eps],
    )
    return reciprocal(root)


@cute.jit
def clear_padding(
    mS: cute.Tensor,  # bytes of swizzled scales
    m: Int32,
    num_cols: Int32,
    thread: Int64,
    num_threads: Int64,
):
    """Write zeros below and beside (m, num_cols) scales, as one of ``num_threads`` threads."""
    rows, cols = Int64(cute.ceil_div(m, 128) * 128), cute.ceil_div(num_cols, 4) * 4
    num_below, cols_beside = (rows - m) * cols, cols - num_cols
    end, i = num_below + Int64(m) * cols_beside, thread
    while i < end:
        width, first_row, first_col, j = cols, Int64(m), Int32(0), i
        if i >= num_below:
            width, first_row, first_col, j = cols_beside, Int64(0), num_cols, i - num_below
        row = first_row + j // width
        col = first_col + Int32(j - j // width * width)
        mS[scale_offset(row, col, num_cols, True)] = Uint8(0)
        i = i + num_threads

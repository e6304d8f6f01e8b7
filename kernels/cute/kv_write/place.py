"""Where new tokens go: their sequences, positions and slots; and one value as float8_e4m3fn."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16

LANES = 32


@cute.jit
def sequence_of(token: Int32, mStarts: cute.Tensor, batch: Int32):
    """The last sequence that begins no later; the warp looks at 32 beginnings at once.

    All lanes of the warp have the same token.
    """
    lane, first, count = cute.arch.lane_idx(), Int32(0), batch
    while count > 1:
        step = cute.ceil_div(count, LANES)
        offset = lane * step
        start = mStarts[first + cutlass.min(offset, count - 1)]
        begun = cute.arch.vote_ballot_sync((offset < count) & (start <= token))
        last = cute.arch.popc(begun) - 1
        first += last * step
        count = cutlass.min(step, count - last * step)
    return first


@cute.jit
def position_of(token: Int32, seq: Int32, mLens: cute.Tensor, mStarts: cute.Tensor):
    """Of a token of sequence ``seq``."""
    return mLens[seq] - mStarts[seq + 1] + token


@cute.jit
def slot_of(page: Int32, position: Int32, page_size: cutlass.Constexpr):
    """Among the slots of all pages; its offset in elements needs 64 bits."""
    return Int64(page) * page_size + position % page_size


@cute.jit
def inverse_of(mS: cute.Tensor, page: Int32, head: Int32, scales: cutlass.Constexpr):
    """What a head's keys or values are multiplied by; ``mS`` is (kv_heads, pages)."""
    inverse = Float32(1)
    if cutlass.const_expr(scales == "page"):
        inverse = 1 / mS[head, page]
    elif cutlass.const_expr(scales == "tensor"):
        inverse = 1 / mS[head, 0]
    return inverse


@cute.jit
def e4m3(value: Float32):
    """Rounded to nearest and saturating."""
    return Uint8(
        cute.arch.inline_ptx(
            "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};",
            write_only_types=[Uint16],
            read_only_args=[value, Float32(0)],
        )
    )

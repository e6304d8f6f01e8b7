"""Where a token is: its sequence, its position in the sequence, and its slot in a paged cache."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

LANES = 32


@cute.jit
def sequence_of(
    token: Int32,
    mStarts: cute.Tensor,  # (batch + 1,), ascending: the first token of each sequence
    batch: Int32,
):
    """The last sequence that starts no later than ``token``.

    All lanes of the warp have the same token, and compare 32 entries of ``mStarts`` at once.
    """
    lane, first, count = cute.arch.lane_idx(), Int32(0), batch
    while count > 1:
        step = cute.ceil_div(count, LANES)
        offset = lane * step
        start = mStarts[first + cutlass.min(offset, count - 1)]
        has_started = cute.arch.vote_ballot_sync((offset < count) & (start <= token))
        last = cute.arch.popc(has_started) - 1
        first += last * step
        count = cutlass.min(step, count - last * step)
    return first


@cute.jit
def position_of(
    token: Int32,  # a new token of sequence ``seq``
    seq: Int32,
    mLens: cute.Tensor,  # (batch,): tokens of each sequence, new ones included
    mStarts: cute.Tensor,  # (batch + 1,)
):
    """The position of a token in its sequence, whose new tokens are its last ones."""
    return mLens[seq] - mStarts[seq + 1] + token


@cute.jit
def slot_of(page: Int32, position: Int32, page_size: cutlass.Constexpr):
    """Index among the slots of all pages, in 64 bits, which its offset in elements needs."""
    return Int64(page) * page_size + position % page_size

"""One step of the online softmax on accumulators; the row max rises only where it must."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernelcat.kernels.cute.common.online_softmax import exp2

ROWS = 2
"""Rows of a thread, eight atile_sum."""
HEADROOM = 8.0
"""A weight may reach 2^HEADROOM old_max sums are rescaled, as in FlashAttention-4."""


@cute.jit
def mask(
    acc: cute.Tensor,  # ((2, 2), columns / 8): scores
    last_visible: cute.Tensor,  # (ROWS,): position of the last token a row sees
    token: Int32,  # position of the first column
    columns: cutlass.Constexpr[int],
):
    """Sets the scores of tokens that a row does not see to -inf."""
    first = token + cute.arch.lane_idx() % 4 * 2
    for half in cutlass.range_constexpr(ROWS):
        limit = last_visible[half] - first
        for j in cutlass.range_constexpr(columns // 8):
            for c in cutlass.range_constexpr(2):
                at = 4 * j + 2 * half + c
                is_hidden = 8 * j + c > limit
                acc[at] = Float32(cutlass.select_(is_hidden, Float32(-Float32.inf), acc[at]))


@cute.jit
def online(
    acc: cute.Tensor,  # ((2, 2), columns / 8): scores, overwritten by weights
    row_max: cute.Tensor,  # (ROWS,): weights and sums are relative to 2^row_max
    row_sum: cute.Tensor,  # (ROWS,): of this thread's weights
    factor: cute.Tensor,  # (ROWS,), written: sums of values must be multiplied by it
    scale: Float32,
    columns: cutlass.Constexpr[int],
):
    """Makes weights 2^(scale * score - row_max) of scores; four neighbouring lanes hold a row."""
    for half in cutlass.range_constexpr(ROWS):
        tile_max = -Float32.inf
        for j in cutlass.range_constexpr(columns // 8):
            for c in cutlass.range_constexpr(2):
                tile_max = cute.arch.fmax(tile_max, acc[4 * j + 2 * half + c])
        tile_max = cute.arch.warp_reduction_max(tile_max, threads_in_group=4) * scale
        old_max = row_max[half]
        row_max[half] = Float32(cutlass.select_(tile_max > old_max + HEADROOM, tile_max, old_max))
        factor[half] = exp2(old_max - row_max[half])
        tile_sum = Float32(0)
        for j in cutlass.range_constexpr(columns // 8):
            for c in cutlass.range_constexpr(2):
                at = 4 * j + 2 * half + c
                acc[at] = exp2(acc[at] * scale - row_max[half])
                tile_sum += acc[at]
        row_sum[half] = row_sum[half] * factor[half] + tile_sum

"""A step of the online softmax on accumulators, whose maximum moves only when it must."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernelcat.kernels.cute.common.online_softmax import exp2

ROWS = 2
"""Of a thread, eight apart."""
HEADROOM = 8.0
"""Powers of two that a weight may exceed 1 by before sums are rescaled, as in FlashAttention-4."""


@cute.jit
def hide(acc: cute.Tensor, limits: cute.Tensor, token: Int32, columns: cutlass.Constexpr[int]):
    """-inf for what a row does not see; ``acc`` is ((2, 2), columns / 8), as all are here."""
    first = token + cute.arch.lane_idx() % 4 * 2
    for half in cutlass.range_constexpr(ROWS):
        limit = limits[half] - first
        for j in cutlass.range_constexpr(columns // 8):
            for c in cutlass.range_constexpr(2):
                at = 4 * j + 2 * half + c
                hidden = 8 * j + c > limit
                acc[at] = Float32(cutlass.select_(hidden, Float32(-Float32.inf), acc[at]))


@cute.jit
def online(
    acc: cute.Tensor,  # scores, made weights
    most: cute.Tensor,  # (ROWS,): log2 of what sums are relative to
    total: cute.Tensor,  # (ROWS,): of this thread's weights
    factor: cute.Tensor,  # (ROWS,), written: what sums of values are to be multiplied by
    scale: Float32,
    columns: cutlass.Constexpr[int],
):
    """Weights, 2^(scale * score - most); four lanes side by side have a row."""
    for half in cutlass.range_constexpr(ROWS):
        largest = -Float32.inf
        for j in cutlass.range_constexpr(columns // 8):
            for c in cutlass.range_constexpr(2):
                largest = cute.arch.fmax(largest, acc[4 * j + 2 * half + c])
        largest = cute.arch.warp_reduction_max(largest, threads_in_group=4) * scale
        before = most[half]
        most[half] = Float32(cutlass.select_(largest > before + HEADROOM, largest, before))
        factor[half] = exp2(before - most[half])
        part = Float32(0)
        for j in cutlass.range_constexpr(columns // 8):
            for c in cutlass.range_constexpr(2):
                at = 4 * j + 2 * half + c
                acc[at] = exp2(acc[at] * scale - most[half])
                part += acc[at]
        total[half] = total[half] * factor[half] + part

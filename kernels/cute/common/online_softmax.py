"""The online softmax in base 2: logits, exponentials, and what normalizes a finished row.

A row max starts at ``LOWEST``, which is finite: a row without visible keys keeps a row sum of 0.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
LOWEST = -1e30


@cute.jit
def exp2(x: Float32):
    """The hardware's 2^x, within 2 units in the last place."""
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def logit(score: Float32, scale: Float32, softcap: Float32, has_softcap: cutlass.Constexpr[bool]):
    """log2(e) times the score (the product of a query and a key), scaled and perhaps capped."""
    if cutlass.const_expr(has_softcap):
        z = softcap * LOG2E * cute.math.tanh(score * scale / softcap)
    else:
        z = score * (scale * LOG2E)
    return z


@cute.jit
def finish(row_max: Float32, row_sum: Float32, sink: Float32, has_sink: cutlass.Constexpr[bool]):
    """The factor that normalizes a row's weighted sum of values, and the row's log-sum-exp.

    ``row_max`` is in base 2, the log-sum-exp is natural. They are 0 and -inf for a row without
    visible keys or a sink.
    """
    rescale = Float32(1)
    if cutlass.const_expr(has_sink):
        old_max = row_max
        row_max = cute.arch.fmax(row_max, sink * LOG2E)
        rescale = exp2(old_max - row_max)
        row_sum = row_sum * rescale + exp2(sink * LOG2E - row_max)
    factor, lse = Float32(0), -Float32.inf
    if row_sum > 0:
        factor = rescale * cute.arch.rcp_approx(row_sum)
        lse = (row_max + cute.math.log2(row_sum, fastmath=True)) * LN2
    return factor, lse

"""Softmax in base 2: logits, and what becomes of maximum, sum and value at the end.

A maximum starts at ``LOWEST``, which is finite: a row that sees nothing then keeps a sum of 0.
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
def logit(score: Float32, scale: Float32, softcap: Float32, capped: cutlass.Constexpr[bool]):
    """log2(e) times the scaled, and perhaps capped, product of a query and a key."""
    if cutlass.const_expr(capped):
        z = softcap * LOG2E * cute.math.tanh(score * scale / softcap)
    else:
        z = score * (scale * LOG2E)
    return z


@cute.jit
def finish(most: Float32, total: Float32, sink: Float32, has_sink: cutlass.Constexpr[bool]):
    """What the sum of values is multiplied by, and the log of the denominator."""
    sum_scale = Float32(1)
    if cutlass.const_expr(has_sink):
        before = most
        most = cute.arch.fmax(most, sink * LOG2E)
        sum_scale = exp2(before - most)
        total = total * sum_scale + exp2(sink * LOG2E - most)
    factor, lse = Float32(0), -Float32.inf
    if total > 0:
        factor = sum_scale * cute.arch.rcp_approx(total)
        lse = (most + cute.math.log2(total, fastmath=True)) * LN2
    return factor, lse

"""How much a part counts, by its log-sum-exp, and what becomes of the sums at the end.

Logs are natural; only differences of them are scaled to base 2, so that large ones stay exact.
A maximum starts at ``LOWEST``, which is finite: a part at -inf then weighs 0.
"""

import cutlass.cute as cute
from cutlass import Float32

from kernelcat.kernels.cute.paged_attn.softmax import LN2, LOG2E, exp2


@cute.jit
def exp(x: Float32):
    """e^x of a difference, which is at most 0."""
    return exp2(x * LOG2E)


@cute.jit
def finish(most: Float32, total: Float32):
    """What the sum of values is multiplied by, and the log of all weights; 0 and -inf of none."""
    factor, lse = Float32(0), -Float32.inf
    if total > 0:
        factor = cute.arch.rcp_approx(total)
        lse = most + cute.math.log2(total, fastmath=True) * LN2
    return factor, lse

"""The weights by which the parts of a row are added up: e^(lse - the largest lse so far).

Log-sum-exps (lses) are natural. Only differences of lses are converted to base 2, so that large
lses stay exact. The largest lse starts at ``LOWEST``, which is finite: the weight of a part with an
lse of -inf, which had no visible key, is then 0.
"""

import cutlass.cute as cute
from cutlass import Float32

from kernelcat.kernels.cute.common.online_softmax import LN2, LOG2E, exp2


@cute.jit
def exp(x: Float32):
    """e^x for a difference x of two lses, which is at most 0."""
    return exp2(x * LOG2E)


@cute.jit
def finish(max_lse: Float32, weight_sum: Float32):
    """The factor that normalizes a weighted sum of parts, and the row's lse.

    They are 0 and -inf where no part had a visible key.
    """
    factor, lse = Float32(0), -Float32.inf
    if weight_sum > 0:
        factor = cute.arch.rcp_approx(weight_sum)
        lse = max_lse + cute.math.log2(weight_sum, fastmath=True) * LN2
    return factor, lse

"""The online softmax of attention: a running maximum and a running sum for each row.

Scores are multiplied by log2(e) beforehand, so that exp2 serves and maxima are in units of log2.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
MIN_SCORE = tl.constexpr(-1.0e30)
"""The score of a key that is not visible, and the maximum of a row that has no visible key.

It is finite, so that the difference of two maxima is never NaN.
"""


@triton.jit
def finish_softmax(row_max, row_sum):
    """The softmax's denominator and the log-sum-exp of rows; 1 and -inf without a visible key."""
    has_keys = row_sum > 0.0
    row_sum = tl.where(has_keys, row_sum, 1.0)
    return row_sum, tl.where(has_keys, (row_max + tl.log2(row_sum)) * LN2, float("-inf"))

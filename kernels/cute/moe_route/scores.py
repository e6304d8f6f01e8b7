"""What experts are selected by, and the numerators of their weights."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernelcat.kernels.cute.common.online_softmax import LOG2E, exp2


class Score:
    """The scores of one problem; ``score`` and ``correction`` are axes of `moe_route`."""

    def __init__(self, score: str, correction: bool):
        self.is_softmax, self.correction = score == "softmax", correction

    @cute.jit
    def correction_of(
        self,
        mCorrection: cute.Tensor,  # (experts,)
        expert: Int32,
    ):
        """What is added before the selection; 0 where there is no correction."""
        correction = Float32(0)
        if cutlass.const_expr(self.correction):
            correction = mCorrection[expert]
        return correction

    @cute.jit
    def of_selection(self, logit: Float32, correction: Float32):
        """The selection score before the limit to groups."""
        score = logit
        if cutlass.const_expr(not self.is_softmax):
            score = sigmoid(logit) + correction
        return score

    @cute.jit
    def of_weight(self, logit: Float32, max_logit: Float32):
        """The numerator of a weight; ``max_logit`` is the token's largest logit."""
        if cutlass.const_expr(self.is_softmax):
            numerator = exp2((logit - max_logit) * LOG2E)
        else:
            numerator = sigmoid(logit)
        return numerator


@cute.jit
def sigmoid(logit: Float32):
    """1 / (1 + exp(-logit)); 0 for -inf."""
    return cute.arch.rcp_approx(1.0 + exp2(logit * -LOG2E))


def sigmoids(logits: list):
    """`sigmoid` of each, one step after another for all of them."""
    powers = [exp2(logit * -LOG2E) for logit in logits]
    return [cute.arch.rcp_approx(1.0 + power) for power in powers]


@cute.jit
def is_better(score: Float32, idx: Int32, other_score: Float32, other_idx: Int32):
    """Whether an expert or group stands before another: ties go to the lower index."""
    return (score > other_score) | ((score == other_score) & (idx < other_idx))

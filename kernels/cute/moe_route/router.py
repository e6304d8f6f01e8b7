"""The experts of one token, by a thread block whose threads are experts.

An expert's rank in a token is the number of experts that are better. So the token's slot number r
goes to the expert of rank r.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from kernelcat.kernels.cute.moe_route.scores import Score, is_better

THREADS = 512
"""One for each of at most 512 experts."""
MAX_TOP_K = 16


class Router:
    """Scores and weights. ``score``, ``correction`` and ``renormalize`` are axes of `moe_route`.

    ``limited`` is whether a token may use some groups of experts only.
    """

    def __init__(self, score: str, correction: bool, renormalize: bool, limited: bool):
        self.score = Score(score, correction)
        self.renormalize, self.limited = renormalize, limited

    def allocate(self):
        """Shared memory: logits and selection scores of a token, and its experts."""
        shared = SmemAllocator()
        return (
            shared.allocate_tensor(Float32, cute.make_layout(THREADS)),
            shared.allocate_tensor(Float32, cute.make_layout(THREADS)),
            shared.allocate_tensor(Int32, cute.make_layout(MAX_TOP_K)),
        )

    @cute.jit
    def load(
        self,
        gLogits: cute.Tensor,  # (experts,), of the token
        mCorrection: cute.Tensor,  # (experts,)
        sLogits: cute.Tensor,  # (THREADS,), written
        sScores: cute.Tensor,  # (THREADS,), written: -inf for experts the token may not use
        group_size: Int32,
        top_groups: Int32,
    ):
        """Loads a token's logits and computes its selection scores."""
        expert, experts = cute.arch.thread_idx()[0], cute.size(gLogits)
        if expert < experts:
            logit = Float32(gLogits[expert])
            sLogits[expert] = logit
            correction = self.score.correction_of(mCorrection, expert)
            sScores[expert] = self.score.of_selection(logit, correction)
        cute.arch.barrier()
        if cutlass.const_expr(self.limited):
            is_outside = Int32(0)
            if expert < experts:
                group, num_better = expert // group_size, Int32(0)
                group_score = best_two(sScores, group, group_size)
                for other in cutlass.range(experts // group_size, unroll=1):
                    other_score = best_two(sScores, other, group_size)
                    if is_better(other_score, other, group_score, group):
                        num_better += 1
                is_outside = Int32(num_better >= top_groups)
            cute.arch.barrier()
            if is_outside == 1:
                sScores[expert] = -Float32.inf
            cute.arch.barrier()

    @cute.jit
    def weigh(
        self,
        sLogits: cute.Tensor,  # (THREADS,)
        sExperts: cute.Tensor,  # (MAX_TOP_K,): experts of the token, some of which may be -1
        gWeights: cute.Tensor,  # (top_k,), of the token, written
        experts: Int32,
        scaling: Float32,
    ):
        """Stores the weights of a token, one by each of the first threads."""
        slot, top_k = cute.arch.thread_idx()[0], cute.size(gWeights)
        if slot < top_k:
            max_logit = -Float32.inf
            for expert in cutlass.range(experts, unroll=1):
                max_logit = cute.arch.fmax(max_logit, sLogits[expert])
            total = Float32(1)
            if cutlass.const_expr(self.renormalize):
                total = Float32(1e-20)
                for i in cutlass.range(top_k, unroll=1):
                    if sExperts[i] >= 0:
                        total += self.score.of_weight(sLogits[sExperts[i]], max_logit)
            elif cutlass.const_expr(self.score.is_softmax):
                total = Float32(0)
                for expert in cutlass.range(experts, unroll=1):
                    total += self.score.of_weight(sLogits[expert], max_logit)
            weight = Float32(0)
            if sExperts[slot] >= 0:
                numerator = self.score.of_weight(sLogits[sExperts[slot]], max_logit)
                weight = numerator / total * scaling
            gWeights[slot] = weight


@cute.jit
def rows_of(pointer: cute.Pointer, cols: Int32, rows: Int32):
    """(cols, rows) of a row-major array (rows, cols)."""
    return cute.make_tensor(pointer, cute.make_layout((cols, rows), stride=(1, Int64(cols))))


@cute.jit
def rank_of(
    sScores: cute.Tensor,  # (THREADS,)
    expert: Int32,
    experts: Int32,
):
    """How many experts are better."""
    rank = Int32(0)
    for other in cutlass.range(experts, unroll=1):
        if is_better(sScores[other], other, sScores[expert], expert):
            rank += 1
    return rank


@cute.jit
def best_two(
    sScores: cute.Tensor,  # (THREADS,)
    group: Int32,
    group_size: Int32,
):
    """The sum of the two best scores of a group, or its only score."""
    best, second = -Float32.inf, -Float32.inf
    for i in cutlass.range(group_size, unroll=1):
        score = sScores[group * group_size + i]
        second = cute.arch.fmax(second, cute.arch.fmin(best, score))
        best = cute.arch.fmax(best, score)
    total = best
    if group_size > 1:
        total = best + second
    return total

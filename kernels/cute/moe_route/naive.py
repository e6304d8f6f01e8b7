"""Routing without tricks, in three kernels: logits, the selection, and places of assignments.

A thread stands for an expert. An expert's rank in a token is the number of experts that are better,
so the token's slot number r goes to the expert of rank r.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from kernelcat.kernels.cute.moe_route.scores import Score, is_better

THREADS = 512
"""One for each of at most 512 experts."""
MAX_TOP_K = 16
LOGIT_THREADS = 128


class Logits:
    """logits = x @ router^T + router_bias, one thread for each logit."""

    def __init__(self, router_bias: bool):
        self.router_bias = router_bias

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # (tokens, hidden)
        router: cute.Pointer,  # (experts, hidden)
        router_bias: cute.Pointer,  # (experts,)
        logits: cute.Pointer,  # (tokens, experts) float32
        tokens: Int32,
        experts: Int32,
        hidden: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            rows_of(x, hidden, tokens),
            rows_of(router, hidden, experts),
            cute.make_tensor(router_bias, cute.make_layout(experts)),
            rows_of(logits, experts, tokens),
        ).launch(
            grid=(tokens, cute.ceil_div(experts, LOGIT_THREADS), 1),
            block=(LOGIT_THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,  # (hidden, tokens)
        mRouter: cute.Tensor,  # (hidden, experts)
        mBias: cute.Tensor,  # (experts,)
        mLogits: cute.Tensor,  # (experts, tokens)
    ):
        token, block, _ = cute.arch.block_idx()
        expert = block * LOGIT_THREADS + cute.arch.thread_idx()[0]
        if expert < mLogits.shape[0]:
            logit = Float32(0)
            for k in cutlass.range(mX.shape[0], unroll=1):
                logit += Float32(mX[k, token]) * Float32(mRouter[k, expert])
            if cutlass.const_expr(self.router_bias):
                logit += Float32(mBias[expert])
            mLogits[expert, token] = logit


class Router:
    """The experts of one token, by a thread block. Flags and ``score`` are axes of `moe_route`.

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


class Select(Router):
    """Experts and weights before the capacity limit, a thread block for each token."""

    @cute.jit
    def __call__(
        self,
        logits: cute.Pointer,  # (tokens, experts)
        correction: cute.Pointer,  # (experts,) float32
        expert_ids: cute.Pointer,  # (tokens, top_k) int32
        weights: cute.Pointer,  # (tokens, top_k) float32
        tokens: Int32,
        experts: Int32,
        top_k: Int32,
        group_size: Int32,
        top_groups: Int32,
        scaling: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            rows_of(logits, experts, tokens),
            cute.make_tensor(correction, cute.make_layout(experts)),
            rows_of(expert_ids, top_k, tokens),
            rows_of(weights, top_k, tokens),
            group_size,
            top_groups,
            scaling,
        ).launch(grid=(tokens, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self,
        mLogits: cute.Tensor,  # (experts, tokens)
        mCorrection: cute.Tensor,  # (experts,)
        mIds: cute.Tensor,  # (top_k, tokens)
        mWeights: cute.Tensor,  # (top_k, tokens)
        group_size: Int32,
        top_groups: Int32,
        scaling: Float32,
    ):
        expert, token = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        experts, top_k = mLogits.shape[0], mIds.shape[0]
        sLogits, sScores, sExperts = self.allocate()
        self.load(mLogits[None, token], mCorrection, sLogits, sScores, group_size, top_groups)
        if expert < experts:
            rank = rank_of(sScores, expert, experts)
            if rank < top_k:
                sExperts[rank] = expert
                mIds[rank, token] = expert
        cute.arch.barrier()
        self.weigh(sLogits, sExperts, mWeights[None, token], experts, scaling)


class Place(Router):
    """The capacity limit and the maps, by one thread block, whose threads are experts.

    Each thread goes over all assignments in their order. ``load`` and ``reroute`` say whether there
    is a load to add to, and whether assignments beyond the capacity are rerouted.
    """

    def __init__(self, load: bool, reroute: bool, **rule: str | bool):
        super().__init__(**rule)
        self.has_load, self.reroute = load, reroute

    @cute.jit
    def __call__(
        self,
        logits: cute.Pointer,  # (tokens, experts)
        correction: cute.Pointer,  # (experts,) float32
        expert_ids: cute.Pointer,  # (tokens, top_k) int32
        weights: cute.Pointer,  # (tokens, top_k) float32
        counts: cute.Pointer,  # (experts,) int32
        offsets: cute.Pointer,  # (experts + 1,) int32
        order: cute.Pointer,  # (tokens * top_k,) int32
        position: cute.Pointer,  # (tokens, top_k) int32
        load: cute.Pointer,  # (experts,) int32
        proposals: cute.Pointer,  # (tokens, top_k) int32
        tokens: Int32,
        experts: Int32,
        top_k: Int32,
        group_size: Int32,
        top_groups: Int32,
        scaling: Float32,
        capacity: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            rows_of(logits, experts, tokens),
            cute.make_tensor(correction, cute.make_layout(experts)),
            rows_of(expert_ids, top_k, tokens),
            rows_of(weights, top_k, tokens),
            cute.make_tensor(counts, cute.make_layout(experts)),
            cute.make_tensor(offsets, cute.make_layout(experts + 1)),
            cute.make_tensor(order, cute.make_layout(tokens * top_k)),
            cute.make_tensor(position, cute.make_layout(tokens * top_k)),
            cute.make_tensor(load, cute.make_layout(experts)),
            rows_of(proposals, top_k, tokens),
            group_size,
            top_groups,
            scaling,
            capacity,
        ).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self,
        mLogits: cute.Tensor,  # (experts, tokens)
        mCorrection: cute.Tensor,  # (experts,)
        mIds: cute.Tensor,  # (top_k, tokens)
        mWeights: cute.Tensor,  # (top_k, tokens)
        mCounts: cute.Tensor,  # (experts,)
        mOffsets: cute.Tensor,  # (experts + 1,)
        mOrder: cute.Tensor,  # (tokens * top_k,)
        mPosition: cute.Tensor,  # (tokens * top_k,)
        mLoad: cute.Tensor,  # (experts,)
        mProposals: cute.Tensor,  # (top_k, tokens)
        group_size: Int32,
        top_groups: Int32,
        scaling: Float32,
        capacity: Int32,
    ):
        expert, experts = cute.arch.thread_idx()[0], cute.size(mCounts)
        num_assignments = cute.size(mOrder)
        gIds = cute.make_tensor(mIds.iterator, mOrder.layout)
        gWeights = cute.make_tensor(mWeights.iterator, mOrder.layout)
        shared = SmemAllocator()
        sServed = shared.allocate_tensor(Int32, cute.make_layout(THREADS))
        sStarts = shared.allocate_tensor(Int32, cute.make_layout(THREADS + 1))

        num_served, num_selected = Int32(0), Int32(0)
        for i in cutlass.range(num_assignments, unroll=1):
            if gIds[i] == expert:
                num_selected += 1
                if num_served < capacity:
                    num_served += 1
                else:
                    gIds[i] = Int32(-1)
                    gWeights[i] = Float32(0)
        if cutlass.const_expr(self.has_load):  # noqa: SIM102  (the DSL's own branch)
            if expert < experts:
                mLoad[expert] += num_selected
        cute.arch.barrier()

        if cutlass.const_expr(self.reroute):
            memory = self.allocate()
            gProposals = cute.make_tensor(mProposals.iterator, mOrder.layout)
            num_proposals = Int32(1)
            while num_proposals > 0:
                sServed[expert] = num_served
                cute.arch.barrier()
                self.propose(
                    mLogits, mCorrection, mIds, mProposals, sServed, memory, group_size,
                    top_groups, capacity,
                )  # fmt: skip
                num_proposals = Int32(0)
                for i in cutlass.range(num_assignments, unroll=1):
                    if gProposals[i] >= 0:
                        num_proposals += 1
                    if gProposals[i] == expert and num_served < capacity:
                        gIds[i] = expert
                        num_served += 1
                cute.arch.barrier()
            self.weigh_all(mLogits, mIds, mWeights, memory, scaling)

        sServed[expert] = num_served
        cute.arch.barrier()
        if expert == 0:
            start = Int32(0)
            for e in cutlass.range(experts, unroll=1):
                sStarts[e] = start
                start += sServed[e]
            sStarts[experts] = start
            mOffsets[experts] = start
        cute.arch.barrier()
        if expert < experts:
            mCounts[expert] = num_served
            mOffsets[expert] = sStarts[expert]
            place = sStarts[expert]
            for i in cutlass.range(num_assignments, unroll=1):
                if gIds[i] == expert:
                    mOrder[place] = i
                    mPosition[i] = place
                    place += 1
        for i in cutlass.range(expert, num_assignments, THREADS, unroll=1):
            if gIds[i] < 0:
                mPosition[i] = Int32(-1)
            if i >= sStarts[experts]:
                mOrder[i] = Int32(-1)

    @cute.jit
    def propose(
        self,
        mLogits: cute.Tensor,  # (experts, tokens)
        mCorrection: cute.Tensor,  # (experts,)
        mIds: cute.Tensor,  # (top_k, tokens): -1 for what is not placed
        mProposals: cute.Tensor,  # (top_k, tokens), written: -1 for what proposes to no expert
        sServed: cute.Tensor,  # (THREADS,)
        memory: tuple,
        group_size: Int32,
        top_groups: Int32,
        capacity: Int32,
    ):
        """One round: the r-th unplaced slot of a token proposes to the open expert of rank r."""
        expert, experts, top_k = cute.arch.thread_idx()[0], mLogits.shape[0], mIds.shape[0]
        sLogits, sScores, _ = memory
        for token in cutlass.range(mIds.shape[1], unroll=1):
            if expert < top_k:
                mProposals[expert, token] = Int32(-1)
            num_unplaced = Int32(0)
            for slot in cutlass.range(top_k, unroll=1):
                if mIds[slot, token] < 0:
                    num_unplaced += 1
            if num_unplaced > 0:
                self.load(
                    mLogits[None, token], mCorrection, sLogits, sScores, group_size, top_groups
                )
                is_open = expert < experts and sServed[expert] < capacity
                for slot in cutlass.range(top_k, unroll=1):
                    if mIds[slot, token] == expert:
                        is_open = False
                if not is_open:
                    sScores[expert] = -Float32.inf
                cute.arch.barrier()
                if sScores[expert] > -Float32.inf:
                    rank, number = rank_of(sScores, expert, experts), Int32(0)
                    for slot in cutlass.range(top_k, unroll=1):
                        if mIds[slot, token] < 0:
                            if number == rank:
                                mProposals[slot, token] = expert
                            number += 1
                cute.arch.barrier()
        cute.arch.barrier()

    @cute.jit
    def weigh_all(
        self,
        mLogits: cute.Tensor,  # (experts, tokens)
        mIds: cute.Tensor,  # (top_k, tokens)
        mWeights: cute.Tensor,  # (top_k, tokens), written
        memory: tuple,
        scaling: Float32,
    ):
        """Stores the weights of all tokens, of the experts that are used finally."""
        expert, experts, top_k = cute.arch.thread_idx()[0], mLogits.shape[0], mIds.shape[0]
        sLogits, _, sExperts = memory
        for token in cutlass.range(mIds.shape[1], unroll=1):
            if expert < experts:
                sLogits[expert] = Float32(mLogits[expert, token])
            if expert < top_k:
                sExperts[expert] = mIds[expert, token]
            cute.arch.barrier()
            self.weigh(sLogits, sExperts, mWeights[None, token], experts, scaling)
            cute.arch.barrier()


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

"""The capacity limit and the maps without tricks: each thread goes over all assignments."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from kernelcat.kernels.cute.moe_route.router import THREADS, Router, rank_of, rows_of


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

"""Routing as in `bitmask`, with another selection: each lane sorts its experts once.

Sizes are compiled in. More than 512 tokens are placed by `place.Place`, the second launch.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.memory import SmemAllocator

from kernelcat.kernels.cute.moe_route import token_masks
from kernelcat.kernels.cute.moe_route.cluster_counts import ClusterCounts
from kernelcat.kernels.cute.moe_route.maps import LANES, Maps
from kernelcat.kernels.cute.moe_route.place import WORD_COUNTS
from kernelcat.kernels.cute.moe_route.sorted_block import SortedBlock
from kernelcat.kernels.cute.moe_route.sorted_rerouting import SortedRerouting


class LateMaps(Maps):
    """Maps whose counts are not stored by the first warp, the only one that may have slots."""

    @cute.jit
    def store(
        self,
        sTotals: cute.Tensor,
        sStarts: cute.Tensor,
        mCounts: cute.Tensor,  # (experts,), written
        mOffsets: cute.Tensor,  # (experts + 1,), written
        capacity: Int32,
    ):
        """Stores counts and offsets: the task of one thread block of the grid."""
        first, experts = cute.arch.thread_idx()[0] - LANES, cute.size(mCounts)
        if first >= 0:
            for e in cutlass.range(first, experts, self.threads - LANES, unroll=1):
                mCounts[e] = cutlass.min(Int32(sTotals[e]), capacity)
                mOffsets[e] = sStarts[e]
        if first == 0:
            mOffsets[experts] = sStarts[self.max_experts]


class Cluster:
    """All tokens in one cluster of ``cluster_size`` thread blocks."""

    def __init__(self, load: bool, reroute: bool, cluster_size: int, **rule: int | str | bool):
        self.block = SortedBlock(**rule)
        max_experts, threads = self.block.max_experts, self.block.threads
        self.maps = LateMaps(max_experts, threads, load)
        self.counts = ClusterCounts(max_experts, threads, cluster_size, num_buffers=1 + reroute)
        self.reroute, self.cluster_size = reroute, cluster_size

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
        tokens: Int32,
        scaling: Float32,
        capacity: Int32,
        stream: cuda.CUstream,
    ):
        assignments, experts = cute.make_layout(tokens * self.block.top_k), self.block.experts
        self.kernel(
            self.block.vectors_of(logits, tokens),
            self.block.corrections_of(correction),
            cute.make_tensor(expert_ids, assignments),
            cute.make_tensor(weights, assignments),
            cute.make_tensor(counts, cute.make_layout(experts)),
            cute.make_tensor(offsets, cute.make_layout(experts + 1)),
            cute.make_tensor(order, assignments),
            cute.make_tensor(position, assignments),
            cute.make_tensor(load, cute.make_layout(experts)),
            scaling,
            capacity,
        ).launch(
            grid=(self.cluster_size, 1, 1),
            block=(self.block.threads, 1, 1),
            cluster=(self.cluster_size, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mLogits: cute.Tensor,  # (vector, experts / vector, tokens)
        mCorrection: cute.Tensor,  # (vector, experts / vector)
        mIds: cute.Tensor,  # (assignments,)
        mWeights: cute.Tensor,  # (assignments,)
        mCounts: cute.Tensor,  # (experts,)
        mOffsets: cute.Tensor,  # (experts + 1,)
        mOrder: cute.Tensor,  # (assignments,)
        mPosition: cute.Tensor,  # (assignments,)
        mLoad: cute.Tensor,  # (experts,)
        scaling: Float32,
        capacity: Int32,
    ):
        self.counts.open()
        shared = SmemAllocator()
        memory = self.block.allocate(shared)
        sMasks, sExperts, sWeights, _ = memory
        sTotals, sEarlier, sStarts = self.maps.allocate(shared)
        sCounts = self.counts.allocate(shared)
        rank, block_tokens = cute.arch.block_idx()[0], self.block.block_tokens
        first_token = rank * block_tokens
        num_tokens = cutlass.min(mLogits.shape[2] - first_token, block_tokens)
        self.block.clear(memory)

        # The kernel before may still be writing the logits; the kernel after may begin.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        self.block.select(mLogits, mCorrection, memory, first_token, num_tokens, scaling)
        self.counts.wait_for_all()
        self.counts.add_up(sMasks, sCounts, sTotals, sEarlier, rank, Int32(0))
        if rank == 0:
            self.maps.add_load(sTotals, mLoad)
        if cutlass.const_expr(self.reroute):
            rerouting = SortedRerouting(self.block, self.counts)
            rerouting.run(
                mLogits, mCorrection, memory, rerouting.allocate(shared), sCounts, sTotals,
                sEarlier, rank, first_token, num_tokens, self.block.top_k, (), scaling,
                capacity,
            )  # fmt: skip
        if cute.arch.warp_idx() == 0:
            self.maps.scan(sTotals, sStarts, self.block.experts, capacity)
        cute.arch.barrier()
        if rank == 0:
            self.maps.store(sTotals, sStarts, mCounts, mOffsets, capacity)
        top_k, tidx = self.block.top_k, cute.arch.thread_idx()[0]
        first_slot = first_token * top_k
        for slot in cutlass.range(tidx, num_tokens * top_k, self.block.threads, unroll=1):
            expert, local_rank = Int32(sExperts[slot]), Int32(0)
            if expert >= 0:
                local_rank = token_masks.rank(sMasks, slot // top_k, expert)
            weight = sWeights[slot]
            is_served = self.maps.place(
                sEarlier, sStarts, mOrder, mPosition, first_slot + slot, expert, local_rank,
                capacity,
            )  # fmt: skip
            if not is_served:
                expert, weight = Int32(-1), Float32(0)
            mIds[first_slot + slot], mWeights[first_slot + slot] = expert, weight


class Select:
    """Selects experts. Leaves what `Place` needs: the rank of an assignment among those of its
    thread block in position, and the thread block's assignments of each expert in block_counts.
    """

    def __init__(self, **rule: int | str | bool):
        self.block = SortedBlock(**rule)

    @cute.jit
    def __call__(
        self,
        logits: cute.Pointer,  # (tokens, experts)
        correction: cute.Pointer,  # (experts,) float32
        expert_ids: cute.Pointer,  # (tokens, top_k) int32
        weights: cute.Pointer,  # (tokens, top_k) float32
        position: cute.Pointer,  # (tokens, top_k) int32
        block_counts: cute.Pointer,  # (num_blocks, max_experts / 4) words of four counts
        tokens: Int32,
        scaling: Float32,
        stream: cuda.CUstream,
    ):
        assignments = cute.make_layout(tokens * self.block.top_k)
        num_blocks = cute.ceil_div(tokens, self.block.block_tokens)
        words = cute.make_layout((self.block.max_experts // WORD_COUNTS, num_blocks))
        self.kernel(
            self.block.vectors_of(logits, tokens),
            self.block.corrections_of(correction),
            cute.make_tensor(expert_ids, assignments),
            cute.make_tensor(weights, assignments),
            cute.make_tensor(position, assignments),
            cute.make_tensor(block_counts, words),
            scaling,
        ).launch(
            grid=(num_blocks, 1, 1), block=(self.block.threads, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mLogits: cute.Tensor,  # (vector, experts / vector, tokens)
        mCorrection: cute.Tensor,  # (vector, experts / vector)
        mIds: cute.Tensor,  # (assignments,)
        mWeights: cute.Tensor,  # (assignments,)
        mPosition: cute.Tensor,  # (assignments,)
        mBlockCounts: cute.Tensor,  # (max_experts / 4, num_blocks)
        scaling: Float32,
    ):
        memory = self.block.allocate(SmemAllocator())
        sMasks, sExperts, sWeights, _ = memory
        tidx, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        first_token = block * self.block.block_tokens
        num_tokens = cutlass.min(mLogits.shape[2] - first_token, self.block.block_tokens)
        self.block.clear(memory)

        # The kernel before may still be writing the logits; the kernel after may begin.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        self.block.select(mLogits, mCorrection, memory, first_token, num_tokens, scaling)
        cute.arch.barrier()
        for i in cutlass.range(tidx, mBlockCounts.shape[0], self.block.threads, unroll=1):
            word = Uint32(0)
            for j in cutlass.range_constexpr(WORD_COUNTS):
                word = word | token_masks.count(sMasks, WORD_COUNTS * i + j) << Uint32(8 * j)
            mBlockCounts[i, block] = word
        top_k = self.block.top_k
        first_slot = first_token * top_k
        for slot in cutlass.range(tidx, num_tokens * top_k, self.block.threads, unroll=1):
            expert = Int32(sExperts[slot])
            mIds[first_slot + slot], mWeights[first_slot + slot] = expert, sWeights[slot]
            mPosition[first_slot + slot] = token_masks.rank(sMasks, slot // top_k, expert)

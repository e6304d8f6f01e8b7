"""The index maps: from each expert's number of assignments to offsets and places."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

LANES = 32


class Maps:
    """What a thread block has to find out about each expert before it places assignments.

    ``has_load`` is whether there is a load to add to. In shared memory are

        sTotals   (max_experts,)      assignments of all tokens, before the capacity limit
        sEarlier  (max_experts,)      those of tokens before the thread block's tokens
        sStarts   (max_experts + 1,)  prefix sums of the totals, which are limited to the capacity
    """

    def __init__(self, max_experts: int, threads: int, has_load: bool):
        self.max_experts, self.threads, self.has_load = max_experts, threads, has_load

    def allocate(self, shared):
        """sTotals, sEarlier and sStarts."""
        sizes = (self.max_experts, self.max_experts, self.max_experts + 1)
        return tuple(shared.allocate_tensor(Int32, cute.make_layout(size)) for size in sizes)

    @cute.jit
    def scan(
        self,
        sTotals: cute.Tensor,
        sStarts: cute.Tensor,  # written
        experts: Int32,
        capacity: Int32,
    ):
        """Computes ``sStarts``; for one warp."""
        lane, per_lane = cute.arch.lane_idx(), self.max_experts // LANES
        counts, total = cute.make_rmem_tensor(per_lane, Int32), Int32(0)
        for i in cutlass.range_constexpr(per_lane):
            expert = lane * per_lane + i
            counts[i] = Int32(0)
            if expert < experts:
                counts[i] = cutlass.min(Int32(sTotals[expert]), capacity)
            total += counts[i]
        end = total
        for power in cutlass.range_constexpr(5):
            before = cute.arch.shuffle_sync_up(end, 1 << power)
            if lane >= 1 << power:
                end += before
        start = end - total
        for i in cutlass.range_constexpr(per_lane):
            sStarts[lane * per_lane + i] = start
            start += counts[i]
        if lane == LANES - 1:
            sStarts[self.max_experts] = end

    @cute.jit
    def add_load(
        self,
        sTotals: cute.Tensor,
        mLoad: cute.Tensor,  # (experts,)
    ):
        """Adds the assignments of all tokens to the load, if there is one."""
        if cutlass.const_expr(self.has_load):
            experts = cute.size(mLoad)
            for e in cutlass.range(cute.arch.thread_idx()[0], experts, self.threads, unroll=1):
                mLoad[e] = mLoad[e] + sTotals[e]

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
        tidx, experts = cute.arch.thread_idx()[0], cute.size(mCounts)
        for e in cutlass.range(tidx, experts, self.threads, unroll=1):
            mCounts[e] = cutlass.min(Int32(sTotals[e]), capacity)
            mOffsets[e] = sStarts[e]
        if tidx == 0:
            mOffsets[experts] = sStarts[self.max_experts]

    @cute.jit
    def place(
        self,
        sEarlier: cute.Tensor,
        sStarts: cute.Tensor,
        mOrder: cute.Tensor,  # (assignments,), written
        mPosition: cute.Tensor,  # (assignments,), written
        assignment: Int32,
        expert: Int32,  # -1 where the assignment is dropped already
        rank: Int32,  # among the thread block's assignments of the expert
        capacity: Int32,
    ):
        """Stores the place of an assignment; returns whether the assignment is served."""
        place = Int32(-1)
        if expert >= 0:
            rank_of_all = sEarlier[expert] + rank
            if rank_of_all < capacity:
                place = sStarts[expert] + rank_of_all
        mPosition[assignment] = place
        if place >= 0:
            mOrder[place] = assignment
        if assignment >= sStarts[self.max_experts]:
            mOrder[assignment] = Int32(-1)
        return place >= 0

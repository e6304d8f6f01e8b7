"""The index maps of the rows that have come: assignments sorted by expert, as grouped products take
them. A warp finds the assignments of an expert in all ids, in their order."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernelcat.kernels.cute.moe_dispatch.arrive import LANES


@cute.jit
def rows_before(
    mCounts: cute.Tensor,  # (ranks * chunks,)
    chunk: Int32,
):
    """The rows of the chunks before ``chunk``; the lanes of a warp call this together."""
    rows = Int32(0)
    for i in cutlass.range(cute.arch.lane_idx(), chunk, LANES, unroll=4):
        rows += mCounts[i]
    return cute.arch.warp_reduction_sum(rows)


class Maps:
    """The maps of ``ranks`` ranks' tokens; the first ``num_ctas`` thread blocks make them."""

    def __init__(self, ranks: int, top_k: int, threads: int):
        self.ranks, self.top_k, self.threads = ranks, top_k, threads

    @cute.jit
    def make(
        self,
        mAll: cute.Tensor,  # (top_k, ranks * tokens): ids
        mNumbers: cute.Tensor,  # (ranks * tokens,)
        mCounts: cute.Tensor,  # (ranks * chunks,)
        mSources: cute.Tensor,  # (ranks + 1,)
        mOffsets: cute.Tensor,  # (local_experts + 1,)
        mOrder: cute.Tensor,  # (ranks * tokens * top_k,)
        mPosition: cute.Tensor,  # (ranks * tokens * top_k,)
        tokens: Int32,
        chunks: Int32,
        local_experts: Int32,
        rank: Int32,
        num_ctas: Int32,
    ):
        tidx, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        lane, expert = tidx % LANES, cta * (self.threads // LANES) + tidx // LANES
        first, size = rank * local_experts, mAll.shape[1] * self.top_k
        lower, total = Int32(0), Int32(0)
        for i in cutlass.range(lane, mAll.shape[1], LANES, unroll=2):
            for k in cutlass.range_constexpr(self.top_k):
                other = mAll[k, i] - first
                if other >= 0 and other < local_experts:
                    total += 1
                    if other < expert:
                        lower += 1
        lower, total = cute.arch.warp_reduction_sum(lower), cute.arch.warp_reduction_sum(total)
        num_rows = rows_before(mCounts, self.ranks * chunks)
        if expert < local_experts:
            if lane == 0:
                mOffsets[expert] = lower
                if expert == local_experts - 1:
                    mOffsets[local_experts] = total
            self.place(
                mAll, mNumbers, mCounts, mOrder, mPosition, tokens, chunks, local_experts, first,
                expert, lower,
            )  # fmt: skip
        if expert == 0:
            for source in cutlass.range_constexpr(self.ranks + 1):
                before = rows_before(mCounts, source * chunks)
                if lane == 0:
                    mSources[source] = before
        index, step = cta * self.threads + tidx, num_ctas * self.threads
        for i in cutlass.range(total + index, size, step, unroll=1):
            mOrder[i] = Int32(-1)
        for i in cutlass.range(num_rows * self.top_k + index, size, step, unroll=1):
            mPosition[i] = Int32(-1)

    @cute.jit
    def place(
        self,
        mAll: cute.Tensor,
        mNumbers: cute.Tensor,
        mCounts: cute.Tensor,
        mOrder: cute.Tensor,
        mPosition: cute.Tensor,
        tokens: Int32,
        chunks: Int32,
        local_experts: Int32,
        first: Int32,  # expert of this rank
        expert: Int32,
        begin: Int32,  # of the expert's assignments
    ):
        """Places the assignments of an expert, a chunk of tokens at a time."""
        lane, num_rows = cute.arch.lane_idx(), Int32(0)
        experts = cute.make_rmem_tensor(self.top_k, Int32)
        for chunk in cutlass.range(self.ranks * chunks, unroll=1):
            token, number, mine = chunk % chunks * LANES + lane, Int32(-1), Int32(0)
            experts.fill(-1)
            if token < tokens:
                row = chunk // chunks * tokens + token
                number = mNumbers[row]
                for k in cutlass.range_constexpr(self.top_k):
                    experts[k] = mAll[k, row] - first
                    if experts[k] == expert:
                        mine += 1
            end = mine
            for step in cutlass.range_constexpr(5):
                before = cute.arch.shuffle_sync_up(end, 1 << step)
                if lane >= 1 << step:
                    end += before
            place, at = begin + end - mine, (num_rows + number) * self.top_k
            for k in cutlass.range_constexpr(self.top_k):
                if experts[k] == expert:
                    mOrder[place] = at + k
                    mPosition[at + k] = place
                    place += 1
                elif expert == 0 and number >= 0 and not 0 <= experts[k] < local_experts:
                    mPosition[at + k] = Int32(-1)
            begin += cute.arch.shuffle_sync(end, LANES - 1)
            num_rows += mCounts[chunk]

"""Which tiles of a grouped product a thread block computes.

Only the device holds the number of rows of each expert, so every thread block finds its tiles from
the offsets. Tiles of expert 0 come first. Tiles of an expert are in grouped order, so that tiles
that are computed at the same time share rows and weights in L2.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernelcat.kernels.cute.common.tile_order import grouped_tile

GROUP_ROWS = 1024
"""Rows of A that make a group in the order of an expert's tiles."""
LANES = 32


class ExpertTiles:
    """Tiles of ``block_m`` rows of an expert x ``block_n`` rows of its weights."""

    def __init__(self, block_m: int, block_n: int):
        self.block_m, self.block_n = block_m, block_n
        self.group_m = max(GROUP_ROWS // block_m, 1)

    @cute.jit
    def load(
        self,
        mOffsets: cute.Tensor,  # (experts + 1,)
        sOffsets: cute.Tensor,  # at least (experts + 1,), written
        sBlocks: cute.Tensor,  # like sOffsets, written: blocks of rows before each expert
        threads: cutlass.Constexpr[int],
    ):
        """Fills the lists in shared memory; all threads of the thread block call this."""
        tidx, experts = cute.arch.thread_idx()[0], cute.size(mOffsets) - 1
        for i in cutlass.range(tidx, experts + 1, threads, unroll=1):
            sOffsets[i] = mOffsets[i]
        cute.arch.barrier()
        if tidx < LANES:
            total = Int32(0)
            for first in cutlass.range(0, experts, LANES, unroll=1):
                expert, blocks = first + tidx, Int32(0)
                if expert < experts:
                    rows = sOffsets[expert + 1] - sOffsets[expert]
                    blocks = cute.ceil_div(rows, self.block_m)
                for i in cutlass.range_constexpr(5):  # sum over the experts of lower lanes
                    lower = cute.arch.shuffle_sync_up(blocks, 1 << i)
                    blocks += lower if tidx >= 1 << i else 0
                if expert < experts:
                    sBlocks[expert + 1] = total + blocks
                total += cute.arch.shuffle_sync(blocks, LANES - 1)
            if tidx == 0:
                sBlocks[0] = 0
        cute.arch.barrier()

    @cute.jit
    def find(
        self,
        index: Int32,  # of a tile that exists
        expert: Int32,  # that of the tile, or a lower one
        sOffsets: cute.Tensor,
        sBlocks: cute.Tensor,
        experts: Int32,
        num_n: Int32,  # tiles side by side
    ):
        """The tile's expert, first row among all rows, number of rows, and first column.

        All lanes of a warp call this together and look at 32 experts at once.
        """
        num_ended = Int32(LANES)
        while num_ended == LANES:
            last = cutlass.min(expert + cute.arch.lane_idx(), experts - 1)
            has_ended = sBlocks[last + 1] * num_n <= index
            num_ended = cute.arch.popc(cute.arch.vote_ballot_sync(has_ended))
            expert += num_ended
        expert = cute.arch.make_warp_uniform(expert)
        first_block = sBlocks[expert]
        num_m = sBlocks[expert + 1] - first_block
        m_idx, n_idx = grouped_tile(index - first_block * num_n, num_m, num_n, self.group_m)
        row = sOffsets[expert] + m_idx * self.block_m
        num_rows = cutlass.min(sOffsets[expert + 1] - row, self.block_m)
        return expert, row, num_rows, n_idx * self.block_n

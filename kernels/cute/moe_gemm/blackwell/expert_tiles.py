"""Which tiles of a grouped product a thread block computes.

Only the device holds the number of rows of each expert, so every thread block finds its tiles from
the offsets. The tiles of expert 0 come first. Tiles of an expert are in grouped order, so that
tiles that are computed at the same time share rows of A and weights in L2.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernelcat.kernels.cute.common.tile_order import grouped_tile

LANES = 32
GROUP_ROWS = 1024
"""Rows of A that make a group in the order of an expert's tiles."""


class ExpertTiles:
    """Tiles of ``block_m`` rows of A and ``block_n`` rows of the weights of an expert."""

    def __init__(self, experts: int, block_m: int, block_n: int):
        self.experts, self.block_m, self.block_n = experts, block_m, block_n
        self.group_m = max(GROUP_ROWS // block_m, 1)

    @cute.jit
    def load(
        self,
        mOffsets: cute.Tensor,  # (experts + 1,)
        sOffsets: cute.Tensor,  # (experts + 1,), written
        sBlocks: cute.Tensor,  # (experts + 1,), written: blocks of rows before each expert
        threads: cutlass.Constexpr[int],
    ):
        """Fills both lists; all threads of the thread block call this, and may read them then."""
        tidx = cute.arch.thread_idx()[0]
        for i in cutlass.range(tidx, self.experts + 1, threads, unroll=1):
            sOffsets[i] = mOffsets[i]
        cute.arch.sync_threads()
        if tidx < LANES:
            self.count_blocks(sOffsets, sBlocks)
        cute.arch.sync_threads()

    @cute.jit
    def count_blocks(self, sOffsets: cute.Tensor, sBlocks: cute.Tensor):
        """Fills ``sBlocks``; the lanes of a warp add up 32 experts at a time."""
        lane, before = cute.arch.lane_idx(), Int32(0)
        if lane == 0:
            sBlocks[0] = 0
        for first in cutlass.range_constexpr(0, self.experts, LANES):
            expert = first + lane
            blocks = Int32(0)  # of this lane's expert and the experts of lower lanes
            if expert < self.experts:
                rows = sOffsets[expert + 1] - sOffsets[expert]
                blocks = cute.ceil_div(rows, self.block_m)
            for level in cutlass.range_constexpr(5):
                lower = cute.arch.shuffle_sync_up(blocks, 1 << level)
                if lane >= 1 << level:
                    blocks += lower
            if expert < self.experts:
                sBlocks[expert + 1] = before + blocks
            before += cute.arch.shuffle_sync(blocks, LANES - 1)

    def count(
        self,
        sBlocks: cute.Tensor,  # (experts + 1,)
        n: Int32,
    ):
        """Tiles of all experts, and tiles of a block of rows."""
        num_tiles_n = cute.ceil_div(n, self.block_n)
        return sBlocks[self.experts] * num_tiles_n, num_tiles_n

    @cute.jit
    def expert_of(
        self,
        index: Int32,
        expert: Int32,  # at most the one of the tile
        num_tiles_n: Int32,
        sBlocks: cute.Tensor,  # (experts + 1,)
    ):
        """The expert of a tile; all lanes of a warp call this and look at 32 experts at once."""
        lane, ended = cute.arch.lane_idx(), Int32(LANES)
        while ended == LANES:
            candidate = cutlass.min(expert + lane, self.experts - 1)
            end = sBlocks[candidate + 1] * num_tiles_n
            ended = cute.arch.popc(cute.arch.vote_ballot_sync(end <= index))
            expert += ended
        return expert

    @cute.jit
    def find(
        self,
        index: Int32,
        expert: Int32,  # that of an earlier tile, or 0
        num_tiles_n: Int32,
        sOffsets: cute.Tensor,  # (experts + 1,)
        sBlocks: cute.Tensor,  # (experts + 1,)
    ):
        """The expert of a tile, its first row, its number of rows, and its first column of D.

        All lanes of a warp call this.
        """
        expert = self.expert_of(index, expert, num_tiles_n, sBlocks)
        first_block = sBlocks[expert]
        m_idx, n_idx = grouped_tile(
            index - first_block * num_tiles_n,
            sBlocks[expert + 1] - first_block,
            num_tiles_n,
            self.group_m,
        )
        row = sOffsets[expert] + m_idx * self.block_m
        num_rows = cutlass.min(sOffsets[expert + 1] - row, self.block_m)
        return expert, row, num_rows, n_idx * self.block_n

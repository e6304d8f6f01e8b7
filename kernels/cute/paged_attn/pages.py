"""Copies tiles of cached tokens from their pages into shared memory.

A thread looks up the pages of its tokens a tile ahead, so that a copy does not wait for the block
table. It looks up the pages of its first tiles before it has read the length of the sequence:
entries of the table beyond the end may be read, but tokens beyond the end are not copied.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from kernelcat.kernels.cute.common.prefetch import prefetch

SECTOR = 8
"""Entries of the block table in 32 bytes, the smallest unit that L2 loads."""
VECTOR = 8
"""Units of 16 bits in a copy."""


class Pages:
    """How ``threads`` threads copy ``block_n`` tokens of ``width`` units of 16 bits each.

    ``row_threads`` neighbouring threads copy a token; the threads copy ``pass_rows`` tokens in each
    of ``passes``. One look-up finds the page of a thread's tokens among ``span`` tokens.
    """

    def __init__(self, dtype, width, page_size, block_n, threads, has_scales):
        self.dtype, self.width, self.page_size, self.block_n = dtype, width, page_size, block_n
        self.has_scales = has_scales
        self.row_threads = width // VECTOR
        self.pass_rows = threads // self.row_threads
        self.passes = block_n // self.pass_rows
        self.span = max(self.pass_rows, min(page_size, block_n))
        self.lookups = block_n // self.span

    def shared_layout(self, stages: int):
        """(block_n, width, stages) in swizzled atoms of 8 rows: ldmatrix has no bank conflicts."""
        cols = min(self.width, 64)
        atom = cute.make_composed_layout(
            cute.make_swizzle(3 if cols == 64 else 2, 3, 3),
            0,
            cute.make_layout((8, cols), stride=(cols, 1)),
        )
        return cute.tile_to_shape(atom, (self.block_n, self.width, stages), (0, 1, 2))

    def scale_layout(self, stages: int):
        """(block_n, 2, stages): scales of keys and of values; one float without page scales."""
        stride = (1, self.block_n, 2 * self.block_n) if self.has_scales else (0, 0, 0)
        return cute.make_layout((self.block_n, 2, stages), stride=stride)

    def tiled_copy(self):
        """16 bytes a thread by cp.async, past L1."""
        return cute.make_tiled_copy_tv(
            cute.make_copy_atom(
                cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL),
                self.dtype,
                num_bits_per_copy=128,
            ),
            cute.make_layout(
                (self.pass_rows, self.row_threads), stride=(self.row_threads, 1)
            ),
            cute.make_layout((1, VECTOR)),
        )

    @cute.jit
    def prefetch(
        self,
        gTable: cute.Tensor,  # (table_width,) of the sequence
        sector: Int32,
    ):
        """Brings eight entries into L2, before keys and values occupy the memory."""
        entry = sector * SECTOR
        if entry < gTable.shape[0]:
            prefetch(gTable.iterator + entry)

    @cute.jit
    def find(
        self,
        gTable: cute.Tensor,  # (table_width,) of the sequence
        pages: cute.Tensor,  # (lookups,), written
        tile: Int32,
        tidx: Int32,
    ):
        """Looks up the pages of this thread's tokens; beyond the sequence they may be anything."""
        first = Uint32(tile * self.block_n + tidx // self.row_threads)
        for i in cutlass.range_constexpr(self.lookups):
            entry = Int32((first + i * self.span) // self.page_size)
            entry = cutlass.min(entry, gTable.shape[0] - 1)
            pages[i] = gTable[entry]

    @cute.jit
    def load(
        self,
        tiled_copy: cute.TiledCopy,
        mK: cute.Tensor,  # ((VECTOR, 1), 1, vectors): a slot has ``slot_vectors`` of them
        mV: cute.Tensor,  # as mK
        tKsK: cute.Tensor,  # ((VECTOR, 1), passes, 1)
        tVsV: cute.Tensor,  # as tKsK
        pages: cute.Tensor,  # (lookups,)
        kv_head: Int32,
        slot_vectors: Int32,
        tile: Int32,
        end: Int32,
        tidx: Int32,
    ):
        """Starts this thread's copies of a tile; tokens from ``end`` on become zeros."""
        first = tile * self.block_n + tidx // self.row_threads
        slot_vector = kv_head * self.row_threads + tidx % self.row_threads
        is_token = cute.make_rmem_tensor((1, 1), Boolean)
        for i in cutlass.range_constexpr(self.passes):
            token = first + i * self.pass_rows
            page = pages[i * self.pass_rows // self.span]
            slot = page * self.page_size + Int32(Uint32(token) % self.page_size)
            vector = Int64(slot * slot_vectors + slot_vector)
            is_token[0, 0] = token < end
            cute.copy(tiled_copy, mK[None, None, vector], tKsK[None, i, None], pred=is_token)
            cute.copy(tiled_copy, mV[None, None, vector], tVsV[None, i, None], pred=is_token)

    @cute.jit
    def load_scales(
        self,
        gTable: cute.Tensor,  # (table_width,)
        gKS: cute.Tensor,  # (pages,)
        gVS: cute.Tensor,  # (pages,)
        sScale: cute.Tensor,  # (block_n, 2): of keys and of values
        tile: Int32,
        end: Int32,
        tidx: Int32,
    ):
        """Starts to copy the scales of a tile's tokens, one token a thread.

        There must be ``block_n`` threads or more.
        """
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
        if tidx < self.block_n:
            token = cutlass.min(tile * self.block_n + tidx, end - 1)
            page = gTable[token // self.page_size]
            one = cute.make_layout(1)
            for i in cutlass.range_constexpr(2):
                scale = gKS if cutlass.const_expr(i == 0) else gVS
                target = cute.make_tensor(sScale.iterator + i * self.block_n + tidx, one)
                source = cute.make_tensor(scale.iterator + page * scale.stride[0], one)
                cute.copy(atom, source, target)

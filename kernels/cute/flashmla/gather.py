"""The producers of `wgmma` for packed rows: a warpgroup widens them to bfloat16.

Eight threads copy a token through registers, to where TMA would write it. The loads of a pass are
in flight while the pass before is widened, and the next tile is prefetched into L2.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernelcat.kernels.cute.common.float8 import widen
from kernelcat.kernels.cute.common.prefetch import prefetch
from kernelcat.kernels.cute.flashmla.loader import (
    PACKED_VECTORS,
    TOKEN_THREADS,
    VECTOR,
    pair_of,
    times,
)
from kernelcat.kernels.cute.flashmla.seesaw import BLOCK, PARTS, PIECES, STAGES
from kernelcat.reference._mla_row import LATENT, PACKED, ROPE, SCALED

PRODUCERS = 128
PASS_TOKENS = PRODUCERS // TOKEN_THREADS
"""Tokens of a pass: those whose loads are in flight at once."""
PASSES = BLOCK // PASS_TOKENS
"""Passes of a tile."""
BUFFERS = 2
NUM_SCALES = LATENT // SCALED
"""Scales of a token; a thread has 16 latents of each, and 8 elements of the rotated part."""
LINE = 128
"""Bytes that a prefetch brings into L2."""


class Gather:
    """A base class of `Wgmma`; uses its ``dtype``, which is bfloat16, and ``page_size``."""

    @cute.jit
    def gather(
        self,
        mC: cute.Tensor,  # (VECTOR, PACKED / 16, slots) of 16-bit units
        mS: cute.Tensor,  # (PACKED / 4, slots): mC as float32
        vectors: cute.Tensor,  # (8, 8, BLOCK, STAGES * PIECES)
        full: cute.Pointer,  # one barrier for a stage, PIECES apart
        empty: cute.Pointer,  # (STAGES * PARTS,)
        gTable: cute.Tensor,  # (table_width,)
        kv_len: Int32,
        split_idx: Int32,
        num_splits: Int32,
        num_tiles: Int32,
    ):
        """Produces all tiles of the thread block; runs in the four producer warps."""
        tidx = cute.arch.thread_idx()[0] % PRODUCERS
        loaded = cute.make_rmem_tensor((VECTOR, NUM_SCALES + 1, BUFFERS), self.dtype)
        scales = cute.make_rmem_tensor(BUFFERS, Float32)
        pages = cute.make_rmem_tensor(PASSES, Int32)  # of the next load of each pass
        if num_tiles > 0:
            for i in cutlass.range_constexpr(PASSES):
                self.find_page(gTable, pages, split_idx, i, kv_len, tidx)
            self.load_pass(mC, mS, loaded, scales, 0, pages[0], split_idx, 0, kv_len, tidx)
            self.find_page(gTable, pages, split_idx + num_splits, 0, kv_len, tidx)
            for index in cutlass.range(num_tiles, unroll=1):
                tile, stage = split_idx + index * num_splits, index % STAGES
                next_tile = tile + num_splits
                for i in cutlass.range_constexpr(PASSES):
                    buffer, next_buffer = i % BUFFERS, (i + 1) % BUFFERS
                    next_pass = (i + 1) % PASSES
                    if cutlass.const_expr(i > 0):
                        next_page = pages[0 if self.page_size >= BLOCK else i]
                        self.prefetch_pass(mC, next_page, next_tile, i, kv_len, tidx)
                    load_tile = tile if cutlass.const_expr(next_pass > 0) else next_tile
                    page = pages[next_pass]
                    self.load_pass(
                        mC, mS, loaded, scales, next_buffer, page, load_tile, next_pass, kv_len,
                        tidx,
                    )  # fmt: skip
                    self.find_page(
                        gTable, pages, load_tile + num_splits, next_pass, kv_len, tidx
                    )
                    if cutlass.const_expr(i == 0):
                        for part in cutlass.range_constexpr(PARTS):
                            cute.arch.mbarrier_wait(
                                empty + stage * PARTS + part, (index // STAGES + 1) % 2
                            )
                    row = i * PASS_TOKENS + tidx // TOKEN_THREADS
                    self.store_row(
                        loaded[None, None, buffer], scales[buffer],
                        vectors[None, None, row, None], stage * PIECES, row, tidx,
                    )  # fmt: skip
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                if cute.arch.lane_idx() == 0:
                    cute.arch.mbarrier_arrive(full + stage * PIECES)

    @cute.jit
    def find_page(
        self,
        gTable: cute.Tensor,  # (table_width,)
        pages: cute.Tensor,  # (PASSES,), written
        tile: Int32,
        i: int,
        kv_len: Int32,
        tidx: Int32,
    ):
        """Looks up the page of this thread's token of pass ``i``; beyond the end, the last page.

        A page of at least a tile is the page of all passes, and is looked up for the first one.
        """
        if cutlass.const_expr(i == 0 or self.page_size < BLOCK):
            token = cutlass.min(tile * BLOCK + i * PASS_TOKENS + tidx // TOKEN_THREADS, kv_len - 1)
            page = gTable[Int32(Uint32(token) // self.page_size)]
            if cutlass.const_expr(self.page_size >= BLOCK):
                for j in cutlass.range_constexpr(1, PASSES):
                    pages[j] = pages[0]
            pages[i] = page

    @cute.jit
    def slot(self, page: Int32, token: Int32):
        """Index among the slots of all pages, in 64 bits."""
        return Int64(page) * self.page_size + Int64(Uint32(token) % self.page_size)

    @cute.jit
    def prefetch_pass(
        self,
        mC: cute.Tensor,  # (VECTOR, PACKED / 16, slots)
        page: Int32,
        tile: Int32,
        i: int,
        kv_len: Int32,
        tidx: Int32,
    ):
        """Prefetches pass ``i`` of a tile into L2."""
        chunk = tidx % TOKEN_THREADS
        token = tile * BLOCK + i * PASS_TOKENS + tidx // TOKEN_THREADS
        if (token < kv_len) & (chunk * LINE < PACKED):
            gC = mC[None, None, self.slot(page, token)]
            prefetch(gC[None, chunk * (LINE // 16)].iterator)

    @cute.jit
    def load_pass(
        self,
        mC: cute.Tensor,  # (VECTOR, PACKED / 16, slots)
        mS: cute.Tensor,  # (PACKED / 4, slots)
        loaded: cute.Tensor,  # (VECTOR, NUM_SCALES + 1, BUFFERS)
        scales: cute.Tensor,  # (BUFFERS,)
        buffer: cutlass.Constexpr[int],
        page: Int32,
        tile: Int32,
        i: cutlass.Constexpr[int],
        kv_len: Int32,
        tidx: Int32,
    ):
        """Loads this thread's vectors of a token, and one of its scales; zeros beyond the end."""
        chunk = tidx % TOKEN_THREADS
        token = tile * BLOCK + i * PASS_TOKENS + tidx // TOKEN_THREADS
        loaded[None, None, buffer].fill(0)
        scales[buffer] = 0.0
        if token < kv_len:
            slot = self.slot(page, token)
            scales[buffer] = mS[LATENT // 4 + chunk % NUM_SCALES, slot]
            for scale_idx in cutlass.range_constexpr(NUM_SCALES):
                vector = scale_idx * TOKEN_THREADS + chunk
                cute.autovec_copy(mC[None, vector, slot], loaded[None, scale_idx, buffer])
            rope = PACKED_VECTORS - ROPE // VECTOR + chunk
            cute.autovec_copy(mC[None, rope, slot], loaded[None, NUM_SCALES, buffer])

    @cute.jit
    def store_row(
        self,
        loaded: cute.Tensor,  # (VECTOR, NUM_SCALES + 1)
        scale: Float32,
        row_vectors: cute.Tensor,  # (8, 8, STAGES * PIECES) of the token's row
        first_piece: Int32,
        row: Int32,
        tidx: Int32,
    ):
        """Stores a token in shared memory: its latents widened, its rotated part as it is."""
        chunk = tidx % TOKEN_THREADS
        wide = cute.make_rmem_tensor(VECTOR, self.dtype)
        wide_words = cute.recast_tensor(wide, Uint32)
        first_lane = cute.arch.lane_idx() // TOKEN_THREADS * TOKEN_THREADS
        for scale_idx in cutlass.range_constexpr(NUM_SCALES):
            factor = pair_of(cute.arch.shuffle_sync(scale, first_lane + scale_idx), self.dtype)
            words = cute.recast_tensor(loaded[None, scale_idx], Uint32)
            for half in cutlass.range_constexpr(2):
                for w in cutlass.range_constexpr(2):
                    low, high = widen(words[2 * half + w], self.dtype)
                    wide_words[2 * w] = times(low, factor, self.dtype)
                    wide_words[2 * w + 1] = times(high, factor, self.dtype)
                vector = 2 * (scale_idx * TOKEN_THREADS + chunk) + half
                swizzled = (vector % TOKEN_THREADS) ^ (row % 8)
                piece = first_piece + vector // TOKEN_THREADS
                cute.autovec_copy(wide, row_vectors[None, swizzled, piece])
        rope = row_vectors[None, chunk ^ (row % 8), first_piece + PIECES - 1]
        cute.autovec_copy(loaded[None, NUM_SCALES], rope)

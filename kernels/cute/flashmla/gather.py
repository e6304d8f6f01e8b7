"""A warpgroup that brings tiles of packed rows for `wgmma`: float8 in, 16-bit elements out.

Tokens pass through registers, eight threads each, and lie where TMA would have put them. A pass is
under way while the one before it is widened, and the tile after is on its way into L2.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernelcat.kernels.cute.common.float8 import widen
from kernelcat.kernels.cute.common.prefetch import prefetch
from kernelcat.kernels.cute.flashmla.loader import (
    PACKED_VECTORS,
    SHARE,
    VECTOR,
    pair_of,
    times,
)
from kernelcat.kernels.cute.flashmla.place import LATENT, PACKED, ROPE, SCALED
from kernelcat.kernels.cute.flashmla.seesaw import BLOCK, PARTS, PIECES, STAGES

PRODUCERS = 128
A_PASS = PRODUCERS // SHARE
"""Tokens that are under way at once."""
PASSES = BLOCK // A_PASS
BUFFERS = 2
GROUPS = LATENT // SCALED
"""Scales of a token; a thread has 16 latents of each, and 8 elements of the rotated part."""
LINE = 128
"""Bytes that L2 is asked for."""


class Gather:
    """``self`` has ``dtype``, which is bfloat16, and ``page_size``."""

    @cute.jit
    def gather(
        self,
        mC: cute.Tensor,  # (VECTOR, PACKED / 16, slots) of 16-bit units
        mS: cute.Tensor,  # (PACKED / 4, slots): the same as float32
        vectors: cute.Tensor,  # (8, 8, BLOCK, STAGES * PIECES)
        full: cute.Pointer,  # of each stage, PIECES apart
        empty: cute.Pointer,  # of each part of a stage
        gTable: cute.Tensor,  # (table_width,)
        kv_len: Int32,
        split_idx: Int32,
        num_splits: Int32,
        num_tiles: Int32,
    ):
        """Runs in the four warps of the producers."""
        tidx = cute.arch.thread_idx()[0] % PRODUCERS
        held = cute.make_rmem_tensor((VECTOR, GROUPS + 1, BUFFERS), self.dtype)
        scales = cute.make_rmem_tensor(BUFFERS, Float32)
        pages = cute.make_rmem_tensor(PASSES, Int32)  # of each pass, when it is next asked for
        if num_tiles > 0:
            for i in cutlass.range_constexpr(PASSES):
                self.look_up(gTable, pages, split_idx, i, kv_len, tidx)
            self.fetch(mC, mS, held, scales, 0, pages[0], split_idx, 0, kv_len, tidx)
            self.look_up(gTable, pages, split_idx + num_splits, 0, kv_len, tidx)
            for index in cutlass.range(num_tiles, unroll=1):
                tile, stage = split_idx + index * num_splits, index % STAGES
                after = tile + num_splits
                for i in cutlass.range_constexpr(PASSES):
                    here, there, coming = i % BUFFERS, (i + 1) % BUFFERS, (i + 1) % PASSES
                    if cutlass.const_expr(i > 0):
                        ahead = pages[0 if self.page_size >= BLOCK else i]
                        self.warm(mC, ahead, after, i, kv_len, tidx)
                    its = tile if cutlass.const_expr(coming > 0) else after
                    page = pages[coming]
                    self.fetch(mC, mS, held, scales, there, page, its, coming, kv_len, tidx)
                    self.look_up(gTable, pages, its + num_splits, coming, kv_len, tidx)
                    if cutlass.const_expr(i == 0):
                        for part in cutlass.range_constexpr(PARTS):
                            cute.arch.mbarrier_wait(
                                empty + stage * PARTS + part, (index // STAGES + 1) % 2
                            )
                    row = i * A_PASS + tidx // SHARE
                    self.place(
                        held[None, None, here], scales[here],
                        vectors[None, None, row, None], stage * PIECES, row, tidx,
                    )  # fmt: skip
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                if cute.arch.lane_idx() == 0:
                    cute.arch.mbarrier_arrive(full + stage * PIECES)

    @cute.jit
    def look_up(
        self,
        gTable: cute.Tensor,
        pages: cute.Tensor,
        tile: Int32,
        i: int,
        kv_len: Int32,
        tidx: Int32,
    ):
        """The page of this thread's token of a pass; beyond the end, that of the last.

        All passes of a tile have the same where pages are as large; then the first tells.
        """
        if cutlass.const_expr(i == 0 or self.page_size < BLOCK):
            token = cutlass.min(tile * BLOCK + i * A_PASS + tidx // SHARE, kv_len - 1)
            page = gTable[Int32(Uint32(token) // self.page_size)]
            if cutlass.const_expr(self.page_size >= BLOCK):
                for j in cutlass.range_constexpr(1, PASSES):
                    pages[j] = pages[0]
            pages[i] = page

    @cute.jit
    def slot(self, page: Int32, token: Int32):
        return Int64(page) * self.page_size + Int64(Uint32(token) % self.page_size)

    @cute.jit
    def warm(
        self, mC: cute.Tensor, page: Int32, tile: Int32, i: int, kv_len: Int32, tidx: Int32
    ):
        """Bring a pass into L2."""
        chunk = tidx % SHARE
        token = tile * BLOCK + i * A_PASS + tidx // SHARE
        if (token < kv_len) & (chunk * LINE < PACKED):
            gC = mC[None, None, self.slot(page, token)]
            prefetch(gC[None, chunk * (LINE // 16)].iterator)

    @cute.jit
    def fetch(
        self,
        mC: cute.Tensor,
        mS: cute.Tensor,
        held: cute.Tensor,  # (VECTOR, GROUPS + 1, BUFFERS)
        scales: cute.Tensor,  # (BUFFERS,)
        buffer: cutlass.Constexpr[int],
        page: Int32,
        tile: Int32,
        i: cutlass.Constexpr[int],
        kv_len: Int32,
        tidx: Int32,
    ):
        """Ask for this thread's vectors of a token, and one of its scales; zeros beyond the end."""
        chunk = tidx % SHARE
        token = tile * BLOCK + i * A_PASS + tidx // SHARE
        held[None, None, buffer].fill(0)
        scales[buffer] = 0.0
        if token < kv_len:
            slot = self.slot(page, token)
            scales[buffer] = mS[LATENT // 4 + chunk % GROUPS, slot]
            for group in cutlass.range_constexpr(GROUPS):
                cute.autovec_copy(mC[None, group * SHARE + chunk, slot], held[None, group, buffer])
            rope = PACKED_VECTORS - ROPE // VECTOR + chunk
            cute.autovec_copy(mC[None, rope, slot], held[None, GROUPS, buffer])

    @cute.jit
    def place(
        self,
        held: cute.Tensor,  # (VECTOR, GROUPS + 1)
        scale: Float32,
        row_vectors: cute.Tensor,  # (8, 8, STAGES * PIECES) of the token's row
        first_piece: Int32,
        row: Int32,
        tidx: Int32,
    ):
        """A token's latents, widened, and its rotated part into shared memory."""
        chunk = tidx % SHARE
        wide = cute.make_rmem_tensor(VECTOR, self.dtype)
        wide_words = cute.recast_tensor(wide, Uint32)
        first_lane = cute.arch.lane_idx() // SHARE * SHARE
        for group in cutlass.range_constexpr(GROUPS):
            factor = pair_of(cute.arch.shuffle_sync(scale, first_lane + group), self.dtype)
            words = cute.recast_tensor(held[None, group], Uint32)
            for half in cutlass.range_constexpr(2):
                for w in cutlass.range_constexpr(2):
                    low, high = widen(words[2 * half + w], self.dtype)
                    wide_words[2 * w] = times(low, factor, self.dtype)
                    wide_words[2 * w + 1] = times(high, factor, self.dtype)
                vector = 2 * (group * SHARE + chunk) + half
                place = (vector % SHARE) ^ (row % 8)
                cute.autovec_copy(wide, row_vectors[None, place, first_piece + vector // SHARE])
        rope = row_vectors[None, chunk ^ (row % 8), first_piece + PIECES - 1]
        cute.autovec_copy(held[None, GROUPS], rope)

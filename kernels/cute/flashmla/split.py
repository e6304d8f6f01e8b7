"""Latent attention of few heads on tensor cores, from Ampere on: cp.async, ldmatrix, mma.sync.

A thread block has 16 rows: heads of query tokens. Each warp computes the scores of its tokens of a
tile and stores them in shared memory. Then every warp reads all scores, computes the same softmax,
and adds its own columns of the values, which are the first 512 columns of the keys in shared
memory. Threads copy each token by itself, 16 bytes at a time, so pages may have any size. Packed
rows of 656 bytes are widened in shared memory, a tile at a time. As in flash-decoding, several
thread blocks split the tokens of a long sequence.

    barrier    who arrives (how many)  who waits    for what
    barrier 0  all threads             all threads  the tile has arrived, the tile before was read
    barrier 0  all threads             all threads  the tile is widened (packed rows only)
    barrier 0  all threads             all threads  the scores of all warps are in shared memory
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.fragments import flat
from kernelcat.kernels.cute.common.online_softmax import LOG2E, LOWEST, finish
from kernelcat.kernels.cute.common.partials import partial_layout
from kernelcat.kernels.cute.common.prefetch import prefetch
from kernelcat.kernels.cute.flashmla.layouts import used_splits
from kernelcat.kernels.cute.flashmla.loader import VECTOR, Loader, latent_layout
from kernelcat.kernels.cute.flashmla.products import BLOCK_M, Products
from kernelcat.kernels.cute.flashmla.softmax import ROWS, mask, online
from kernelcat.reference._mla_row import LATENT, PACKED, ROW

LANES = 32


class Split(Products):
    """Tiles of ``block_n`` tokens, of which each of ``warps`` multiplies a part with 16 rows."""

    def __init__(
        self,
        dtype: str,
        packed: bool,
        page_size: int,
        block_n: int,
        stages: int,
        warps: int,
        ctas_per_sm: int,
        split: bool,
        programmatic: bool,
    ):
        self.dtype, self.packed, self.block_n, self.stages = (
            element_type(dtype), packed, block_n, stages
        )  # fmt: skip
        self.warps, self.threads, self.ctas_per_sm = warps, LANES * warps, ctas_per_sm
        self.split, self.programmatic = split, programmatic
        self.tokens = block_n // warps  # tokens of a tile whose scores a warp computes
        self.columns = LATENT // warps
        self.loader = Loader(self.dtype, packed, page_size, block_n, stages, self.threads)

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,  # (tokens, heads, ROW)
        kv_cache: cute.Pointer,  # (pages, page_size, ROW), or PACKED bytes
        block_table: cute.Pointer,  # (batch, table_width)
        kv_lens: cute.Pointer,  # (batch,)
        cu_q: cute.Pointer,  # (batch + 1,)
        out: cute.Pointer,  # (tokens, heads, LATENT)
        lse: cute.Pointer,  # (tokens, heads)
        partial: cute.Pointer,  # (batch, row_tiles, num_splits, BLOCK_M, LATENT + 4)
        batch: Int32,
        tokens: Int32,
        heads: Int32,
        pages: Int32,
        table_width: Int32,
        row_tiles: Int32,
        num_splits: Int32,
        sm_scale: Float32,
        stream: cuda.CUstream,
    ):
        rows = tokens * heads
        row = PACKED // 2 if self.packed else ROW
        op = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))
        score_mma, value_mma = (
            cute.make_tiled_mma(op, cute.make_layout((1, 1, 1)), permutation_mnk=(16, n, 16))
            for n in (min(self.tokens, 16), 16)
        )
        self.kernel(
            vectors_of(q, ROW),
            vectors_of(cute.recast_ptr(kv_cache, dtype=self.dtype), row),
            cute.make_tensor(
                block_table, cute.make_layout((table_width, batch), stride=(1, Int64(table_width)))
            ),
            cute.make_tensor(kv_lens, cute.make_layout(batch)),
            cute.make_tensor(cu_q, cute.make_layout(batch + 1)),
            cute.make_tensor(
                out,
                cute.make_layout(
                    (2, LATENT // 2, rows), stride=(1, 2, cute.assume(Int64(LATENT), divby=LATENT))
                ),
            ),
            cute.make_tensor(lse, cute.make_layout(rows)),
            cute.make_tensor(
                partial, partial_layout(2, LATENT, BLOCK_M, num_splits, batch * row_tiles)
            ),
            score_mma,
            value_mma,
            heads,
            sm_scale,
        ).launch(
            grid=(row_tiles, num_splits, batch),
            block=(self.threads, 1, 1),
            use_pdl=self.programmatic,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # ((VECTOR, 1), vectors, tokens * heads)
        mC: cute.Tensor,  # ((VECTOR, 1), vectors, slots)
        mTable: cute.Tensor,  # (table_width, batch)
        mLens: cute.Tensor,  # (batch,)
        mStarts: cute.Tensor,  # (batch + 1,)
        mO: cute.Tensor,  # (2, LATENT / 2, tokens * heads)
        mL: cute.Tensor,  # (tokens * heads,)
        mPartial: cute.Tensor,  # (2, LATENT / 2 + 2, BLOCK_M, num_splits, tiles)
        score_mma: cute.TiledMma,
        value_mma: cute.TiledMma,
        heads: Int32,
        sm_scale: Float32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        row_tile, split_idx, seq = cute.arch.block_idx()
        row_tiles, num_splits, _ = cute.arch.grid_dim()
        shared = SmemAllocator()
        query = cute.recast_ptr(shared.allocate(2 * BLOCK_M * ROW, 1024), dtype=self.dtype)
        ring = cute.recast_ptr(shared.allocate(2 * self.loader.ring_units, 1024), dtype=self.dtype)
        tile = ring
        if cutlass.const_expr(self.packed):
            widened = shared.allocate(2 * self.block_n * ROW, 1024)
            tile = cute.recast_ptr(widened, dtype=self.dtype)
        scores = cute.recast_ptr(
            shared.allocate(4 * BLOCK_M * self.block_n, 16), dtype=Float32
        )

        # Prefetch into L2 what the first loads need while the kernel before still runs.
        prefetch(mLens.iterator + seq)
        prefetch(mStarts.iterator + seq)
        if cutlass.const_expr(self.programmatic):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        q_begin, kv_len = mStarts[seq], mLens[seq]
        q_len = mStarts[seq + 1] - q_begin
        row_begin = row_tile * BLOCK_M
        num_rows = q_len * heads - row_begin
        used = used_splits(kv_len, self.block_n, num_splits)
        tiles = cute.ceil_div(kv_len, self.block_n)
        num_tiles = cute.ceil_div(cutlass.max(tiles - split_idx, 0), num_splits)
        if (num_rows > 0) & (split_idx < used):
            first_row = q_begin * heads + row_begin
            gQ = cute.domain_offset((0, 0, first_row), mQ)
            self.loader.load_query(gQ, query, num_rows, BLOCK_M, tidx)
            row_max = cute.make_rmem_tensor(ROWS, Float32)
            row_sum = cute.make_rmem_tensor(ROWS, Float32)
            out = cute.make_rmem_tensor(
                value_mma.partition_shape_C((BLOCK_M, self.columns)), Float32
            )
            self.attend(
                score_mma, value_mma, query, ring, tile, scores, mC, mTable[None, seq], row_max,
                row_sum, out, kv_len - q_len, row_begin, num_rows, heads, kv_len, split_idx,
                num_splits, num_tiles, sm_scale * LOG2E, tidx,
            )  # fmt: skip
            gO = cute.domain_offset((0, 0, first_row), mO)
            gL = cute.domain_offset(first_row, mL)
            if cutlass.const_expr(self.split):
                if used > 1:
                    gP = mPartial[None, None, None, split_idx, seq * row_tiles + row_tile]
                    self.store_partial(row_max, row_sum, out, gP, num_rows, tidx)
                else:
                    self.store(row_max, row_sum, out, gO, gL, num_rows, tidx)
            else:
                self.store(row_max, row_sum, out, gO, gL, num_rows, tidx)

    @cute.jit
    def attend(
        self,
        score_mma: cute.TiledMma,
        value_mma: cute.TiledMma,
        query: cute.Pointer,  # (BLOCK_M, ROW), still being copied
        ring: cute.Pointer,  # (stages, block_n, ROW or PACKED / 2)
        tile: cute.Pointer,  # the ring, or for packed rows the widened tile (block_n, ROW)
        scores: cute.Pointer,  # (block_n / 8, LANES, 4)
        mC: cute.Tensor,  # ((VECTOR, 1), vectors, slots)
        gTable: cute.Tensor,  # (table_width,)
        row_max: cute.Tensor,  # (ROWS,), written, as are ``row_sum`` and ``out``
        row_sum: cute.Tensor,  # (ROWS,)
        out: cute.Tensor,  # ((2, 2), 1, columns / 8)
        first_position: Int32,  # of the sequence's query tokens
        row_begin: Int32,
        num_rows: Int32,
        heads: Int32,
        kv_len: Int32,
        split_idx: Int32,
        num_splits: Int32,
        num_tiles: Int32,
        scale: Float32,
        tidx: Int32,
    ):
        """Attends to this thread block's tiles; all sums are relative to ``row_max``."""
        lane, warp_idx = tidx % LANES, cute.arch.make_warp_uniform(tidx // LANES)
        pages = cute.make_rmem_tensor((self.loader.passes, self.stages - 1), Int32)
        for stage in cutlass.range_constexpr(self.stages - 1):
            if stage < num_tiles:
                tile_idx = split_idx + stage * num_splits
                self.loader.find(gTable, pages[None, stage], tile_idx, kv_len, tidx)
        for stage in cutlass.range_constexpr(self.stages - 1):
            if stage < num_tiles:
                tile_idx = split_idx + stage * num_splits
                self.loader.load(mC, ring, pages[None, stage], stage, tile_idx, kv_len, tidx)
            cute.arch.cp_async_commit_group()
        tile_idx = split_idx + (self.stages - 1) * num_splits
        self.loader.find(gTable, pages[None, 0], tile_idx, kv_len, tidx)

        stages = 1 if self.packed else self.stages
        sQ = cute.make_tensor(query, latent_layout(BLOCK_M, 1))[None, None, 0]
        sK = cute.make_tensor(tile, latent_layout(self.block_n, stages))
        sS = cute.make_tensor(scores, cute.make_layout((4, LANES, self.block_n // 8)))
        last_visible = cute.make_rmem_tensor(ROWS, Int32)
        factor = cute.make_rmem_tensor(ROWS, Float32)
        for half in cutlass.range_constexpr(ROWS):
            row = cutlass.min(lane // 4 + 8 * half, num_rows - 1)
            last_visible[half] = first_position + (row_begin + row) // heads
        min_visible = first_position + row_begin // heads
        row_max.fill(LOWEST)
        row_sum.fill(0.0)
        out.fill(0.0)
        acc = cute.make_rmem_tensor(
            score_mma.partition_shape_C((BLOCK_M, self.tokens)), Float32
        )
        logits = cute.make_rmem_tensor(
            value_mma.partition_shape_C((BLOCK_M, self.block_n)), Float32
        )
        for index in cutlass.range(num_tiles, unroll=1):
            # This tile has arrived, and all warps have read the stage that is filled next.
            cute.arch.cp_async_wait_group(self.stages - 2)
            cute.arch.barrier()
            next_index, stage = index + self.stages - 1, index % self.stages
            if next_index < num_tiles:
                tile_idx = split_idx + next_index * num_splits
                self.loader.load(
                    mC, ring, pages[None, 0], next_index % self.stages, tile_idx, kv_len, tidx
                )
                self.loader.find(gTable, pages[None, 0], tile_idx + num_splits, kv_len, tidx)
            cute.arch.cp_async_commit_group()
            if cutlass.const_expr(self.packed):
                self.loader.widen(ring, tile, stage, tidx)
                cute.arch.barrier()
                stage = 0

            keys = cute.local_tile(sK[None, None, stage], (self.tokens, ROW), (warp_idx, 0))
            self.multiply_keys(score_mma, acc, sQ, keys, lane)
            for j in cutlass.range_constexpr(self.tokens // 8):
                octet = warp_idx * (self.tokens // 8) + j
                cute.autovec_copy(flat(acc[None, 0, j]), sS[None, lane, octet])
            cute.arch.barrier()
            for j in cutlass.range_constexpr(self.block_n // 8):
                cute.autovec_copy(sS[None, lane, j], flat(logits[None, 0, j]))
            token = (split_idx + index * num_splits) * self.block_n
            if token + self.block_n > min_visible + 1:
                mask(logits, last_visible, token, self.block_n)
            online(logits, row_max, row_sum, factor, scale, self.block_n)
            changed = (factor[0] != 1.0) | (factor[1] != 1.0)
            if cute.arch.vote_any_sync(changed):
                for j in cutlass.range_constexpr(self.columns // 8):
                    for half in cutlass.range_constexpr(ROWS):
                        for c in cutlass.range_constexpr(2):
                            out[(c, half), 0, j] = out[(c, half), 0, j] * factor[half]
            value_tile = (self.block_n, self.columns)
            values = cute.local_tile(sK[None, None, stage], value_tile, (0, warp_idx))
            self.add_values(value_mma, out, logits, values, lane)
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def store(
        self,
        row_max: cute.Tensor,  # (ROWS,)
        row_sum: cute.Tensor,  # (ROWS,), of this thread's columns only
        out: cute.Tensor,  # ((2, 2), 1, columns / 8)
        gO: cute.Tensor,  # (2, LATENT / 2, rows)
        gL: cute.Tensor,  # (rows,)
        num_rows: Int32,
        tidx: Int32,
    ):
        """Stores rows of the result; every warp stores its columns."""
        lane, warp_idx = tidx % LANES, tidx // LANES
        pair = cute.make_rmem_tensor(2, self.dtype)
        for half in cutlass.range_constexpr(ROWS):
            row = lane // 4 + 8 * half
            sum_of_row = cute.arch.warp_reduction_sum(row_sum[half], threads_in_group=4)
            factor, lse = finish(row_max[half], sum_of_row, Float32(0), False)
            if row < num_rows:
                for j in cutlass.range_constexpr(self.columns // 8):
                    for c in cutlass.range_constexpr(2):
                        pair[c] = (out[(c, half), 0, j] * factor).to(self.dtype)
                    vector = warp_idx * (self.columns // 2) + 4 * j + lane % 4
                    cute.autovec_copy(pair, gO[None, vector, row])
                if tidx % 4 + warp_idx == 0:
                    gL[row] = lse

    @cute.jit
    def store_partial(
        self,
        row_max: cute.Tensor,  # (ROWS,)
        row_sum: cute.Tensor,  # (ROWS,), of this thread's columns only
        out: cute.Tensor,  # ((2, 2), 1, columns / 8)
        gPartial: cute.Tensor,  # (2, LATENT / 2 + 2, BLOCK_M)
        num_rows: Int32,
        tidx: Int32,
    ):
        """Stores a partial result for `combine`."""
        lane, warp_idx = tidx % LANES, tidx // LANES
        pair = cute.make_rmem_tensor(2, Float32)
        for half in cutlass.range_constexpr(ROWS):
            row = lane // 4 + 8 * half
            sum_of_row = cute.arch.warp_reduction_sum(row_sum[half], threads_in_group=4)
            if row < num_rows:
                for j in cutlass.range_constexpr(self.columns // 8):
                    for c in cutlass.range_constexpr(2):
                        pair[c] = out[(c, half), 0, j]
                    vector = warp_idx * (self.columns // 2) + 4 * j + lane % 4
                    cute.autovec_copy(pair, gPartial[None, vector, row])
                if tidx % 4 + warp_idx == 0:
                    pair[0], pair[1] = row_max[half], sum_of_row
                    cute.autovec_copy(pair, gPartial[None, LATENT // 2, row])


def vectors_of(pointer, row):
    """((VECTOR, 1), vectors, rows) of contiguous rows."""
    stride = cute.assume(Int64(row), divby=row)
    layout = cute.make_layout(
        ((VECTOR, 1), row // VECTOR, 1), stride=((1, 0), VECTOR, stride)
    )
    return cute.make_tensor(pointer, layout)

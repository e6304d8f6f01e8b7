"""Flash-decoding over pages on tensor cores, from Ampere on: cp.async, ldmatrix, mma.sync.

The online softmax in registers is FlashAttention-2's. As in FlashInfer, the rows of a tile are the
query heads of one key-value head, for one query token after another: a cached token is read once
for all of them, and decode and prefill are one kernel. As in flash-decoding, several thread blocks
split the keys of a long sequence; the last one to finish merges their partial results, or each
thread block of a cluster merges a part of the rows. Where rows fit one warp, the warps split the
keys of a tile. By programmatic dependent launch (Hopper) a kernel sets up while the kernel before
it ends.

    barrier              who arrives (how many)  who waits    for what
    barrier 0            all threads             all threads  a stage has arrived, the last was read
    inbox_full, cluster  see ``Exchange``

Each thread waits for its own copies before it arrives at barrier 0. Barrier 0 also separates the
last products from the partial results that overwrite the ring.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.partials import Partials
from kernelcat.kernels.cute.common.prefetch import prefetch
from kernelcat.kernels.cute.paged_attn.exchange import Exchange
from kernelcat.kernels.cute.paged_attn.pages import VECTOR, Pages
from kernelcat.kernels.cute.paged_attn.rows import Rows
from kernelcat.kernels.cute.paged_attn.tile import Tile


class Split(Rows):
    """Tiles of ``block_m`` rows and ``block_n`` tokens; ``num_splits`` thread blocks a row tile.

    ``cluster`` is the number of thread blocks in a cluster: ``num_splits``, or 1. Row r of a
    sequence and key-value head is query token r // group_size and head r % group_size. Only the
    first 8 of every 16 rows are used where ``row_halves`` is 1.
    """

    def __init__(
        self,
        dtype: str,
        fp8: bool,
        head_dim: int,
        page_size: int,
        window: bool,
        softcap: bool,
        sinks: bool,
        scales: str,
        block_m: int,
        row_halves: int,
        block_n: int,
        stages: int,
        split: bool,
        cluster: int,
        warps: int,
        ctas_per_sm: int,
        programmatic: bool,
    ):
        self.dtype, self.fp8, self.head_dim = element_type(dtype), fp8, head_dim
        self.window, self.sinks, self.scales = window, sinks, scales
        self.block_m, self.block_n, self.stages = block_m, block_n, stages
        self.split, self.cluster = split, cluster
        self.ctas_per_sm, self.programmatic = ctas_per_sm, programmatic
        self.warps_m = min(block_m // 16, warps)
        self.warps_n = warps // self.warps_m
        self.threads = 32 * warps
        width = head_dim // 2 if fp8 else head_dim
        self.pages = Pages(
            self.dtype, width, page_size, block_n, self.threads, scales == "page"
        )
        self.tokens = block_n // self.warps_n  # tokens of a tile that a warp attends to
        self.tile = Tile(
            self.dtype, fp8, head_dim, block_m, row_halves, self.tokens, window, softcap, scales
        )
        self.partials = Partials(
            self.dtype, head_dim, block_m, row_halves, self.warps_n, self.threads, sinks, scales
        )
        self.exchange = Exchange(self.partials, cluster)
        self.shared_bytes = max(4 * block_n * width * stages, self.partials.shared_bytes)

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,  # (tokens, heads, head_dim)
        k_cache: cute.Pointer,  # (pages, page_size, kv_heads, head_dim)
        v_cache: cute.Pointer,  # as k_cache
        block_table: cute.Pointer,  # (batch, table_width)
        kv_lens: cute.Pointer,  # (batch,)
        cu_q: cute.Pointer,  # (batch + 1,)
        sinks: cute.Pointer,  # (heads,)
        k_scale: cute.Pointer,  # (1 or pages, kv_heads)
        v_scale: cute.Pointer,  # as k_scale
        out: cute.Pointer,  # as q
        lse: cute.Pointer,  # (tokens, heads)
        partial: cute.Pointer,  # (tiles, num_splits, block_m, head_dim + 4)
        counters: cute.Pointer,  # (tiles,)
        batch: Int32,
        tokens: Int32,
        heads: Int32,
        kv_heads: Int32,
        table_width: Int32,
        row_tiles: Int32,
        num_splits: Int32,
        window: Int32,
        sm_scale: Float32,
        softcap: Float32,
        stream: cuda.CUstream,
    ):
        dim = self.head_dim
        row = cute.assume(Int64(heads) * dim, divby=VECTOR)
        rows = cute.make_layout((dim, heads, tokens), stride=(1, dim, row))
        cached = cute.make_layout(((VECTOR, 1), 1, 1), stride=((1, 0), 0, VECTOR))
        by_page = cute.make_layout((1, kv_heads), stride=(Int64(kv_heads), 1))
        tiled_mma, value_mma = (
            cute.make_tiled_mma(
                warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16)),
                cute.make_layout((self.warps_m, 1, 1)),
                permutation_mnk=(16 * self.warps_m, 16, 16),
            )
            for dtype in (self.dtype, self.tile.value_dtype)
        )
        self.kernel(
            cute.make_tensor(q, rows),
            cute.make_tensor(cute.recast_ptr(k_cache, dtype=self.dtype), cached),
            cute.make_tensor(cute.recast_ptr(v_cache, dtype=self.dtype), cached),
            cute.make_tensor(
                block_table, cute.make_layout((table_width, batch), stride=(1, Int64(table_width)))
            ),
            cute.make_tensor(kv_lens, cute.make_layout(batch)),
            cute.make_tensor(cu_q, cute.make_layout(batch + 1)),
            cute.make_tensor(sinks, cute.make_layout(heads)),
            cute.make_tensor(k_scale, by_page),
            cute.make_tensor(v_scale, by_page),
            cute.make_tensor(out, rows),
            cute.make_tensor(lse, cute.make_layout((heads, tokens), stride=(1, Int64(heads)))),
            cute.make_tensor(
                partial, self.partials.partial_layout(row_tiles * kv_heads * batch, num_splits)
            ),
            counters,
            self.pages.shared_layout(self.stages),
            tiled_mma,
            value_mma,
            self.pages.tiled_copy(),
            heads // kv_heads,
            row_tiles,
            num_splits,
            window,
            sm_scale,
            softcap,
        ).launch(
            grid=(row_tiles * self.cluster, kv_heads, batch * (num_splits // self.cluster)),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1) if self.cluster > 1 else None,
            use_pdl=self.programmatic,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # (head_dim, heads, tokens)
        mK: cute.Tensor,  # ((VECTOR, 1), 1, vectors): slot by slot, head by head
        mV: cute.Tensor,  # as mK
        mTable: cute.Tensor,  # (table_width, batch)
        mLens: cute.Tensor,  # (batch,)
        mStarts: cute.Tensor,  # (batch + 1,)
        mSinks: cute.Tensor,  # (heads,)
        mKS: cute.Tensor,  # (pages, kv_heads)
        mVS: cute.Tensor,  # (pages, kv_heads)
        mO: cute.Tensor,  # as mQ
        mL: cute.Tensor,  # (heads, tokens)
        mPartial: cute.Tensor,  # (VECTOR, vectors + 1, block_m, num_splits, tiles)
        counters: cute.Pointer,  # (tiles,)
        shared_layout: cute.ComposedLayout,
        tiled_mma: cute.TiledMma,
        value_mma: cute.TiledMma,
        tiled_copy: cute.TiledCopy,
        group_size: Int32,
        row_tiles: Int32,
        num_splits: Int32,
        window: Int32,
        sm_scale: Float32,
        softcap: Float32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        row_tile, kv_head, seq = cute.arch.block_idx()
        kv_heads = mKS.shape[1]
        if cutlass.const_expr(self.cluster > 1):
            num_splits = self.cluster
            split_idx, row_tile = row_tile % num_splits, row_tile // num_splits
        elif cutlass.const_expr(self.split):
            split_idx, seq = seq % num_splits, seq // num_splits
        else:
            split_idx, num_splits = 0, 1
        # The last rows of a sequence start first: they see the most keys.
        row_tile = row_tiles - 1 - row_tile
        shared = SmemAllocator()
        memory = shared.allocate(self.shared_bytes, 1024)
        ring = cute.recast_ptr(memory, dtype=self.dtype)
        sK = cute.make_tensor(ring, shared_layout)
        sV = cute.make_tensor(ring + cute.cosize(shared_layout), shared_layout)
        sO = cute.make_tensor(
            cute.recast_ptr(memory, dtype=Float32), self.partials.shared_layout()
        )
        sScale = shared.allocate_tensor(Float32, self.pages.scale_layout(self.stages), 16)
        sQ = shared.allocate_tensor(self.dtype, self.tile.query_layout(self.threads), 16)
        is_last = shared.allocate_array(Int32, 1)
        if cutlass.const_expr(self.cluster > 1):
            sInbox = shared.allocate_tensor(Float32, self.exchange.inbox_layout(), 16)
            inbox_full = shared.allocate_array(Int64, 1)
            self.exchange.open(inbox_full)

        # Prefetch into L2 what the first loads need while the kernel before still runs. That kernel
        # may still write to these addresses: its stores and these loads go through L2.
        prefetch(mLens.iterator + seq)
        prefetch(mStarts.iterator + seq)
        if cutlass.const_expr(not self.window):
            self.pages.prefetch(mTable[None, seq], split_idx * self.threads + tidx)
        if cutlass.const_expr(self.programmatic):
            cute.arch.griddepcontrol_wait()

        q_begin = mStarts[seq]
        q_len = mStarts[seq + 1] - q_begin
        first_position = mLens[seq] - q_len  # of the query tokens in the sequence
        row_begin = row_tile * self.block_m
        row_end = cutlass.min(row_begin + self.block_m, q_len * group_size)
        first_limit = first_position + row_begin // group_size
        last_limit = first_position + cutlass.min(
            (row_begin + self.block_m - 1) // group_size, q_len - 1
        )
        tile_begin, end = Int32(0), cutlass.max(last_limit + 1, 0)
        if cutlass.const_expr(self.window):
            tile_begin = cutlass.max(first_limit - window + 1, 0) // self.block_n
        tiles = cutlass.max(cute.ceil_div(end, self.block_n) - tile_begin, 0)
        # A thread block takes every num_splits-th tile. Without a window its first tiles do not
        # depend on the length of the sequence: it looks up their pages before it has the length.
        tile_begin += split_idx
        num_tiles = cute.ceil_div(cutlass.max(tiles - split_idx, 0), num_splits)
        pages = cute.make_rmem_tensor((self.pages.lookups, self.stages - 1), Int32)
        for stage in cutlass.range_constexpr(self.stages - 1):
            tile = tile_begin + stage * num_splits
            self.pages.find(mTable[None, seq], pages[None, stage], tile, tidx)
        if cutlass.const_expr(self.programmatic):
            cute.arch.griddepcontrol_launch_dependents()

        # All thread blocks of a cluster take part: without tiles, their row sums are 0.
        num_parts = cutlass.max(cutlass.min(num_splits, tiles), 1)
        if row_begin < row_end and (self.cluster > 1 or split_idx < num_parts):
            scale, v_factor = sm_scale, Float32(1)
            if cutlass.const_expr(self.scales == "tensor"):
                scale, v_factor = sm_scale * mKS[0, kv_head], mVS[0, kv_head]
            rows = row_end - row_begin
            gSinks = cute.domain_offset(kv_head * group_size, mSinks)
            if cutlass.const_expr(self.sinks):  # which are loaded at the very end
                prefetch(gSinks.iterator)
            gQ = cute.domain_offset((0, kv_head * group_size, q_begin), mQ)
            self.attend(
                tiled_mma, value_mma, tiled_copy, gQ, mK, mV, mTable[None, seq],
                mKS[None, kv_head], mVS[None, kv_head], pages, sK, sV, sScale, sQ, sO, kv_head,
                kv_heads * self.pages.row_threads, group_size, first_position, row_begin, row_end,
                tile_begin, num_splits, num_tiles, end, window, scale, softcap,
            )  # fmt: skip
            gO = cute.domain_offset((0, kv_head * group_size, q_begin), mO)
            gL = cute.domain_offset((kv_head * group_size, q_begin), mL)
            if cutlass.const_expr(self.cluster > 1):
                self.exchange.expect(inbox_full, rows, split_idx)
                self.exchange.send(sO, rows, sInbox, inbox_full, split_idx)
                self.exchange.store(
                    sInbox, inbox_full, rows, split_idx, gO, gL, gSinks, group_size, row_begin,
                    v_factor,
                )  # fmt: skip
            elif cutlass.const_expr(self.split):
                if num_parts == 1:
                    self.partials.store(
                        sO, self.warps_n, rows, gO, gL, gSinks, group_size, row_begin, v_factor
                    )
                else:
                    tile = (seq * kv_heads + kv_head) * row_tiles + row_tile
                    gPartial = mPartial[None, None, None, None, tile]
                    self.partials.store_partial(sO, rows, gPartial[None, None, None, split_idx])
                    if self.partials.arrive(counters + tile, num_parts, is_last):
                        self.partials.store(
                            gPartial, num_parts, rows, gO, gL, gSinks, group_size, row_begin,
                            v_factor,
                        )  # fmt: skip
            else:
                self.partials.store(
                    sO, self.warps_n, rows, gO, gL, gSinks, group_size, row_begin, v_factor
                )

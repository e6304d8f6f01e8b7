"""Latent attention on Hopper: a tile of tokens is in shared memory once, as keys and as values.

A thread block has 64 rows: heads of query tokens. Its two consumer warpgroups take tiles of 64
tokens in turn. One computes the weights of a tile and gives them to the other through shared
memory, and each adds 256 of the 512 columns of the values: tensor cores have work while either
warpgroup computes its softmax. This schedule is FlashMLA's "seesaw", here with a single buffer for
weights that the warpgroups use in turn. A producer warp loads tiles by TMA, 64 columns at a time;
where a page has fewer tokens than a tile, page by page.
Products begin with the first piece that arrives, and the parts of a stage are released one by one.
Two thread blocks with different heads of a sequence may form a cluster, where each loads a half of
every piece for both. Packed rows go through the registers of four producer warps that widen them to
bfloat16.

    barrier          who arrives (how many)           who waits        for what
    q_full           producer warp (1), TMA           both warpgroups  queries have arrived
    full[piece]      producer warp (1), TMA           both warpgroups  a piece has arrived
    full[stage]      producer warps (4), packed rows  both warpgroups  a stage has been written
    empty[half w]    warps of w (4)                   producers        w has read its half
    empty[keys]      warps of the tile's w (4)        producers        w has read the other columns
    weights_full[w]  threads of w (128)               other warpgroup  weights and row max of w
    row_sums_full    all consumers (256)              both warpgroups  row sums of both
    named 1 + w      threads of w (128)               w                the other's weights were read
    named 1 + w      threads of w (128)               w                values beyond the end are 0
    cluster          all threads                      all threads      barriers are initialized
    cluster          all threads                      all threads      nobody arrives any more

``w`` is a consumer warpgroup. In a cluster the warps of both thread blocks arrive at ``empty``. A
warpgroup overwrites the other's weights with its own after its named barrier, when all its warps
have read them.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.online_softmax import LOG2E, LOWEST
from kernelcat.kernels.cute.common.partials import partial_layout
from kernelcat.kernels.cute.common.ring import load, memory, operand
from kernelcat.kernels.cute.common.tma import load_atom
from kernelcat.kernels.cute.flashmla.gather import PRODUCERS, Gather
from kernelcat.kernels.cute.flashmla.layouts import out_layout, used_splits
from kernelcat.kernels.cute.flashmla.loader import VECTOR
from kernelcat.kernels.cute.flashmla.result import Result
from kernelcat.kernels.cute.flashmla.seesaw import (
    BLOCK,
    HALF,
    MMA_THREADS,
    PARTS,
    PIECE,
    PIECES,
    STAGES,
    WARPGROUPS,
    Seesaw,
    as_vectors,
    make_mmas,
    make_registers,
    make_shared,
)
from kernelcat.kernels.cute.flashmla.softmax import ROWS
from kernelcat.reference._mla_row import LATENT, PACKED, ROW

THREADS = MMA_THREADS + 128
PRODUCER_WARP = MMA_THREADS // 32
PIECE_BYTES = 2 * BLOCK * PIECE
LANES = 32


class Wgmma(Seesaw, Result, Gather):
    """Rows of a sequence are the heads of one query token after another.

    ``is_causal``: a row tile ends at the last token that it sees, and the longest begin first.
    """

    def __init__(
        self,
        dtype: str,
        packed: bool,
        page_size: int,
        block_n: int,
        cluster: int,
        scores_first: bool,
        split: bool,
        programmatic: bool,
        is_causal: bool = False,
    ):
        assert block_n == BLOCK and programmatic and not (split and is_causal)
        self.dtype, self.packed, self.page_size = element_type(dtype), packed, page_size
        # Of three warpgroups one produces; all start with 168 registers.
        self.producer_registers, self.mma_registers = (88, 208) if packed else (24, 240)
        self.cluster, self.scores_first, self.split = cluster, scores_first, split
        self.is_causal = is_causal
        self.box = BLOCK if packed else min(page_size, BLOCK)  # tokens that TMA loads at once
        assert self.box == BLOCK or (cluster == 1 and BLOCK % self.box == 0)

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
        partial: cute.Pointer,  # (batch, row_tiles, num_splits, BLOCK, LATENT + 4)
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
        mQ = cute.make_tensor(q, cute.make_layout((rows, ROW), stride=(ROW, 1)))
        slots = pages * self.page_size
        cache = cute.recast_ptr(kv_cache, dtype=self.dtype)
        mK = cute.make_tensor(cache, cute.make_layout((slots, ROW), stride=(ROW, 1)))
        k_major = LayoutEnum.ROW_MAJOR
        tile = (BLOCK, BLOCK, PIECE)
        q_layout = sm90.make_smem_layout_a(k_major, tile, self.dtype, PIECES)
        k_layout = sm90.make_smem_layout_b(k_major, tile, self.dtype, STAGES * PIECES)
        p_layout = sm90.make_smem_layout_a(k_major, tile, self.dtype, 1)
        # The same memory as k_layout: the boxes of a piece follow each other.
        box_layout = sm90.make_smem_layout_b(
            k_major, (BLOCK, self.box, PIECE), self.dtype, STAGES * PIECES * BLOCK // self.box
        )
        q_atom, tQ = load_atom(mQ, q_layout, (BLOCK, PIECE))
        mC = mS = None
        if cutlass.const_expr(self.packed):
            k_atom, tK = q_atom, tQ
            mC, mS = packed_rows(kv_cache, self.dtype, VECTOR), packed_rows(kv_cache, Float32, 1)
        else:
            k_atom, tK = load_atom(mK, box_layout, (self.box, PIECE), self.cluster)

        @cute.struct
        class SharedStorage:
            full: cute.struct.MemRange[Int64, STAGES * PIECES]
            empty: cute.struct.MemRange[Int64, STAGES * PARTS]
            q_full: cute.struct.MemRange[Int64, 1]
            weights_full: cute.struct.MemRange[Int64, WARPGROUPS]
            row_sums_full: cute.struct.MemRange[Int64, 1]
            row_max: cute.struct.MemRange[Float32, BLOCK]
            row_sum: cute.struct.MemRange[Float32, WARPGROUPS * BLOCK]
            q: memory(self.dtype, q_layout)
            k: memory(self.dtype, k_layout)
            p: memory(self.dtype, p_layout)

        self.shared_storage = SharedStorage
        self.kernel(
            q_atom,
            tQ,
            k_atom,
            tK,
            mC,
            mS,
            cute.make_tensor(
                block_table, cute.make_layout((table_width, batch), stride=(1, Int64(table_width)))
            ),
            cute.make_tensor(kv_lens, cute.make_layout(batch)),
            cute.make_tensor(cu_q, cute.make_layout(batch + 1)),
            cute.make_tensor(out, out_layout(8, rows)),
            cute.make_tensor(lse, cute.make_layout(rows)),
            cute.make_tensor(
                partial, partial_layout(2, LATENT, BLOCK, num_splits, batch * row_tiles)
            ),
            q_layout,
            k_layout,
            box_layout,
            p_layout,
            *make_mmas(self.dtype),
            heads,
            sm_scale,
        ).launch(
            grid=(row_tiles, num_splits, batch),
            block=(THREADS, 1, 1),
            cluster=(self.cluster, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        mQ: cute.Tensor,  # (tokens * heads, ROW)
        k_atom: cute.CopyAtom,
        mK: cute.Tensor,  # (slots, ROW)
        mC: cute.Tensor | None,  # (VECTOR, PACKED / 16, slots): packed rows in 16-bit units
        mS: cute.Tensor | None,  # (1, PACKED / 4, slots): mC as float32
        mTable: cute.Tensor,  # (table_width, batch)
        mLens: cute.Tensor,  # (batch,)
        mStarts: cute.Tensor,  # (batch + 1,)
        mO: cute.Tensor,  # (8, LATENT / 8, tokens * heads)
        mL: cute.Tensor,  # (tokens * heads,)
        mPartial: cute.Tensor,  # (2, LATENT / 2 + 2, BLOCK, num_splits, tiles)
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        box_layout: cute.ComposedLayout,
        p_layout: cute.ComposedLayout,
        qk_mma: cute.TiledMma,
        own_mma: cute.TiledMma,
        other_mma: cute.TiledMma,
        heads: Int32,
        sm_scale: Float32,
    ):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        row_tile, split_idx, seq = cute.arch.block_idx()
        row_tiles, num_splits, _ = cute.arch.grid_dim()
        if cutlass.const_expr(self.is_causal):  # the last rows see most, so they begin first
            row_tile = row_tiles - 1 - row_tile
        if warp_idx == PRODUCER_WARP:
            cpasync.prefetch_descriptor(q_atom)
            cpasync.prefetch_descriptor(k_atom)
        storage = SmemAllocator().allocate(self.shared_storage)
        sQ = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sK = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        sP = storage.p.get_tensor(p_layout.outer, swizzle=p_layout.inner)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        q_full = storage.q_full.data_ptr()
        if warp_idx == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(STAGES * PIECES):
                    cute.arch.mbarrier_init(full + i, PRODUCERS // LANES if self.packed else 1)
                for i in cutlass.range_constexpr(STAGES * PARTS):  # four warps release a part
                    cute.arch.mbarrier_init(empty + i, 4 * self.cluster)
                cute.arch.mbarrier_init(q_full, 1)
                for i in cutlass.range_constexpr(WARPGROUPS):
                    weights_full = storage.weights_full.data_ptr() + i
                    cute.arch.mbarrier_init(weights_full, MMA_THREADS // WARPGROUPS)
                cute.arch.mbarrier_init(storage.row_sums_full.data_ptr(), MMA_THREADS)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        cute.arch.barrier()

        # Wait for the kernel before, and let the kernel after start.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        q_begin, kv_len = mStarts[seq], mLens[seq]
        q_len = mStarts[seq + 1] - q_begin
        rows, row_begin = q_len * heads, row_tile * BLOCK
        used = used_splits(kv_len, BLOCK, num_splits)
        tiles = cute.ceil_div(kv_len, BLOCK)
        if cutlass.const_expr(self.is_causal):
            # Up to the last token that a row of the cluster sees.
            end_row = cutlass.min((row_tile // self.cluster + 1) * (self.cluster * BLOCK), rows)
            visible = kv_len - q_len + cute.ceil_div(end_row, heads)
            tiles = cute.ceil_div(cutlass.max(visible, 0), BLOCK)
        num_tiles = cute.ceil_div(cutlass.max(tiles - split_idx, 0), num_splits)
        # Either both thread blocks of a cluster have work, or neither.
        has_rows = (row_tile // self.cluster * (self.cluster * BLOCK) < rows) & (split_idx < used)
        if warp_idx >= PRODUCER_WARP:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if (warp_idx == PRODUCER_WARP) & has_rows:
                self.load_query(q_atom, mQ, sQ, q_full, q_begin * heads + row_begin)
                if cutlass.const_expr(not self.packed):
                    sBoxes = storage.k.get_tensor(box_layout.outer, swizzle=box_layout.inner)
                    self.produce(
                        k_atom, mK, sBoxes, full, empty, mTable[None, seq], kv_len, split_idx,
                        num_splits, num_tiles,
                    )  # fmt: skip
            if cutlass.const_expr(self.packed):  # noqa: SIM102  (the DSL's own branch)
                if has_rows:
                    self.gather(
                        mC, mS[0, None, None], as_vectors(storage.k.data_ptr(), STAGES * PIECES),
                        full, empty, mTable[None, seq], kv_len, split_idx, num_splits, num_tiles,
                    )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(self.mma_registers)
            if has_rows:
                first_row, tile = q_begin * heads + row_begin, seq * row_tiles + row_tile
                self.consume(
                    storage, (qk_mma, own_mma, other_mma), sQ, sK, sP,
                    cute.domain_offset((0, 0, first_row), mO), cute.domain_offset(first_row, mL),
                    mPartial[None, None, None, split_idx, tile], heads, row_begin,
                    rows - row_begin, kv_len - q_len, kv_len, split_idx, num_splits, num_tiles,
                    used, sm_scale,
                )  # fmt: skip
        if cutlass.const_expr(self.cluster > 1):
            # The peer may still arrive at this thread block's barriers: do not exit before it.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def load_query(
        self,
        q_atom: cute.CopyAtom,
        mQ: cute.Tensor,  # (tokens * heads, ROW)
        sQ: cute.Tensor,  # (BLOCK, PIECE, PIECES)
        q_full: cute.Pointer,
        first_row: Int32,
    ):
        """Loads a tile of queries; runs in one warp.

        Rows beyond the sequence's are those of the next one, and their results are not stored.
        """
        q = operand(q_atom, sQ, cute.domain_offset((first_row, 0), mQ), (BLOCK, PIECE))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(q_full, PIECES * PIECE_BYTES)
        for i in cutlass.range_constexpr(PIECES):
            load(q, 0, i, i, q_full)

    @cute.jit
    def produce(
        self,
        k_atom: cute.CopyAtom,
        mK: cute.Tensor,  # (slots, ROW)
        sBoxes: cute.Tensor,  # (box, PIECE, STAGES * PIECES * boxes)
        full: cute.Pointer,  # (STAGES * PIECES,)
        empty: cute.Pointer,  # (STAGES * PARTS,)
        gTable: cute.Tensor,  # (table_width,)
        kv_len: Int32,
        split_idx: Int32,
        num_splits: Int32,
        num_tiles: Int32,
    ):
        """Loads all tiles; runs in one warp, whose lanes look up the pages of 32 boxes at once.

        A box beyond the sequence's last page is that page once more: entries of the table behind it
        are not used.
        """
        rank = Int32(0)
        if cutlass.const_expr(self.cluster > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        cluster_mask = (1 << self.cluster) - 1
        k = operand(k_atom, sBoxes, mK, (self.box, PIECE), self.cluster, rank, cluster_mask)
        boxes, page_boxes = BLOCK // self.box, self.page_size // self.box
        lane_tiles = LANES // boxes
        page, lane = Int32(0), cute.arch.lane_idx()
        for index in cutlass.range(num_tiles, unroll=1):
            if index % lane_tiles == 0:
                lane_index = cutlass.min(index + lane // boxes, num_tiles - 1)
                entry = (split_idx + lane_index * num_splits) // page_boxes
                if cutlass.const_expr(boxes > 1):
                    last = (kv_len - 1) // self.page_size
                    entry = cutlass.min(entry * boxes + lane % boxes, last)
                page = gTable[entry]
            tile = split_idx + index * num_splits
            slot_boxes = [
                cute.arch.shuffle_sync(page, index % lane_tiles * boxes + j) * page_boxes
                + tile % page_boxes
                for j in range(boxes)
            ]
            stage, phase = index % STAGES, (index // STAGES + 1) % 2
            for part in cutlass.range_constexpr(PARTS):
                # First the columns that only keys have, then the half of the tile's own warpgroup.
                part_idx = (stage + part - 1) % WARPGROUPS
                first, count = part_idx * HALF, HALF
                if cutlass.const_expr(part == 0):
                    part_idx, first, count = WARPGROUPS, PIECES - 1, 1
                cute.arch.mbarrier_wait(empty + stage * PARTS + part_idx, phase)
                for i in cutlass.range_constexpr(count):
                    piece = stage * PIECES + first + i
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + piece, PIECE_BYTES)
                    for j in cutlass.range_constexpr(boxes):
                        load(k, slot_boxes[j], first + i, piece * boxes + j, full + piece)

    @cute.jit
    def consume(
        self,
        storage: cutlass.Constexpr,
        mmas: tuple,
        sQ: cute.Tensor,  # (BLOCK, PIECE, PIECES)
        sK: cute.Tensor,  # (BLOCK, PIECE, STAGES * PIECES)
        sP: cute.Tensor,  # (BLOCK, BLOCK, 1)
        gO: cute.Tensor,  # (8, LATENT / 8, rows)
        gL: cute.Tensor,  # (rows,)
        gPartial: cute.Tensor,  # (2, LATENT / 2 + 2, BLOCK)
        heads: Int32,
        row_begin: Int32,
        num_rows: Int32,
        first_position: Int32,  # of the sequence's query tokens
        kv_len: Int32,
        split_idx: Int32,
        num_splits: Int32,
        num_tiles: Int32,
        used: Int32,
        sm_scale: Float32,
    ):
        """Attends to all tiles and stores the rows; runs in both consumer warpgroups."""
        tidx = cute.arch.thread_idx()[0] % 128
        warpgroup_idx = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
        for mma in mmas:
            mma.set(warpgroup.Field.ACCUMULATE, True)
        shared = make_shared(
            mmas, sQ, sK, sP, as_vectors(storage.k.data_ptr(), STAGES * PIECES),
            storage.row_max.data_ptr(), storage.full.data_ptr(), storage.empty.data_ptr(),
            storage.weights_full.data_ptr(), warpgroup_idx, tidx, self.dtype,
        )  # fmt: skip
        registers = make_registers(mmas)
        registers.out.fill(0.0)
        registers.row_max.fill(LOWEST)
        registers.row_sum.fill(0.0)
        for half in cutlass.range_constexpr(ROWS):
            row = tidx // LANES * 16 + tidx % LANES // 4 + 8 * half
            row = row_begin + cutlass.min(row, num_rows - 1)
            registers.last_visible[half] = first_position + row // heads
        min_visible = first_position + row_begin // heads
        cute.arch.mbarrier_wait(storage.q_full.data_ptr(), 0)
        self.attend(
            mmas, shared, registers, warpgroup_idx, split_idx, num_splits, num_tiles, min_visible,
            kv_len, sm_scale * LOG2E,
        )  # fmt: skip
        sRowSum = storage.row_sum.get_tensor(cute.make_layout((BLOCK, WARPGROUPS)))
        self.store_rows(
            mmas[0], registers, sRowSum, storage.row_sums_full.data_ptr(), sQ,
            as_vectors(storage.q.data_ptr(), PIECES), gO, gL, gPartial, warpgroup_idx, num_rows,
            used,
        )  # fmt: skip


def packed_rows(cache, dtype, vector):
    """Packed rows as (vector, vectors, slots) of elements of ``dtype``."""
    row = 8 * PACKED // dtype.width
    layout = cute.make_layout(
        (vector, row // vector, 1), stride=(1, vector, cute.assume(Int64(row), divby=row))
    )
    return cute.make_tensor(cute.recast_ptr(cache, dtype=dtype), layout)

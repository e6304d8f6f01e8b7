"""Products of 4-bit codes on Blackwell's tensor cores, which apply the block scales themselves.

Persistent; the roles of the warps and their barriers are in ``common/tensor_memory.py``. TMA loads
codes and scales; the warp that issues the products first copies the scales to tensor memory. With
``ctas`` = 2 a pair of SMs works as one: each holds half of A's rows, the scales of these rows, half
of W's codes, and the scales of all of W's rows.

Two accumulators of 256 columns and the scales need more than the 512 columns of tensor memory. The
accumulators then overlap, and the columns that they share are read first. This, and that every
other tile of 64 rows of W has its scales two columns further on, is from CUTLASS's examples for the
CuTe DSL (blackwell, dense_blockscaled_gemm_persistent.py). Only compiled, never run yet.
"""

from math import ceil

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import Float4E2M1FN, Float8E4M3FN, Float8E8M0FNU, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from kernelcat.kernels.cute.common.epilogue import VECTOR, Epilogue
from kernelcat.kernels.cute.common.ring import SHARED_BYTES
from kernelcat.kernels.cute.common.scale_atoms import (
    ATOM_BYTES,
    ATOM_COLS,
    ATOM_COLUMNS,
    ATOM_ROWS,
    to_tensor_memory,
)
from kernelcat.kernels.cute.common.tensor_memory import (
    COLUMNS,
    LOAD_WARP,
    MMA_WARP,
    NUM_ACCUMULATORS,
    RESERVED_BYTES,
    ROWS,
    TENSOR_COLUMNS,
    THREADS,
    cta_group,
    make_allocator,
    make_operands,
    make_rings,
    read_columns,
)
from kernelcat.kernels.cute.common.tile_order import grouped_tile
from kernelcat.kernels.cute.common.tma import partition
from kernelcat.kernels.cute.nvfp4_matmul.scales import (
    as_pairs,
    load_atom,
    place_of,
    stages_of,
    stored,
)

BLOCK_K = 256
MMA_K = 64
MAX_STAGES = 8
GROUP_ROWS = 2048
"""Rows of D that are computed before the next column of tiles."""


class BlockScaled:
    """Tiles of 128 * ``ctas`` x ``block_n``, 64, 128 or 256.

    K is a multiple of 32, N of 8, or of 16 for swiglu.
    """

    def __init__(self, out: str, nvfp4: bool, bias: bool, activation: str, block_n: int, ctas: int):
        self.epilogue = Epilogue(out, bias, activation, residual=False)
        self.nvfp4, self.block_n, self.ctas = nvfp4, block_n, ctas
        self.size = 16 if nvfp4 else 32
        self.scale_type = Float8E4M3FN if nvfp4 else Float8E8M0FNU
        self.tiler = (ROWS * ctas, block_n, BLOCK_K)
        self.group = cta_group(ctas)
        self.atoms_k = BLOCK_K // (ATOM_COLS * self.size)
        self.atoms_n = max(1, block_n // ATOM_ROWS)
        num_atoms = self.atoms_k * (1 + self.atoms_n)
        self.stage_bytes = (ROWS + block_n // ctas) * BLOCK_K // 2 + ATOM_BYTES * num_atoms
        self.num_stages = min(MAX_STAGES, (SHARED_BYTES - RESERVED_BYTES) // self.stage_bytes)
        # Tensor memory: accumulators from the first column on, scales up to the last one.
        self.a_scale_column = TENSOR_COLUMNS - ATOM_COLUMNS * num_atoms
        self.w_scale_column = self.a_scale_column + ATOM_COLUMNS * self.atoms_k
        self.spread = min(block_n, self.a_scale_column - block_n)
        self.overlap = block_n - self.spread
        # Parts of an accumulator that are read before the next tile's products may begin.
        self.num_shared = ceil((self.overlap or block_n) / COLUMNS)

    def part_of(self, i: int, accumulator):
        """The part that is read as the ``i``-th one.

        Overlapping accumulators share the end of the first and the start of the second one: the
        first is read from its end, the second from its start.
        """
        if not self.overlap:
            return i
        return i * accumulator + (self.block_n // COLUMNS - 1 - i) * (1 - accumulator)

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (m, k / 2) bytes
        w: cute.Pointer,  # (n, k / 2) bytes
        a_block_scale: cute.Pointer,  # (m, k / size) bytes, swizzled
        w_scale: cute.Pointer,  # (n, k / size) bytes, swizzled
        global_scale: cute.Pointer,  # (1,) float32, for NVFP4
        bias: cute.Pointer,  # (n,)
        d: cute.Pointer,  # (m, n), or (m, n / 2) of swiglu
        m: Int32,
        n: Int32,
        k: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        n, k = cute.assume(n, divby=VECTOR), cute.assume(k, divby=32)
        a, w = cute.recast_ptr(a, dtype=Float4E2M1FN), cute.recast_ptr(w, dtype=Float4E2M1FN)
        mA = cute.make_tensor(a, cute.make_layout((m, k), stride=(k, 1)))
        mW = cute.make_tensor(w, cute.make_layout((n, k), stride=(k, 1)))
        mG = cute.make_tensor(global_scale, cute.make_layout(1))
        mBias, _, mD = self.epilogue.vectors(bias, d, d, m, n)
        tiled_mma = self.products()
        (a_layout, a_atom, tA), (w_layout, w_atom, tW) = make_operands(
            tiled_mma, self.tiler, Float4E2M1FN, self.num_stages, mA, mW, self.ctas
        )
        sa_stages = stages_of(self.atoms_k, 1, self.num_stages)
        sw_stages = stages_of(self.atoms_k, self.atoms_n, self.num_stages)
        sa_atom, tSA = load_atom(self.group, stored(a_block_scale, m, k, self.size), sa_stages)
        sw_atom, tSW = load_atom(self.group, stored(w_scale, n, k, self.size), sw_stages)

        @cute.struct
        class SharedStorage:
            stages: cute.struct.MemRange[Int64, 2 * self.num_stages]
            accumulators: cute.struct.MemRange[Int64, 2 * NUM_ACCUMULATORS]
            freed: Int64
            tensor_memory: Int32

        self.shared_storage = SharedStorage
        num_tiles_m, num_tiles_n = cute.ceil_div(m, self.tiler[0]), cute.ceil_div(n, self.block_n)
        self.kernel(
            a_atom, tA, w_atom, tW, sa_atom, tSA, sw_atom, tSW, mG, mBias, mD, tiled_mma,
            a_layout, w_layout, sa_stages, sw_stages, num_tiles_m, num_tiles_n,
        ).launch(
            grid=(num_ctas, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(self.ctas, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    @cute.jit
    def products(self):
        """The MMA: an E4M3 scale for 16 codes (NVFP4), or an E8M0 scale for 32 codes (MXFP4)."""
        shape, source = (*self.tiler[:2], MMA_K), tcgen05.OperandSource.SMEM
        if cutlass.const_expr(self.nvfp4):
            op = tcgen05.MmaMXF4NVF4Op(self.scale_type, shape, self.group, source)
        else:
            op = tcgen05.MmaMXF4Op(shape, self.group, source)
        return cute.make_tiled_mma(op)

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom,
        mA: cute.Tensor,  # (m, k), coordinates for TMA
        w_atom: cute.CopyAtom,
        mW: cute.Tensor,  # (n, k), coordinates for TMA
        sa_atom: cute.CopyAtom,
        mSA: cute.Tensor,  # (PAIRS, atoms along K, atoms along M), coordinates for TMA
        sw_atom: cute.CopyAtom,
        mSW: cute.Tensor,  # (PAIRS, atoms along K, atoms along N), coordinates for TMA
        mG: cute.Tensor,  # (1,)
        mBias: cute.Tensor,  # (8, n / 8)
        mD: cute.Tensor,  # (8, columns of D / 8, m)
        tiled_mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        w_layout: cute.ComposedLayout,
        sa_stages: cute.Layout,
        sw_stages: cute.Layout,
        num_tiles_m: Int32,
        num_tiles_n: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if warp_idx == LOAD_WARP:
            for atom in (a_atom, w_atom, sa_atom, sw_atom):
                cpasync.prefetch_descriptor(atom)
        shared = SmemAllocator()
        storage = shared.allocate(self.shared_storage)
        sA = shared.allocate_tensor(Float4E2M1FN, a_layout.outer, 1024, swizzle=a_layout.inner)
        sW = shared.allocate_tensor(Float4E2M1FN, w_layout.outer, 1024, swizzle=w_layout.inner)
        sa_layout, ta_layout, sw_layout, tw_layout = self.scale_layouts(tiled_mma)
        sSA = shared.allocate_tensor(self.scale_type, sa_layout, 1024)
        sSW = shared.allocate_tensor(self.scale_type, sw_layout, 1024)
        tmem = make_allocator(storage, self.ctas)
        num_accumulators = 1 if self.overlap else NUM_ACCUMULATORS
        producer, consumer, issuer, reader = make_rings(
            storage, self.num_stages, self.stage_bytes, num_accumulators, self.ctas
        )
        tmem.allocate(TENSOR_COLUMNS)
        tmem.wait_for_alloc()
        tmem_ptr = tmem.retrieve_ptr(Float32)

        thr_mma = tiled_mma.get_slice(rank)
        gA = cute.local_tile(mA, (self.tiler[0], BLOCK_K), (None, None))
        gW = cute.local_tile(mW, (self.block_n, BLOCK_K), (None, None))
        tAsA, tAgA = partition(a_atom, sA, thr_mma.partition_A(gA))
        tWsW, tWgW = partition(w_atom, sW, thr_mma.partition_B(gW))
        gSA = cute.local_tile(mSA, sa_stages.shape[:3], (0, None, None))
        gSW = cute.local_tile(mSW, sw_stages.shape[:3], (0, None, None))
        tSAs, tSAg = partition(sa_atom, as_pairs(sSA, sa_stages), gSA)
        tSWs, tSWg = partition(sw_atom, as_pairs(sSW, sw_stages), gSW)
        tCrA, tCrW = tiled_mma.make_fragment_A(sA), tiled_mma.make_fragment_B(sW)
        tSA = self.scales_at(tmem_ptr, self.a_scale_column, ta_layout)
        tSW = self.scales_at(tmem_ptr, self.w_scale_column, tw_layout)
        acc = tiled_mma.make_fragment_C(tiled_mma.partition_shape_C(self.tiler[:2])).layout
        both = cute.append(acc, cute.make_layout(NUM_ACCUMULATORS, stride=self.spread))
        tCtAcc = cute.make_tensor(tmem_ptr, both)  # (MMA, MMA_M, MMA_N, NUM_ACCUMULATORS)
        num_k_blocks = cute.size(gA, mode=[3])
        group_m = GROUP_ROWS // self.tiler[0]
        first = cute.arch.block_idx()[0] // self.ctas
        step = cute.arch.grid_dim()[0] // self.ctas

        if warp_idx == LOAD_WARP:
            for tile in cutlass.range(first, num_tiles_m * num_tiles_n, step, unroll=1):
                m_idx, n_idx = grouped_tile(tile, num_tiles_m, num_tiles_n, group_m)
                sa_idx = m_idx * self.ctas + rank
                sw_idx, _ = place_of(n_idx, self.block_n)
                for k_idx in cutlass.range(num_k_blocks, unroll=1):
                    stage = producer.acquire_and_advance()
                    target, barrier = stage.index, stage.barrier
                    source = tAgA[None, m_idx, k_idx]
                    cute.copy(a_atom, source, tAsA[None, target], tma_bar_ptr=barrier)
                    source = tWgW[None, n_idx, k_idx]
                    cute.copy(w_atom, source, tWsW[None, target], tma_bar_ptr=barrier)
                    source = tSAg[None, k_idx, sa_idx]
                    cute.copy(sa_atom, source, tSAs[None, target], tma_bar_ptr=barrier)
                    source = tSWg[None, k_idx, sw_idx]
                    cute.copy(sw_atom, source, tSWs[None, target], tma_bar_ptr=barrier)
            # A thread block must not exit while products that read its stages may be running.
            producer.tail()
        elif warp_idx == MMA_WARP:
            if rank == 0:
                sa_copy, tSAd, tSAt = to_tensor_memory(self.group, sSA, tSA)
                sw_copy, tSWd, tSWt = to_tensor_memory(self.group, sSW, tSW)
                for tile in cutlass.range(first, num_tiles_m * num_tiles_n, step, unroll=1):
                    _, n_idx = grouped_tile(tile, num_tiles_m, num_tiles_n, group_m)
                    tSWn = self.scales_of_tile(tmem_ptr, tSW, n_idx)
                    accumulator = issuer.acquire_and_advance()
                    tCtTile = tCtAcc[None, None, None, accumulator.count % NUM_ACCUMULATORS]
                    tiled_mma.set(tcgen05.Field.ACCUMULATE, False)
                    for _ in cutlass.range(num_k_blocks, unroll=1):
                        stage = consumer.wait_and_advance()
                        # Products and copies to tensor memory run in the order of their issue.
                        at = (None, None, None, None, stage.index)
                        cute.copy(sa_copy, tSAd[at], tSAt)
                        cute.copy(sw_copy, tSWd[at], tSWt)
                        for block in cutlass.range_constexpr(BLOCK_K // MMA_K):
                            at, scale_at = (None, None, block, stage.index), (None, None, block)
                            cute.gemm(
                                tiled_mma, tCtTile, [tCrA[at], tSA[scale_at]],
                                [tCrW[at], tSWn[scale_at]], tCtTile,
                            )  # fmt: skip
                            tiled_mma.set(tcgen05.Field.ACCUMULATE, True)
                        stage.release()
                    accumulator.commit()
                issuer.tail()
        else:
            factor = Float32(1)
            if cutlass.const_expr(self.nvfp4):
                factor = mG[0]
            cD = thr_mma.partition_C(cute.make_identity_tensor(self.tiler[:2]))
            for tile in cutlass.range(first, num_tiles_m * num_tiles_n, step, unroll=1):
                m_idx, n_idx = grouped_tile(tile, num_tiles_m, num_tiles_n, group_m)
                handle = reader.wait_and_advance()
                self.store(tCtAcc, handle, cD, factor, mBias, mD, m_idx, n_idx, tidx)
        cute.arch.sync_threads()
        tmem.relinquish_alloc_permit()
        tmem.free(tmem_ptr)

    @cute.jit
    def scale_layouts(self, tiled_mma: cute.TiledMma):
        """Layouts of A's scales in stages and in tensor memory, then of W's."""
        tiler, size = self.tiler, self.size
        a_layout = blockscaled.make_smem_layout_sfa(tiled_mma, tiler, size, self.num_stages)
        w_layout = blockscaled.make_smem_layout_sfb(tiled_mma, tiler, size, self.num_stages)
        stage = (None, None, None, 0)
        return (
            a_layout,
            blockscaled.make_tmem_layout_sfa(tiled_mma, tiler, size, cute.slice_(a_layout, stage)),
            w_layout,
            blockscaled.make_tmem_layout_sfb(tiled_mma, tiler, size, cute.slice_(w_layout, stage)),
        )

    @cute.jit
    def scales_at(self, tmem_ptr: cute.Pointer, column, layout: cute.Layout):
        """The scales that begin at a column of tensor memory."""
        return cute.make_tensor(cute.recast_ptr(tmem_ptr + column, dtype=self.scale_type), layout)

    @cute.jit
    def scales_of_tile(
        self,
        tmem_ptr: cute.Pointer,
        tSW: cute.Tensor,  # W's scales of a stage in tensor memory
        n_idx: Int32,
    ):
        """W's scales of a tile: tiles of 64 rows use two of an atom's four columns of 32 rows."""
        found = tSW
        if cutlass.const_expr(self.block_n < ATOM_ROWS):
            _, column = place_of(n_idx, self.block_n)
            found = self.scales_at(tmem_ptr, self.w_scale_column + column, tSW.layout)
        return found

    @cute.jit
    def store(
        self,
        tCtAcc: cute.Tensor,  # (MMA, MMA_M, MMA_N, NUM_ACCUMULATORS)
        handle,  # of the accumulator
        cD: cute.Tensor,  # coordinates in the tile, like an accumulator
        factor: Float32,
        mBias: cute.Tensor,  # (8, n / 8)
        mD: cute.Tensor,  # (8, columns of D / 8, m)
        m_idx: Int32,
        n_idx: Int32,
        tidx: Int32,
    ):
        """Tensor memory -> registers -> global memory, ``COLUMNS`` of a row at a time.

        The accumulator is released when the products that may then begin overwrite only columns
        that have been read: all of the accumulator, or, where two overlap, the columns they share.
        """
        accumulator = handle.count % NUM_ACCUMULATORS
        tCtTile = tCtAcc[None, None, None, accumulator]
        tiled_copy, tDtC, tDcD, values = read_columns(tCtTile, cD, tidx)
        width = VECTOR * self.epilogue.span
        z = cute.make_rmem_tensor(width, Float32)
        for i in cutlass.range_constexpr(self.block_n // COLUMNS):
            part = self.part_of(i, accumulator)
            cute.copy(tiled_copy, tDtC[None, None, part], values)
            cute.arch.fence_view_async_tmem_load()
            if cutlass.const_expr(i == self.num_shared - 1):
                handle.release()
            row, col = tDcD[None, None, part][0]
            row = m_idx * self.tiler[0] + row
            for j in cutlass.range_constexpr(COLUMNS // width):
                vector = (n_idx * self.block_n + col) // width + j
                if row < mD.shape[2] and vector < mD.shape[1]:
                    for v in cutlass.range_constexpr(width):
                        z[v] = values[j * width + v] * factor
                    self.epilogue.store_vector(z, mBias, mD, mD, row, vector)

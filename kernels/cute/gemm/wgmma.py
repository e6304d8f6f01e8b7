"""GEMM on Hopper's tensor cores: persistent, warp-specialized, TMA in and out.

One producer warp keeps a ring of shared-memory stages full by TMA; one or two warpgroups run WGMMA
on them and write their tile through shared memory by TMA. TMA fills what lies outside a matrix with
zeros and drops what is written there, so ragged sizes need no code.

``swap`` computes D^T = B @ A^T: the weights' rows then fill WGMMA's 64-row side and the few rows of
A its narrow side. ``split`` cuts K among CTAs: float32 partial sums go to a workspace and a second
kernel adds them, so that a product of few tiles still keeps every SM streaming.

The schedule follows what CUTLASS's persistent Hopper example and QuACK's GEMM do.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.gemm.raster import grouped

BLOCK_K = 64
SHARED_BYTES = 227 * 1024
MAX_STAGES = 12
EPI_STAGES = 2
REDUCE_THREADS = 256
VECTOR = 8


class Wgmma:
    """D = A @ B^T (+ bias) in tiles of ``block_m`` x ``block_n`` of D (of D^T where ``swap``)."""

    def __init__(
        self,
        dtype: str,
        bias: bool,
        block_m: int,
        block_n: int,
        cluster: int,
        swap: bool,
        split: bool,
    ):
        self.dtype = element_type(dtype)
        self.has_bias, self.swap, self.split = bias, swap, split
        self.block_m, self.block_n = block_m, block_n
        self.cluster = cluster
        self.warpgroups = block_m // 64
        self.mma_threads = 128 * self.warpgroups
        # setmaxnreg works on whole warpgroups; alone, one warpgroup needs no more registers.
        self.reallocate = self.warpgroups == 2
        self.threads = self.mma_threads + (128 if self.reallocate else 32)
        self.producer_warp = self.mma_threads // 32
        self.group_m = (16 if block_n > block_m else 8) // cluster
        self.layout = LayoutEnum.COL_MAJOR if swap else LayoutEnum.ROW_MAJOR
        self.epi_n = min(64, block_n)
        epi_bytes = 0 if split else 2 * EPI_STAGES * block_m * self.epi_n
        stage_bytes = 2 * (block_m + block_n) * BLOCK_K
        self.stages = min(MAX_STAGES, (SHARED_BYTES - 2048 - epi_bytes) // stage_bytes)
        self.epi_barrier = pipeline.NamedBarrier(barrier_id=1, num_threads=self.mma_threads)

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (m, k)
        b: cute.Pointer,  # (n, k)
        bias: cute.Pointer,  # (n,)
        d: cute.Pointer,  # (m, n)
        partial: cute.Pointer,  # (num_splits, m, n), m and n rounded up to whole tiles
        m: Int32,
        n: Int32,
        k: Int32,
        num_splits: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        n, k = cute.assume(n, divby=VECTOR), cute.assume(k, divby=VECTOR)
        mA = cute.make_tensor(a, cute.make_layout((m, k), stride=(k, 1)))
        mB = cute.make_tensor(b, cute.make_layout((n, k), stride=(k, 1)))
        mD = cute.make_tensor(d, cute.make_layout((m, n), stride=(n, 1)))
        mBias = cute.make_tensor(bias, cute.make_layout(n))
        if cutlass.const_expr(self.swap):
            mA, mB = mB, mA
            mD = cute.make_tensor(d, cute.make_layout((n, m), stride=(1, n)))
        rows, cols = mA.shape[0], mB.shape[0]
        tiles_m = cute.ceil_div(rows, self.block_m * self.cluster)
        tiles_n = cute.ceil_div(cols, self.block_n)
        mP = self.partial_sums(partial, tiles_m, tiles_n, num_splits)

        k_major = LayoutEnum.ROW_MAJOR
        tile = (self.block_m, self.block_n, BLOCK_K)
        tiled_mma = sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            k_major.sm90_mma_major_mode(),
            k_major.sm90_mma_major_mode(),
            Float32,
            (self.warpgroups, 1, 1),
            tiler_mn=(64, self.block_n),
        )
        a_layout = sm90.make_smem_layout_a(k_major, tile, self.dtype, self.stages)
        b_layout = sm90.make_smem_layout_b(k_major, tile, self.dtype, self.stages)
        epi_tile = (self.block_m, self.epi_n)
        d_layout = sm90.make_smem_layout_epi(self.dtype, self.layout, epi_tile, EPI_STAGES)

        load = cpasync.CopyBulkTensorTileG2SOp()
        multicast = cpasync.CopyBulkTensorTileG2SMulticastOp()
        a_atom, tA = cpasync.make_tiled_tma_atom(
            load, mA, cute.slice_(a_layout, (None, None, 0)), (self.block_m, BLOCK_K)
        )
        b_atom, tB = cpasync.make_tiled_tma_atom(
            multicast if cutlass.const_expr(self.cluster > 1) else load,
            mB,
            cute.slice_(b_layout, (None, None, 0)),
            (self.block_n, BLOCK_K),
            num_multicast=self.cluster,
        )
        d_atom, tD = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(),
            mD,
            cute.slice_(d_layout, (None, None, 0)),
            epi_tile,
        )
        d_elements = 1 if self.split else cute.cosize(d_layout)

        @cute.struct
        class SharedStorage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            a: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(b_layout)], 1024]
            d: cute.struct.Align[cute.struct.MemRange[self.dtype, d_elements], 1024]

        self.shared_storage = SharedStorage
        self.kernel(
            a_atom, tA, b_atom, tB, d_atom, tD, mBias, mP,
            tiled_mma, a_layout, b_layout, d_layout, tiles_m, tiles_n, num_splits,
        ).launch(
            grid=(num_ctas, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip
        if cutlass.const_expr(self.split):
            vectors = n // VECTOR
            self.reduce(mP, mBias, d, m, vectors, num_splits).launch(
                grid=(cute.ceil_div(m * vectors, REDUCE_THREADS), 1, 1),
                block=(REDUCE_THREADS, 1, 1),
                stream=stream,
            )

    def partial_sums(self, partial, tiles_m, tiles_n, num_splits):
        """The workspace as the main kernel sees it: (rows, cols, splits), of whole tiles."""
        rows = tiles_m * (self.cluster * self.block_m)
        cols = tiles_n * self.block_n
        stride = (1, rows, rows * cols) if self.swap else (cols, 1, rows * cols)
        return cute.make_tensor(
            partial, cute.make_layout((rows, cols, num_splits), stride=stride)
        )

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom,
        mA: cute.Tensor,
        b_atom: cute.CopyAtom,
        mB: cute.Tensor,
        d_atom: cute.CopyAtom,
        mD: cute.Tensor,
        mBias: cute.Tensor,
        mP: cute.Tensor,
        tiled_mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        d_layout: cute.ComposedLayout,
        tiles_m: Int32,
        tiles_n: Int32,
        num_splits: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta_rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if warp_idx == self.producer_warp:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(b_atom)
            if cutlass.const_expr(not self.split):
                cpasync.prefetch_descriptor(d_atom)

        storage = SmemAllocator().allocate(self.shared_storage)
        sA = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sB = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        tx_bytes = cute.size_in_bytes(self.dtype, cute.slice_(a_layout, (None, None, 0)))
        tx_bytes += cute.size_in_bytes(self.dtype, cute.slice_(b_layout, (None, None, 0)))
        # Each warp of either CTA that reads a multicast stage frees it in both.
        releases = self.cluster * 4 * self.warpgroups
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.barriers.data_ptr(),
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, releases),
            tx_count=tx_bytes,
            cta_layout_vmnk=cute.make_layout((1, self.cluster, 1, 1)),
        )

        k_tiles = cute.ceil_div(mA.shape[1], BLOCK_K)
        cluster_idx = cute.arch.block_idx()[0] // self.cluster
        num_clusters = cute.arch.grid_dim()[0] // self.cluster
        num_works = tiles_m * tiles_n * num_splits

        if warp_idx >= self.producer_warp:
            if cutlass.const_expr(self.reallocate):
                cute.arch.setmaxregister_decrease(40)
            if warp_idx == self.producer_warp:
                gA = cute.local_tile(mA, (self.block_m, BLOCK_K), (None, None))
                gB = cute.local_tile(mB, (self.block_n, BLOCK_K), (None, None))
                tAsA, tAgA = cpasync.tma_partition(
                    a_atom, 0, cute.make_layout(1),
                    cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2),
                )  # fmt: skip
                tBsB, tBgB = cpasync.tma_partition(
                    b_atom, cta_rank, cute.make_layout(self.cluster),
                    cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2),
                )  # fmt: skip
                everyone = cutlass.Int16((1 << self.cluster) - 1)
                mask = everyone if cutlass.const_expr(self.cluster > 1) else None
                state = pipeline.make_pipeline_state(
                    pipeline.PipelineUserType.Producer, self.stages
                )
                for work in cutlass.range(cluster_idx, num_works, num_clusters, unroll=1):
                    m_idx, n_idx, split_idx = self.tile_of(work, tiles_m, tiles_n, cta_rank)
                    k_begin = split_idx * k_tiles // num_splits
                    k_end = (split_idx + 1) * k_tiles // num_splits
                    for k_idx in cutlass.range(k_begin, k_end, unroll=1):
                        ring.producer_acquire(state)
                        barrier = ring.producer_get_barrier(state)
                        cute.copy(
                            a_atom,
                            tAgA[None, m_idx, k_idx],
                            tAsA[None, state.index],
                            tma_bar_ptr=barrier,
                        )
                        cute.copy(
                            b_atom,
                            tBgB[None, n_idx, k_idx],
                            tBsB[None, state.index],
                            tma_bar_ptr=barrier,
                            mcast_mask=mask,
                        )
                        state.advance()
                # A CTA must not exit while its peer may still signal its barriers.
                ring.producer_tail(state)
        else:
            if cutlass.const_expr(self.reallocate):
                cute.arch.setmaxregister_increase(232)
            warpgroup_idx = cute.arch.make_warp_uniform(tidx // 128)
            thr_mma = tiled_mma.get_slice(
                cute.make_layout(self.warpgroups, stride=128)(warpgroup_idx)
            )
            tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA))
            tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))
            cD = cute.make_identity_tensor((self.block_m, self.block_n))
            tCcD = tiled_mma.get_slice(tidx).partition_C(cD)
            acc = cute.make_rmem_tensor(tCcD.shape, Float32)
            read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            release = pipeline.make_pipeline_state(
                pipeline.PipelineUserType.Consumer, self.stages
            )
            for work in cutlass.range(cluster_idx, num_works, num_clusters, unroll=1):
                m_idx, n_idx, split_idx = self.tile_of(work, tiles_m, tiles_n, cta_rank)
                k_begin = split_idx * k_tiles // num_splits
                k_end = (split_idx + 1) * k_tiles // num_splits
                acc.fill(0.0)
                tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.fence()
                for k_idx in cutlass.range(k_begin, k_end, unroll=1):
                    ring.consumer_wait(read)
                    for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                        at = (None, None, block, read.index)
                        cute.gemm(tiled_mma, acc, tCrA[at], tCrB[at], acc)
                    warpgroup.commit_group()
                    read.advance()
                    # The previous stage is free once its products, one group back, are done.
                    warpgroup.wait_group(1)
                    if k_idx > k_begin:
                        ring.consumer_release(release)
                        release.advance()
                warpgroup.wait_group(0)
                if k_end > k_begin:
                    ring.consumer_release(release)
                    release.advance()
                if cutlass.const_expr(self.split):
                    gP = cute.local_tile(
                        mP[None, None, split_idx], (self.block_m, self.block_n), (m_idx, n_idx)
                    )
                    cute.autovec_copy(acc, tiled_mma.get_slice(tidx).partition_C(gP))
                else:
                    if cutlass.const_expr(self.has_bias):
                        self.add_bias(acc, tCcD, mBias, m_idx, n_idx)
                    sD = storage.d.get_tensor(d_layout.outer, swizzle=d_layout.inner)
                    gD = cute.local_tile(mD, (self.block_m, self.block_n), (m_idx, n_idx))
                    self.store_tile(acc, tiled_mma, sD, gD, d_atom, tidx, warp_idx)
            if cutlass.const_expr(not self.split):
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def tile_of(self, work: Int32, tiles_m: Int32, tiles_n: Int32, cta_rank: Int32):
        """Row tile, column tile and split of a work item; a cluster's CTAs sit below each other."""
        tiles = tiles_m * tiles_n
        row, col = grouped(work % tiles, tiles_m, tiles_n, self.group_m)
        return row * self.cluster + cta_rank, col, work // tiles

    @cute.jit
    def add_bias(
        self,
        acc: cute.Tensor,
        tCcD: cute.Tensor,
        mBias: cute.Tensor,
        m_idx: Int32,
        n_idx: Int32,
    ):
        """Columns past the end take the last bias: they are never stored."""
        mode, first = (0, m_idx * self.block_m) if self.swap else (1, n_idx * self.block_n)
        last = cute.size(mBias) - 1
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] += Float32(mBias[cutlass.min(first + tCcD[i][mode], last)])

    @cute.jit
    def store_tile(
        self,
        acc: cute.Tensor,
        tiled_mma: cute.TiledMma,
        sD: cute.Tensor,
        gD: cute.Tensor,
        d_atom: cute.CopyAtom,
        tidx: Int32,
        warp_idx: Int32,
    ):
        """Accumulators -> 16 bit -> shared memory -> TMA, ``epi_n`` columns at a time."""
        op = warp.StMatrix8x8x16bOp(self.swap, 4)
        atom = cute.make_copy_atom(op, self.dtype)
        r2s = cute.make_tiled_copy_S(
            sm90.sm90_get_smem_store_op(self.layout, self.dtype, Float32),
            cute.make_tiled_copy_C_atom(atom, tiled_mma),
        )
        thr_r2s = r2s.get_slice(tidx)
        tRS_sD = thr_r2s.partition_D(sD)
        tRS_rAcc = r2s.retile(acc)
        tRS_rD = cute.make_rmem_tensor(cute.shape(thr_r2s.partition_S(sD))[:3], self.dtype)
        values = cute.size(tRS_rD)
        bSG_sD, bSG_gD = cpasync.tma_partition(
            d_atom, 0, cute.make_layout(1),
            cute.group_modes(sD, 0, 2), cute.zipped_divide(gD, (self.block_m, self.epi_n)),
        )  # fmt: skip
        for part in cutlass.range_constexpr(self.block_n // self.epi_n):
            stage = part % EPI_STAGES
            if warp_idx == 0:  # the buffer must have been read by its last store
                cute.arch.cp_async_bulk_wait_group(0 if part == 0 else EPI_STAGES - 1, read=True)
            self.epi_barrier.arrive_and_wait()
            for i in cutlass.range_constexpr(values):
                tRS_rD[i] = tRS_rAcc[part * values + i].to(self.dtype)
            cute.copy(r2s, tRS_rD, tRS_sD[None, None, None, stage])
            cute.arch.fence_proxy("async.shared", space="cta")
            self.epi_barrier.arrive_and_wait()
            if warp_idx == 0:
                cute.copy(d_atom, bSG_sD[None, stage], bSG_gD[None, (0, part)])
                cute.arch.cp_async_bulk_commit_group()

    @cute.kernel
    def reduce(
        self,
        mP: cute.Tensor,
        mBias: cute.Tensor,
        d: cute.Pointer,
        m: Int32,
        vectors: Int32,
        num_splits: Int32,
    ):
        """D = sum of the partial sums (+ bias); a thread makes eight neighbours of a row."""
        index = cute.arch.block_idx()[0] * REDUCE_THREADS + cute.arch.thread_idx()[0]
        if index < m * vectors:
            row, vector = index // vectors, index % vectors
            # (VECTOR, column / VECTOR, row, split)
            padded, size = mP.stride[1 if self.swap else 0], mP.stride[2]
            shape = (VECTOR, vectors, m, num_splits)
            gP = cute.make_tensor(
                mP.iterator, cute.make_layout(shape, stride=(1, VECTOR, padded, size))
            )
            gD = cute.make_tensor(
                d, cute.make_layout(shape[:3], stride=(1, VECTOR, VECTOR * vectors))
            )
            total = cute.make_rmem_tensor(VECTOR, Float32)
            part = cute.make_rmem_tensor(VECTOR, Float32)
            out = cute.make_rmem_tensor(VECTOR, self.dtype)
            total.fill(0.0)
            for split_idx in cutlass.range(num_splits):
                cute.autovec_copy(gP[None, vector, row, split_idx], part)
                total.store(total.load() + part.load())
            if cutlass.const_expr(self.has_bias):
                gBias = cute.make_tensor(
                    mBias.iterator, cute.make_layout(shape[:2], stride=(1, VECTOR))
                )
                cute.autovec_copy(gBias[None, vector], out)
                total.store(total.load() + out.load().to(Float32))
            out.store(total.load().to(self.dtype))
            cute.autovec_copy(out, gD[None, vector, row])

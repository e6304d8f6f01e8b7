"""GEMM of few rows on Hopper: the weights stream through WGMMA's 64-row side, K split in a cluster.

D^T = B @ A^T: the rows of B (the weights, which are what must be read) fill WGMMA's side of 64 and
the few rows of A its narrow one. Where the tiles alone would leave SMs idle, the CTAs of a cluster
share a tile's K; each leaves its sums in shared memory, and each then adds up and stores a share of
the tile, reading the others' through distributed shared memory, always in the same order. Two CTAs
on an SM cover each other's start and end; by programmatic dependent launch a kernel sets up while
the one before it ends.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from kernelcat.kernels.cute.common.epilogue import VECTOR, Epilogue
from kernelcat.kernels.cute.common.mainloop import drain, make_mma, multiply
from kernelcat.kernels.cute.common.ring import load, make_ring, memory, operand, stage_layouts
from kernelcat.kernels.cute.common.tma import load_atom

PADDING = 4
"""Floats between rows of sums, so that a warp writes to 32 different banks."""
SUMS_BARRIER = 1


class Skinny:
    """Tiles of ``block_m`` rows of B x ``block_n`` rows of A; ``split_k`` CTAs to a tile.

    Where K is not split, CTAs are persistent.
    """

    def __init__(
        self,
        block_m: int,
        block_n: int,
        block_k: int,
        split_k: int,
        stages: int,
        **epilogue: str | bool,
    ):
        self.epilogue = Epilogue(**epilogue)
        self.dtype = self.epilogue.dtype
        self.block_m, self.block_n, self.block_k = block_m, block_n, block_k
        self.split_k, self.stages = split_k, stages
        self.mma_threads = 2 * block_m
        self.threads = self.mma_threads + 32
        self.pitch = block_m + PADDING

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (m, k)
        b: cute.Pointer,  # (n, k)
        bias: cute.Pointer,  # (n,)
        residual: cute.Pointer,  # as d
        d: cute.Pointer,  # (m, n), or (m, n / 2) of swiglu
        m: Int32,
        n: Int32,
        k: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        n, k = cute.assume(n, divby=VECTOR), cute.assume(k, divby=VECTOR)
        mA = cute.make_tensor(a, cute.make_layout((m, k), stride=(k, 1)))
        mB = cute.make_tensor(b, cute.make_layout((n, k), stride=(k, 1)))
        mBias, mR, mD = self.epilogue.vectors(bias, residual, d, m, n)

        tiled_mma = make_mma(self.dtype, self.block_m // 64, self.block_n)
        tile = (self.block_m, self.block_n, self.block_k)
        b_layout, a_layout = stage_layouts(tile, self.dtype, self.stages)
        a_atom, tA = load_atom(mA, a_layout, (self.block_n, self.block_k))
        b_atom, tB = load_atom(mB, b_layout, (self.block_m, self.block_k))

        @cute.struct
        class SharedStorage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            a: memory(self.dtype, a_layout)
            b: memory(self.dtype, b_layout)
            sums: cute.struct.Align[
                cute.struct.MemRange[Float32, self.block_n * self.pitch], 1024
            ]

        self.shared_storage = SharedStorage
        tiles_m = cute.ceil_div(n, self.block_m)
        tiles_n = cute.ceil_div(m, self.block_n)
        self.kernel(
            a_atom, tA, b_atom, tB, mBias, mR, mD, tiled_mma, a_layout, b_layout,
            tiles_m * tiles_n, tiles_n,
        ).launch(
            grid=(num_ctas, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.split_k, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom,
        mA: cute.Tensor,
        b_atom: cute.CopyAtom,
        mB: cute.Tensor,
        mBias: cute.Tensor,  # (8, n / 8)
        mR: cute.Tensor,  # (8, columns of D / 8, m)
        mD: cute.Tensor,  # (8, columns of D / 8, m)
        tiled_mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        num_tiles: Int32,
        tiles_n: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        producer_warp = self.mma_threads // 32
        if warp_idx == producer_warp:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(b_atom)

        storage = SmemAllocator().allocate(self.shared_storage)
        sA = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sB = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        sums = cute.make_layout((self.block_m, self.block_n), stride=(1, self.pitch))
        sZ = storage.sums.get_tensor(sums)
        layouts, mma_warps = (a_layout, b_layout), producer_warp
        ring = make_ring(storage.barriers, self.stages, self.dtype, layouts, mma_warps)

        # The kernel before may still be running, and the one after may begin.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        k_tiles = cute.ceil_div(mA.shape[1], self.block_k)
        k_begin = rank * k_tiles // self.split_k
        k_end = (rank + 1) * k_tiles // self.split_k
        first = cute.arch.block_idx()[0] // self.split_k
        step = cute.arch.grid_dim()[0] // self.split_k
        if warp_idx == producer_warp:
            a = operand(a_atom, sA, mA, (self.block_n, self.block_k))
            b = operand(b_atom, sB, mB, (self.block_m, self.block_k))
            state = pipeline.make_pipeline_state(
                pipeline.PipelineUserType.Producer, self.stages
            )
            for tile in cutlass.range(first, num_tiles, step, unroll=1):
                b_tile, a_tile = tile // tiles_n, tile % tiles_n
                for k_idx in cutlass.range(k_begin, k_end, unroll=1):
                    ring.producer_acquire(state)
                    barrier = ring.producer_get_barrier(state)
                    load(b, b_tile, k_idx, state.index, barrier)
                    load(a, a_tile, k_idx, state.index, barrier)
                    state.advance()
            if cutlass.const_expr(self.split_k > 1):
                self.sync_cluster(release=False)
                self.sync_cluster(release=False)
        else:
            thr_mma = tiled_mma.get_slice(tidx)
            warpgroup_idx = cute.arch.make_warp_uniform(tidx // 128)
            group_mma = tiled_mma.get_slice(
                cute.make_layout(self.block_m // 64, stride=128)(warpgroup_idx)
            )
            tCrB = tiled_mma.make_fragment_A(group_mma.partition_A(sB))
            tCrA = tiled_mma.make_fragment_B(group_mma.partition_B(sA))
            tCsZ = thr_mma.partition_C(sZ)
            acc = cute.make_rmem_tensor(tCsZ.shape, Float32)
            read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            release = pipeline.make_pipeline_state(
                pipeline.PipelineUserType.Consumer, self.stages
            )
            for tile in cutlass.range(first, num_tiles, step, unroll=1):
                acc.fill(0.0)
                tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
                read, release = multiply(
                    tiled_mma, acc, tCrB, tCrA, ring, read, release, k_begin, k_end
                )
                release = drain(ring, release)
                cute.autovec_copy(acc, tCsZ)
                self.sync_sums(release=True)
                row, col = tile // tiles_n * self.block_m, tile % tiles_n * self.block_n
                self.store_share(sZ, mBias, mR, mD, row, col, rank)
                self.sync_sums(release=False)

    @cute.jit
    def sync_cluster(self, release: cutlass.Constexpr[bool]):
        """``release`` what was written before, or only wait until nobody reads any more."""
        if cutlass.const_expr(release):
            cute.arch.cluster_arrive()
        else:
            cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()

    @cute.jit
    def sync_sums(self, release: cutlass.Constexpr[bool]):
        """Among all who write or read the sums, and the producer warps of a cluster."""
        if cutlass.const_expr(self.split_k > 1):
            self.sync_cluster(release)
        else:
            cute.arch.barrier(barrier_id=SUMS_BARRIER, number_of_threads=self.mma_threads)

    @cute.jit
    def store_share(
        self,
        sZ: cute.Tensor,  # (block_m, block_n) float32
        mBias: cute.Tensor,  # (8, n / 8)
        mR: cute.Tensor,  # (8, columns of D / 8, m)
        mD: cute.Tensor,  # (8, columns of D / 8, m)
        row: Int32,
        col: Int32,
        rank: Int32,
    ):
        """This CTA's share of the tile, eight columns of D a thread at a time."""
        width = VECTOR * self.epilogue.span
        vectors = self.block_m // width
        count = vectors * self.block_n
        z = cute.make_rmem_tensor(width, Float32)
        part = cute.make_rmem_tensor(width, Float32)
        first = rank * self.mma_threads + cute.arch.thread_idx()[0]
        for index in cutlass.range(first, count, self.split_k * self.mma_threads, unroll=1):
            d_row, vector = col + index // vectors, row // width + index % vectors
            if d_row < mD.shape[2] and vector < mD.shape[1]:
                at = index // vectors * self.pitch + index % vectors * width
                z.fill(0.0)
                for peer in cutlass.range_constexpr(self.split_k):
                    source = (sZ.iterator + at).align(16)
                    if cutlass.const_expr(self.split_k > 1):
                        source = cute.arch.map_dsmem_ptr(source, peer)
                    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(width)), part)
                    z.store(z.load() + part.load())
                self.epilogue.store_vector(z, mBias, mR, mD, d_row, vector)

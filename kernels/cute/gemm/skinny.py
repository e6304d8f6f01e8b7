"""GEMM of few rows on Hopper: weights on WGMMA's side of 64 rows, split-K within a cluster.

D^T = B @ A^T: the rows of B, the weights, fill WGMMA's side of 64 rows, and the few rows of A the
narrow side. Where tiles alone would leave SMs idle, the thread blocks of a cluster split the K of a
tile: each leaves partial sums in its shared memory, and each then adds up and stores a part of the
tile. They read each other's partial sums through distributed shared memory, always in the same
order. Two thread blocks on an SM hide each other's start and end. By programmatic dependent launch
a kernel sets up while the kernel before it ends.

    barrier       who arrives (how many)              who waits         for what
    full[stage]   producer (1) and TMA, bytes         consumers         a k-block has arrived
    empty[stage]  consumer warps (4 or 8)             producer          the stage may be overwritten
    sums          consumers (128 or 256, named), or   the same threads  partial sums are written, or
                  all threads of the cluster                            all of them have been read
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from kernelcat.kernels.cute.common.epilogue import PADDING, VECTOR, Epilogue
from kernelcat.kernels.cute.common.mainloop import drain, make_mma, multiply
from kernelcat.kernels.cute.common.ring import load, make_ring, memory, operand, stage_layouts
from kernelcat.kernels.cute.common.tma import load_atom

SUMS_BARRIER = 1


class Skinny:
    """Tiles of ``block_m`` rows of B x ``block_n`` rows of A, ``split_k`` thread blocks for each.

    Where K is not split, thread blocks are persistent.
    """

    def __init__(
        self,
        block_m: int,
        block_n: int,
        block_k: int,
        split_k: int,
        num_stages: int,
        **epilogue: str | bool,
    ):
        self.epilogue = Epilogue(**epilogue)
        self.dtype = self.epilogue.dtype
        self.block_m, self.block_n, self.block_k = block_m, block_n, block_k
        self.split_k, self.num_stages = split_k, num_stages
        self.mma_threads = 2 * block_m
        self.threads = self.mma_threads + 32
        self.pitch = block_m + PADDING

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (m, k)
        b: cute.Pointer,  # (n, k)
        bias: cute.Pointer,  # (n,)
        residual: cute.Pointer,  # like d
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
        b_layout, a_layout = stage_layouts(tile, self.dtype, self.num_stages)
        a_atom, tA = load_atom(mA, a_layout, (self.block_n, self.block_k))
        b_atom, tB = load_atom(mB, b_layout, (self.block_m, self.block_k))

        @cute.struct
        class SharedStorage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.num_stages]
            a: memory(self.dtype, a_layout)
            b: memory(self.dtype, b_layout)
            sums: cute.struct.Align[
                cute.struct.MemRange[Float32, self.block_n * self.pitch], 1024
            ]

        self.shared_storage = SharedStorage
        num_tiles_m = cute.ceil_div(n, self.block_m)
        num_tiles_n = cute.ceil_div(m, self.block_n)
        self.kernel(
            a_atom, tA, b_atom, tB, mBias, mR, mD, tiled_mma, a_layout, b_layout,
            num_tiles_m * num_tiles_n, num_tiles_n,
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
        mA: cute.Tensor,  # (m, k), coordinates for TMA
        b_atom: cute.CopyAtom,
        mB: cute.Tensor,  # (n, k), coordinates for TMA
        mBias: cute.Tensor,  # (8, n / 8)
        mR: cute.Tensor,  # (8, columns of D / 8, m)
        mD: cute.Tensor,  # (8, columns of D / 8, m)
        tiled_mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        num_tiles: Int32,
        num_tiles_n: Int32,
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
        layouts, num_mma_warps = (a_layout, b_layout), producer_warp
        ring = make_ring(storage.barriers, self.num_stages, self.dtype, layouts, num_mma_warps)

        # The kernel before may still be writing A and B; the kernel after may begin.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        num_k_blocks = cute.ceil_div(mA.shape[1], self.block_k)
        k_begin = rank * num_k_blocks // self.split_k
        k_end = (rank + 1) * num_k_blocks // self.split_k
        first = cute.arch.block_idx()[0] // self.split_k
        step = cute.arch.grid_dim()[0] // self.split_k
        if warp_idx == producer_warp:
            a = operand(a_atom, sA, mA, (self.block_n, self.block_k))
            b = operand(b_atom, sB, mB, (self.block_m, self.block_k))
            state = pipeline.make_pipeline_state(
                pipeline.PipelineUserType.Producer, self.num_stages
            )
            for tile in cutlass.range(first, num_tiles, step, unroll=1):
                b_tile, a_tile = tile // num_tiles_n, tile % num_tiles_n
                for k_idx in cutlass.range(k_begin, k_end, unroll=1):
                    ring.producer_acquire(state)
                    barrier = ring.producer_get_barrier(state)
                    load(b, b_tile, k_idx, state.index, barrier)
                    load(a, a_tile, k_idx, state.index, barrier)
                    state.advance()
            if cutlass.const_expr(self.split_k > 1):  # both barriers of ``sync_sums``
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
            read = pipeline.make_pipeline_state(
                pipeline.PipelineUserType.Consumer, self.num_stages
            )
            release = pipeline.make_pipeline_state(
                pipeline.PipelineUserType.Consumer, self.num_stages
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
                row, col = tile // num_tiles_n * self.block_m, tile % num_tiles_n * self.block_n
                self.store_part(sZ, mBias, mR, mD, row, col, rank)
                self.sync_sums(release=False)

    @cute.jit
    def sync_cluster(self, release: cutlass.Constexpr[bool]):
        """A barrier of the cluster; ``release`` makes earlier writes visible to the others."""
        if cutlass.const_expr(release):
            cute.arch.cluster_arrive()
        else:
            cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()

    @cute.jit
    def sync_sums(self, release: cutlass.Constexpr[bool]):
        """A barrier of all threads that write or read partial sums of the tile.

        With split-K those are the threads of all thread blocks of the cluster, and their producer
        warps, which have to take part in a barrier of the cluster.
        """
        if cutlass.const_expr(self.split_k > 1):
            self.sync_cluster(release)
        else:
            cute.arch.barrier(barrier_id=SUMS_BARRIER, number_of_threads=self.mma_threads)

    @cute.jit
    def store_part(
        self,
        sZ: cute.Tensor,  # (block_m, block_n) float32
        mBias: cute.Tensor,  # (8, n / 8)
        mR: cute.Tensor,  # (8, columns of D / 8, m)
        mD: cute.Tensor,  # (8, columns of D / 8, m)
        row: Int32,
        col: Int32,
        rank: Int32,
    ):
        """Add up and store this thread block's part of the tile, a vector of D at a time.

        ``row`` and ``col`` are the first row of B and the first row of A of the tile.
        """
        width = VECTOR * self.epilogue.span
        row_vectors = self.block_m // width
        num_vectors = row_vectors * self.block_n
        z = cute.make_rmem_tensor(width, Float32)
        partial = cute.make_rmem_tensor(width, Float32)
        first = rank * self.mma_threads + cute.arch.thread_idx()[0]
        for index in cutlass.range(first, num_vectors, self.split_k * self.mma_threads, unroll=1):
            d_row, vector = col + index // row_vectors, row // width + index % row_vectors
            if d_row < mD.shape[2] and vector < mD.shape[1]:
                offset = index // row_vectors * self.pitch + index % row_vectors * width
                z.fill(0.0)
                for split in cutlass.range_constexpr(self.split_k):
                    source = (sZ.iterator + offset).align(16)
                    if cutlass.const_expr(self.split_k > 1):
                        source = cute.arch.map_dsmem_ptr(source, split)
                    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(width)), partial)
                    z.store(z.load() + partial.load())
                self.epilogue.store_vector(z, mBias, mR, mD, d_row, vector)

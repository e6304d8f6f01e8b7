"""Rows of A, grouped by expert, times their expert's weights on Blackwell's tensor cores.

Persistent, with weights as the left operand: a tile is 128 rows of an expert's weights by
``block_m`` rows of A, because a tcgen05 product has 128 rows and any number of columns. The roles
of the warps are those of ``common/tensor_memory.py``, but that a further warp, with 4-bit weights,
writes block scales to shared memory.

4-bit weights are multiplied with float8 rows of A by kind::mxf8f6f4, which applies a block scale
for each 32 columns of both operands. The scales of A in tensor memory are 1, and stay there:
A's own scales are float32, one for a row and 128 columns. So the products of each k-block of 128
columns go into another accumulator in tensor memory, and the threads that read it add it, scaled,
to float32 registers. Float8 weights are multiplied without block scales and promoted in the same
way. Products of 16-bit operands stay in one accumulator for a whole tile.

    barrier              who arrives (how many)            who waits    for what
    stages, full         load warp (1) and TMA, bytes      MMA warp     operands have arrived
    stages, empty        MMA warp's tcgen05.commit (1)     load warp    the stage may be overwritten
    scales, full         lanes of the scale warp (32)      MMA warp     block scales are written
    scales, empty        MMA warp's tcgen05.commit (1)     scale warp   the stage may be overwritten
    accumulators, full   MMA warp's tcgen05.commit (1)     readers      the products are done
    accumulators, empty  readers (128)                     MMA warp     the products may begin
    2                    readers (128, named)              readers      scales of A have arrived

Grouped products over ragged segments whose tiles every thread block finds from the segments'
offsets are those of MegaBlocks (Gale et al. 2022) and CUTLASS's grouped GEMM; the promotion is
DeepGEMM's, and the recipe for widened weights is QuACK's. Only compiled, never run yet.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float4E2M1FN, Float8E4M3FN, Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.ring import SHARED_BYTES
from kernelcat.kernels.cute.common.scale_atoms import ATOM_BYTES, ATOM_COLUMNS, ATOM_ROWS
from kernelcat.kernels.cute.common.tensor_memory import (
    LOAD_WARP,
    MMA_WARP,
    RESERVED_BYTES,
    ROWS,
    TENSOR_COLUMNS,
    cta_group,
    make_allocator,
    make_rings,
    read_columns,
)
from kernelcat.kernels.cute.moe_gemm.blackwell.expert_tiles import ExpertTiles
from kernelcat.kernels.cute.moe_gemm.blackwell.loader import Loader
from kernelcat.kernels.cute.moe_gemm.blackwell.multiply import MMA_K, Multiplier
from kernelcat.kernels.cute.moe_gemm.blackwell.operands import (
    GatheredRows,
    Rows,
    gather_atom,
    plain_stages,
    rows_atom,
    weights_atom,
)
from kernelcat.kernels.cute.moe_gemm.blackwell.output import Output
from kernelcat.kernels.cute.moe_gemm.blackwell.reader import FIRST_READER_WARP, Reader
from kernelcat.kernels.cute.moe_gemm.blackwell.scales import (
    BLOCK,
    SLOTS,
    RowScales,
    fill_with_ones,
    make_block_scales,
    make_ring,
    stored_words,
)

SCALE_WARP = 6
"""Warp 7 has nothing to do."""
MAX_READER_COLUMNS = 64
"""Columns of an accumulator, rows of A, that a thread reads."""
READER_REGISTERS, OTHER_REGISTERS = 216, 72
"""Registers of a thread where two warpgroups read: together those of three with 168."""
READER_BARRIER = 2
MAX_STAGES = 12
MAX_ACCUMULATORS = 4
STAGE_ROW_BYTES = 128
"""Bytes of a row of a stage: the widest row that the hardware swizzles."""


class Product(Loader, Multiplier, Reader):
    """A tile is ``block_m`` (32, 64 or 128) rows of A and 128 rows of an expert's weights.

    ``format`` is that of the weights: mxfp4 and fp8 beside float8 rows of A, else the type of A.
    ``k_tail`` is K modulo 128 where 4-bit weights end in a k-block that overlaps the one before,
    else 0. With ``clear`` rows without an assignment become zero.
    """

    def __init__(
        self,
        dtype: str,
        format: str,
        activation: str,
        bias: bool,
        gather: bool,
        clear: bool,
        is_even: bool,
        experts: int,
        k_tail: int,
        block_m: int,
    ):
        self.gather, self.clear, self.k_tail, self.block_m = gather, clear, k_tail, block_m
        self.is_block_scaled = format == "mxfp4"
        self.is_promoted = format in ("mxfp4", "fp8")
        self.dtype = Float8E4M3FN if self.is_promoted else element_type(dtype)
        self.w_type = Float4E2M1FN if self.is_block_scaled else self.dtype
        self.block_k = STAGE_ROW_BYTES // (self.dtype.width // 8)
        self.tiler = (ROWS, block_m, self.block_k)
        # Threads do not have the registers for sums and products of 128 columns.
        self.reader_groups = max(1, block_m // MAX_READER_COLUMNS)
        self.is_reallocated = self.reader_groups > 1
        self.readers = 128 * self.reader_groups
        self.threads = 128 * (1 + self.reader_groups)

        self.reader_columns = block_m // self.reader_groups
        self.tiles = ExpertTiles(experts, block_m, ROWS)
        self.row_scales = RowScales(block_m, self.readers, READER_BARRIER)
        self.output = Output(dtype, activation, bias, is_even, self.reader_columns)

        # Bytes that TMA reads are what its barrier counts: codes are packed, stages are not.
        w_bytes, a_bytes = (rows * STAGE_ROW_BYTES for rows in (ROWS, block_m))
        scale_bytes = ATOM_BYTES if self.is_block_scaled else 0
        self.loaded_bytes = a_bytes + (w_bytes // 2 if self.is_block_scaled else w_bytes)
        fixed_bytes = RESERVED_BYTES + ATOM_BYTES + 4 * block_m * (SLOTS + 1) + 8 * (experts + 1)
        stage_bytes = a_bytes + w_bytes + scale_bytes
        self.num_stages = min(MAX_STAGES, (SHARED_BYTES - fixed_bytes) // stage_bytes)

        # Tensor memory: accumulators from the first column on, then scales of W, then of A.
        scale_columns = 2 * ATOM_COLUMNS if self.is_block_scaled else 0
        self.num_accumulators = min(
            MAX_ACCUMULATORS if self.is_promoted else 2, (TENSOR_COLUMNS - scale_columns) // block_m
        )
        self.w_scale_column = self.num_accumulators * block_m
        used_columns = self.w_scale_column + scale_columns
        self.num_columns = max(32, 1 << (used_columns - 1).bit_length())

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (a_rows, k)
        a_scale: cute.Pointer,  # (k / 128, a_rows), with float8
        w: cute.Pointer,  # (experts, n, k); 4-bit codes in bytes
        w_scale: cute.Pointer,  # (experts, n, k / 32), or (experts, n / 128, k / 128) of fp8
        bias: cute.Pointer,  # (experts, n)
        offsets: cute.Pointer,  # (experts + 1,)
        order: cute.Pointer,  # (rows,)
        out: cute.Pointer,  # (rows, pitch): D, or partial rows
        rows: Int32,
        a_rows: Int32,
        top_k: Int32,
        n: Int32,
        k: Int32,
        pitch: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        experts = self.tiles.experts
        k = cute.assume(k, divby=64 if self.is_block_scaled else 128 // self.dtype.width)
        w_rows = Int32(experts) * n
        mA = cute.make_tensor(a, cute.make_layout((a_rows, k), stride=(k, 1)))
        mOffsets = cute.make_tensor(offsets, cute.make_layout(experts + 1))
        mOrder = cute.make_tensor(order, cute.make_layout(rows))
        mBias = cute.make_tensor(bias, cute.make_layout((n, experts), stride=(1, Int64(n))))
        mOut = self.output.rows(out, rows, pitch)
        k_blocks = cute.ceil_div(k, BLOCK)
        mSA = cute.make_tensor(
            a_scale, cute.make_layout((1, a_rows, k_blocks), stride=(1, 1, Int64(a_rows)))
        )
        if cutlass.const_expr(self.is_block_scaled):
            mSW = stored_words(w_scale, w_rows, k, self.k_tail == 0)
        else:  # of fp8; not read with 16-bit operands
            n_blocks = Int64(cute.ceil_div(n, BLOCK))
            layout = cute.make_layout(
                (k_blocks, n_blocks, experts), stride=(1, Int64(k_blocks), n_blocks * k_blocks)
            )
            mSW = cute.make_tensor(w_scale, layout)

        tiled_mma = self.products()
        w_smem = Uint8 if cutlass.const_expr(self.is_block_scaled) else self.dtype
        w_layout = sm100.make_smem_layout_a(tiled_mma, self.tiler, w_smem, self.num_stages)
        a_layout = sm100.make_smem_layout_b(tiled_mma, self.tiler, self.dtype, self.num_stages)
        w_atom, tW = self.weights(tiled_mma, w_layout, w, w_rows, k, k - self.k_tail)
        tail_atom, tTail = w_atom, tW
        if cutlass.const_expr(self.k_tail):
            last = w + (k - BLOCK) // 2
            tail_atom, tTail = self.weights(tiled_mma, w_layout, last, w_rows, k, BLOCK)
        if cutlass.const_expr(self.gather):
            # The kernel has the indices in shared memory; only their layout matters here.
            indices = cute.make_tensor(order, self.index_layout(k))
            a_atom, tA = gather_atom(a_layout, self.tiler[1:], mA, indices)
        else:
            a_atom, tA = rows_atom(tiled_mma, self.tiler, a_layout, mA)

        @cute.struct
        class SharedStorage:
            stages: cute.struct.MemRange[Int64, 2 * self.num_stages]
            scales: cute.struct.MemRange[Int64, 2 * self.num_stages]
            accumulators: cute.struct.MemRange[Int64, 2 * self.num_accumulators]
            tensor_memory: Int32
            row_scales: cute.struct.MemRange[Float32, SLOTS * self.block_m]
            indices: cute.struct.MemRange[Int32, self.block_m]
            offsets: cute.struct.MemRange[Int32, experts + 1]
            blocks: cute.struct.MemRange[Int32, experts + 1]

        self.shared_storage = SharedStorage
        self.kernel(
            w_atom, tW, tail_atom, tTail, a_atom, tA, mSW, mSA, mBias, mOffsets, mOrder, mOut,
            tiled_mma, w_layout, a_layout, n, k, top_k,
        ).launch(
            grid=(num_ctas, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )  # fmt: skip

    @cute.jit
    def products(self):
        """The MMA: W on the left, A on the right, both contiguous along K."""
        shape, group = self.tiler[:2], cta_group(1)
        source, major = tcgen05.OperandSource.SMEM, OperandMajorMode.K
        if cutlass.const_expr(self.is_block_scaled):
            op = tcgen05.MmaMXF8F6F4Op(
                self.w_type, self.dtype, (*shape, MMA_K), group, source, major, major
            )
        elif cutlass.const_expr(self.is_promoted):
            op = tcgen05.MmaF8F6F4Op(
                self.w_type, self.dtype, Float32, (*shape, MMA_K), group, source, major, major
            )
        else:
            op = tcgen05.MmaF16BF16Op(
                self.dtype, Float32, (*shape, 16), group, source, major, major
            )
        return cute.make_tiled_mma(op)

    def weights(self, tiled_mma, layout, w, rows, k, cols):
        """TMA loads of ``cols`` columns of rows of ``k`` columns, from address ``w`` on."""
        if self.is_block_scaled:
            w = cute.recast_ptr(w.align(32), dtype=Float4E2M1FN)
        tensor = cute.make_tensor(w, cute.make_layout((rows, cols), stride=(k, 1)))
        return weights_atom(tiled_mma, self.tiler, layout, tensor)

    def index_layout(self, k):
        """Indices of a tile's rows as a matrix of k columns, which all have the same ones."""
        return cute.make_layout((self.block_m, k), stride=(1, 0))

    @cute.kernel
    def kernel(
        self,
        w_atom: cute.CopyAtom,
        mW: cute.Tensor,  # (experts * n, k), coordinates for TMA
        tail_atom: cute.CopyAtom,
        mTail: cute.Tensor,  # (experts * n, 128), coordinates for TMA, read with k_tail
        a_atom: cute.CopyAtom,
        mA: cute.Tensor,  # (a_rows, k), coordinates for TMA; (block_m, k) with gather
        mSW: cute.Tensor,  # (parts, parts along K, experts * n), or (k-blocks, n / 128, experts)
        mSA: cute.Tensor,  # (1, a_rows, k-blocks)
        mBias: cute.Tensor,  # (n, experts)
        mOffsets: cute.Tensor,  # (experts + 1,)
        mOrder: cute.Tensor,  # (rows,)
        mOut: cute.Tensor,  # (width, columns / width, rows)
        tiled_mma: cute.TiledMma,
        w_layout: cute.ComposedLayout,
        a_layout: cute.ComposedLayout,
        n: Int32,
        k: Int32,
        top_k: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == LOAD_WARP:
            for atom in (w_atom, tail_atom, a_atom):
                cpasync.prefetch_descriptor(atom)
        shared = SmemAllocator()
        storage = shared.allocate(self.shared_storage)
        w_smem = Uint8 if cutlass.const_expr(self.is_block_scaled) else self.dtype
        sW = shared.allocate_tensor(w_smem, w_layout.outer, 1024, swizzle=w_layout.inner)
        sA = shared.allocate_tensor(self.dtype, a_layout.outer, 1024, swizzle=a_layout.inner)
        sSA = storage.row_scales.get_tensor(cute.make_layout((1, self.block_m, SLOTS)))
        sIndices = storage.indices.get_tensor(cute.make_layout(self.block_m))
        lists = tuple(
            member.get_tensor(cute.make_layout(self.tiles.experts + 1))
            for member in (storage.offsets, storage.blocks)
        )
        tmem = make_allocator(storage, threads=self.threads)
        producer, consumer, issuer, reader = make_rings(
            storage,
            self.num_stages,
            self.loaded_bytes,
            self.num_accumulators,
            reader_warps=self.readers // 32,
        )
        tmem.allocate(self.num_columns)
        tmem.wait_for_alloc()
        tmem_ptr = tmem.retrieve_ptr(Float32)

        thr_mma = tiled_mma.get_slice(0)
        tCrW, tCrA = tiled_mma.make_fragment_A(sW), tiled_mma.make_fragment_B(sA)
        acc_shape = tiled_mma.partition_shape_C(self.tiler[:2])
        fragment = tiled_mma.make_fragment_C(cute.append(acc_shape, self.num_accumulators))
        tCtAcc = cute.make_tensor(tmem_ptr, fragment.layout)  # (MMA, MMA_M, MMA_N, accumulators)
        scales, scale_producer, scale_consumer = None, None, None
        if cutlass.const_expr(self.is_block_scaled):
            scales = make_block_scales(
                tiled_mma, self.tiler, self.num_stages, shared, tmem_ptr + self.w_scale_column
            )
            scale_producer, scale_consumer = make_ring(storage.scales, self.num_stages)
            if tidx < ATOM_ROWS:
                fill_with_ones(scales, tidx)

        # The kernel before may still be writing A and the offsets.
        cute.arch.griddepcontrol_wait()
        self.tiles.load(mOffsets, *lists, self.threads)
        if (warp_idx < MMA_WARP) | (warp_idx >= FIRST_READER_WARP):
            if cutlass.const_expr(self.is_reallocated):
                cute.arch.setmaxregister_increase(READER_REGISTERS)
            cD = thr_mma.partition_C(cute.make_identity_tensor(self.tiler[:2]))
            parts = read_columns(tCtAcc[None, 0, 0, None], cD, tidx % ROWS)
            self.read(lists, parts, mSW, mSA, sSA, mBias, mOrder, mOut, reader, n, k, top_k)
        else:
            if cutlass.const_expr(self.is_reallocated):
                cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp_idx == LOAD_WARP:
                w_tile, a_tile = (ROWS, self.block_k), (self.block_m, self.block_k)
                w = Rows(w_atom, sW, mW, w_tile, thr_mma.partition_A)
                tail = Rows(tail_atom, sW, mTail, w_tile, thr_mma.partition_A)
                a = Rows(a_atom, sA, mA, a_tile, thr_mma.partition_B)
                if cutlass.const_expr(self.gather):
                    indices = cute.make_tensor(sIndices.iterator, self.index_layout(k))
                    plain = cute.make_tensor(sA.iterator, plain_stages(*a_tile, self.num_stages))
                    a = GatheredRows(a_atom, plain, mA, a_tile, indices)
                self.produce(lists, w, tail, a, mOrder, sIndices, producer, n, k, top_k)
                cute.arch.griddepcontrol_launch_dependents()
            elif warp_idx == MMA_WARP:
                self.multiply(
                    lists, tiled_mma, tCrW, tCrA, tCtAcc, scales,
                    consumer, scale_consumer, issuer, n, k,
                )  # fmt: skip
            if cutlass.const_expr(self.is_block_scaled):  # noqa: SIM102
                if warp_idx == SCALE_WARP:
                    self.load_scales(lists, mSW, scales.words, scale_producer, n, k)
        cute.arch.sync_threads()
        tmem.relinquish_alloc_permit()
        tmem.free(tmem_ptr)

    def num_k_blocks(self, k):
        """K-blocks of a tile; with ``k_tail`` the last one overlaps the one before."""
        return cute.ceil_div(k, self.block_k)

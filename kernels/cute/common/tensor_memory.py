"""Products by tcgen05 on Blackwell: operands, rings, and accumulators in tensor memory.

A thread block has six warps. One loads operands by TMA, one issues the products, four read an
accumulator out of tensor memory, a row in each thread, while the products of the next accumulator
run. With ``ctas`` = 2 the two SMs of a cluster work as a pair: each loads half of the operands, and
the first one issues the products of both.

    barrier              who arrives (how many)            who waits    for what
    stages, full         load warp (1) and TMA, bytes      MMA warp     a k-block has arrived
    stages, empty        MMA warp's tcgen05.commit (1)     load warps   the stage may be overwritten
    accumulators, full   MMA warp's tcgen05.commit (1)     readers      the products are done
    accumulators, empty  readers (128 of each SM)          MMA warp     the products may begin
    allocation           all threads (192, named)          all threads  tensor memory has an address
    freed                a warp of the other SM (32)       warp 0       the other SM is done reading

The MMA warp is that of the first SM of a pair.
"""

import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync, make_tiled_tma_atom_A, make_tiled_tma_atom_B, tcgen05
from cutlass.memory import TmemAllocator

TENSOR_COLUMNS = 512
"""Columns of tensor memory."""
NUM_ACCUMULATORS = 2
"""One is read while the products of the next tile fill the other."""
ROWS = 128
"""Rows of an accumulator in the tensor memory of an SM."""
COLUMNS = 32
"""Columns that a thread reads at once."""
READER_WARPS = 4
MMA_WARP, LOAD_WARP = 4, 5
THREADS = 32 * 6
RESERVED_BYTES = 4096
"""Shared memory that is left to barriers and to the alignment of stages."""


def cta_group(ctas: int):
    """How many thread blocks issue a product together."""
    return tcgen05.CtaGroup.TWO if ctas == 2 else tcgen05.CtaGroup.ONE


def make_operands(tiled_mma, tiler, dtype, num_stages, mA, mB, ctas):
    """``(layout of stages, TMA atom, tensor of its coordinates)`` for A and for B.

    The tiles are those of ``tiler`` (M, N, K).
    """
    load, pair = cpasync.CopyBulkTensorTileG2SOp(cta_group(ctas)), (ctas, 1, 1, 1)
    a_layout = sm100.make_smem_layout_a(tiled_mma, tiler, dtype, num_stages)
    b_layout = sm100.make_smem_layout_b(tiled_mma, tiler, dtype, num_stages)
    a_stage, b_stage = (cute.select(layout, mode=[0, 1, 2]) for layout in (a_layout, b_layout))
    a_atom, tA = make_tiled_tma_atom_A(load, mA, a_stage, tiler, tiled_mma, pair)
    b_atom, tB = make_tiled_tma_atom_B(load, mB, b_stage, tiler, tiled_mma, pair)
    return (a_layout, a_atom, tA), (b_layout, b_atom, tB)


def make_rings(
    storage,
    num_stages,
    stage_bytes,
    num_accumulators=NUM_ACCUMULATORS,
    ctas=1,
    reader_warps=READER_WARPS,
):
    """Producer and consumer of the stages; issuer and reader of the accumulators.

    ``storage`` has the barriers of both, ``stages`` and ``accumulators``. ``stage_bytes`` are those
    of one thread block. ``num_accumulators`` is how many are in use at once.
    """
    one_thread = pipeline.CooperativeGroup(pipeline.Agent.Thread)
    readers = pipeline.CooperativeGroup(pipeline.Agent.Thread, 32 * reader_warps * ctas)
    pair = cute.make_layout((ctas, 1, 1, 1))
    stages = pipeline.PipelineTmaUmma.create(
        num_stages=num_stages,
        producer_group=one_thread,
        consumer_group=one_thread,
        tx_count=stage_bytes * ctas,
        barrier_storage=storage.stages.data_ptr(),
        cta_layout_vmnk=pair,
    )
    accumulators = pipeline.PipelineUmmaAsync.create(
        num_stages=num_accumulators,
        producer_group=one_thread,
        consumer_group=readers,
        barrier_storage=storage.accumulators.data_ptr(),
        cta_layout_vmnk=pair,
    )
    return *stages.make_participants(), *accumulators.make_participants()


def make_allocator(storage, ctas=1, threads=THREADS):
    """The allocator of tensor memory, whose address goes into ``storage.tensor_memory``.

    All ``threads`` threads of the thread block wait for the address.
    """
    return TmemAllocator(
        storage.tensor_memory.ptr,
        barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=threads),
        is_two_cta=ctas == 2,
        two_cta_tmem_dealloc_mbar_ptr=storage.freed.ptr if ctas == 2 else None,
    )


def read_columns(tCtAcc, cD, thread):
    """A tiled copy out of an accumulator, ``COLUMNS`` of the thread's row at a time.

    Returns the copy, its sources, their coordinates in ``cD``, and registers for one of them.
    """
    part = ((ROWS, COLUMNS),)
    acc_parts, c_parts = cute.zipped_divide(tCtAcc, part), cute.zipped_divide(cD, part)
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), Float32)
    tiled_copy = tcgen05.make_tmem_copy(atom, acc_parts[None, 0])
    thr_copy = tiled_copy.get_slice(thread)
    tDtC, tDcD = thr_copy.partition_S(acc_parts), thr_copy.partition_D(c_parts)
    return tiled_copy, tDtC, tDcD, cute.make_rmem_tensor(tDcD[None, None, 0].shape, Float32)

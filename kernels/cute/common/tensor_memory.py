"""Accumulators in tensor memory: the warps and rings around them, reading them a row a thread."""

import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32
from cutlass.cute.nvgpu import tcgen05

ACCUMULATORS = 2
"""One is read while the other is filled."""
ROWS = 128
COLUMNS = 32
"""Columns that a thread reads at once."""
EPI_WARPS = 4
MMA_WARP, LOAD_WARP = 4, 5
THREADS = 32 * 6


def make_rings(storage, stages, dtype, layouts, ctas=1):
    """Producer and consumer of the stages of ``layouts``; issuer and reader of accumulators.

    ``storage`` has the barriers of both: ``stages`` and ``accumulators``.
    """
    one_thread = pipeline.CooperativeGroup(pipeline.Agent.Thread)
    readers = pipeline.CooperativeGroup(pipeline.Agent.Thread, 32 * EPI_WARPS * ctas)
    pair = cute.make_layout((ctas, 1, 1, 1))
    stage = [cute.select(layout, mode=[0, 1, 2]) for layout in layouts]
    operands = pipeline.PipelineTmaUmma.create(
        num_stages=stages,
        producer_group=one_thread,
        consumer_group=one_thread,
        tx_count=sum(cute.size_in_bytes(dtype, layout) for layout in stage) * ctas,
        barrier_storage=storage.stages.data_ptr(),
        cta_layout_vmnk=pair,
    )
    accumulators = pipeline.PipelineUmmaAsync.create(
        num_stages=ACCUMULATORS,
        producer_group=one_thread,
        consumer_group=readers,
        barrier_storage=storage.accumulators.data_ptr(),
        cta_layout_vmnk=pair,
    )
    return *operands.make_participants(), *accumulators.make_participants()


def read_columns(tCtAcc, cD, thread):
    """A tiled copy out of tensor memory, and a thread's ``COLUMNS`` at a time.

    They come as it reads them, as their coordinates in ``cD``, and as registers for one part.
    """
    part = ((ROWS, COLUMNS),)
    acc_parts, c_parts = cute.zipped_divide(tCtAcc, part), cute.zipped_divide(cD, part)
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), Float32)
    tiled_copy = tcgen05.make_tmem_copy(atom, acc_parts[None, 0])
    thr_copy = tiled_copy.get_slice(thread)
    tDtC, tDcD = thr_copy.partition_S(acc_parts), thr_copy.partition_D(c_parts)
    return tiled_copy, tDtC, tDcD, cute.make_rmem_tensor(tDcD[None, None, 0].shape, Float32)

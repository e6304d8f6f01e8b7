"""The rings of block_scaled: stages of codes and scales, accumulators in tensor memory."""

import cutlass.cute as cute
import cutlass.pipeline as pipeline

from kernelcat.kernels.cute.common.tensor_memory import EPI_WARPS


def make_rings(storage, stages: int, stage_bytes: int, accumulators: int, ctas: int):
    """Producer and consumer of the stages; issuer and reader of the accumulators.

    ``storage`` has the barriers of both: ``stages`` and ``accumulators``. ``stage_bytes`` are a
    CTA's; ``accumulators`` is how many may be held at once, 1 where two overlap.
    """
    one_thread = pipeline.CooperativeGroup(pipeline.Agent.Thread)
    readers = pipeline.CooperativeGroup(pipeline.Agent.Thread, 32 * EPI_WARPS * ctas)
    pair = cute.make_layout((ctas, 1, 1, 1))
    operands = pipeline.PipelineTmaUmma.create(
        num_stages=stages,
        producer_group=one_thread,
        consumer_group=one_thread,
        tx_count=stage_bytes * ctas,
        barrier_storage=storage.stages.data_ptr(),
        cta_layout_vmnk=pair,
    )
    sums = pipeline.PipelineUmmaAsync.create(
        num_stages=accumulators,
        producer_group=one_thread,
        consumer_group=readers,
        barrier_storage=storage.accumulators.data_ptr(),
        cta_layout_vmnk=pair,
    )
    return *operands.make_participants(), *sums.make_participants()

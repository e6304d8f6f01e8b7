"""WGMMA over the stages of a ring: a stage is released while the products of the next one run."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum


def make_mma(dtype, num_warpgroups, block_n):
    """WGMMA with float32 accumulators: 64 rows for each warpgroup, ``block_n`` columns."""
    k_major = LayoutEnum.ROW_MAJOR.sm90_mma_major_mode()
    return sm90.make_trivial_tiled_mma(
        dtype, dtype, k_major, k_major, Float32, (num_warpgroups, 1, 1), tiler_mn=(64, block_n)
    )


@cute.jit
def multiply(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
    tCrA: cute.Tensor,  # (MMA, MMA_M, MMA_K, stages)
    tCrB: cute.Tensor,  # (MMA, MMA_N, MMA_K, stages)
    ring: pipeline.PipelineTmaAsync,
    read: pipeline.PipelineState,
    release: pipeline.PipelineState,
    k_begin: Int32,
    k_end: Int32,
):
    """acc += A @ B^T over k-blocks [k_begin, k_end), at least one.

    The products of the last stage may still be under way afterwards: ``drain`` waits for them.
    """
    warpgroup.fence()
    for k_idx in cutlass.range(k_begin, k_end, unroll=1):
        ring.consumer_wait(read)
        for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
            at = (None, None, block, read.index)
            cute.gemm(tiled_mma, acc, tCrA[at], tCrB[at], acc)
        warpgroup.commit_group()
        read.advance()
        # All products but those of this stage are done: the stage before can be released.
        warpgroup.wait_group(1)
        if k_idx > k_begin:
            ring.consumer_release(release)
            release.advance()
    return read, release


@cute.jit
def drain(ring: pipeline.PipelineTmaAsync, release: pipeline.PipelineState):
    """Wait for the last products of ``multiply`` and release their stage."""
    warpgroup.wait_group(0)
    ring.consumer_release(release)
    release.advance()
    return release

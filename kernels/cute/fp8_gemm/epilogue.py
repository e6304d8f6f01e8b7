"""From the sums of a warpgroup to D: rounded to bfloat16, through shared memory, by TMA."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32

from kernelcat.kernels.cute.common.split_k import WARPGROUP
from kernelcat.kernels.cute.common.stmatrix import registers_to_shared
from kernelcat.kernels.cute.common.tma import partition


@cute.jit
def store_tile(
    sums: cute.Tensor,  # ((2, 2, block_n / 8), 1, 1, waves) of a thread
    tiled_mma: cute.TiledMma,  # of one warpgroup
    sD: cute.Tensor,  # (64, part_n, stages) of the warpgroup
    gD: cute.Tensor,  # (64, part_n, row tiles, column tiles), coordinates for TMA
    d_atom: cute.CopyAtom,
    row_idx: Int32,
    wave_rows: cutlass.Constexpr[int],
    col_idx: Int32,
    barrier_id: Int32,
    transpose: cutlass.Constexpr[bool],
):
    """Store the waves of a warpgroup; the first is row tile ``row_idx``.

    The others follow ``wave_rows`` row tiles apart. Warpgroups store independently: one may be a
    stage behind the other. ``transpose`` is for an ``sD`` whose columns are contiguous.
    """
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    leader = cute.arch.make_warp_uniform(thread // 32) == 0
    r2s, tRS_rD, tRS_sD = registers_to_shared(tiled_mma, sD, thread, BFloat16, transpose)
    values = cute.size(tRS_rD)
    bSG_sD, bSG_gD = partition(d_atom, sD, gD)
    num_waves, num_stages = cute.size(sums, mode=[3]), cute.size(sD, mode=[2])
    num_parts = cute.size(sums, mode=[0]) // values
    for i in cutlass.range_constexpr(num_waves * num_parts):
        wave, part, stage = i // num_parts, i % num_parts, i % num_stages
        tRS_rAcc = r2s.retile(sums[None, None, None, wave])
        if leader:  # wait until the last store from this stage has read it
            cute.arch.cp_async_bulk_wait_group(num_stages - 1, read=True)
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=WARPGROUP)
        for v in cutlass.range_constexpr(values):
            tRS_rD[v] = tRS_rAcc[part * values + v].to(BFloat16)
        cute.copy(r2s, tRS_rD, tRS_sD[None, None, None, stage])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=WARPGROUP)
        if leader:
            row, col = row_idx + wave * wave_rows, col_idx * num_parts + part
            cute.copy(d_atom, bSG_sD[None, stage], bSG_gD[None, row, col])
            cute.arch.cp_async_bulk_commit_group()

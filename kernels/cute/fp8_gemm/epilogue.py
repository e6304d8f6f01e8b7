"""A warpgroup's sums -> bfloat16 -> shared memory -> TMA, 64 rows and some columns at a time."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32

from kernelcat.kernels.cute.common.stmatrix import registers_to_shared
from kernelcat.kernels.cute.common.tma import partition

WARPGROUP = 128


@cute.jit
def store_tile(
    total: cute.Tensor,  # ((2, 2, n / 8), 1, 1, waves): a thread's sums
    tiled_mma: cute.TiledMma,  # of one warpgroup
    sD: cute.Tensor,  # (64, epi_n, epi_stages): the warpgroup's own
    gD: cute.Tensor,  # (64, epi_n, row tiles, column tiles)
    d_atom: cute.CopyAtom,
    row_idx: Int32,
    wave_rows: cutlass.Constexpr[int],
    col_idx: Int32,
    barrier_id: Int32,
    transpose: cutlass.Constexpr[bool],
):
    """Store waves ``wave_rows`` row tiles apart, the first one from ``row_idx`` on.

    Each warpgroup for itself: the other one may be a stage behind. ``transpose`` is for a D whose
    rows (of the tile) are contiguous.
    """
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    leader = cute.arch.make_warp_uniform(thread // 32) == 0
    r2s, tRS_rD, tRS_sD = registers_to_shared(tiled_mma, sD, thread, BFloat16, transpose)
    values = cute.size(tRS_rD)
    bSG_sD, bSG_gD = partition(d_atom, sD, gD)
    waves, epi_stages = cute.size(total, mode=[3]), cute.size(sD, mode=[2])
    parts = cute.size(total, mode=[0]) // values
    for i in cutlass.range_constexpr(waves * parts):
        wave, part, stage = i // parts, i % parts, i % epi_stages
        tRS_rAcc = r2s.retile(total[None, None, None, wave])
        if leader:  # the buffer must have been read by its last store
            cute.arch.cp_async_bulk_wait_group(epi_stages - 1, read=True)
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=WARPGROUP)
        for v in cutlass.range_constexpr(values):
            tRS_rD[v] = tRS_rAcc[part * values + v].to(BFloat16)
        cute.copy(r2s, tRS_rD, tRS_sD[None, None, None, stage])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=WARPGROUP)
        if leader:
            row, col = row_idx + wave * wave_rows, col_idx * parts + part
            cute.copy(d_atom, bSG_sD[None, stage], bSG_gD[None, row, col])
            cute.arch.cp_async_bulk_commit_group()

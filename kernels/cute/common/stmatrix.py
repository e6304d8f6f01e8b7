"""Accumulators of WGMMA, rounded to 16 bits, into shared memory by stmatrix."""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32
from cutlass.cute.nvgpu import warp
from cutlass.tensor_utils import LayoutEnum


def registers_to_shared(tiled_mma, sD, thread, dtype, transpose=False):
    """A tiled copy into ``sD`` (rows, columns, stages).

    Returns the copy, registers for a thread's part of one stage, and the places of that part in
    every stage. ``transpose`` is for an ``sD`` whose columns are contiguous.
    """
    layout = LayoutEnum.COL_MAJOR if transpose else LayoutEnum.ROW_MAJOR
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose, 4), dtype)
    r2s = cute.make_tiled_copy_S(
        sm90.sm90_get_smem_store_op(layout, dtype, Float32),
        cute.make_tiled_copy_C_atom(atom, tiled_mma),
    )
    thr_r2s = r2s.get_slice(thread)
    tRS_rD = cute.make_rmem_tensor(cute.shape(thr_r2s.partition_S(sD))[:3], dtype)
    return r2s, tRS_rD, thr_r2s.partition_D(sD)

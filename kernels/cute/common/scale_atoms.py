"""Block scales of tcgen05: atoms of them, in shared memory and in tensor memory.

An atom is four scales of each of 128 rows, 512 bytes: scale c of row r is byte
``r % 32 * 16 + r // 32 * 4 + c``, as in the swizzled layout of reference/_fp4.py.

``tcgen05.cp.32x128b.warpx4`` puts an atom's 32 pieces of 16 bytes into four columns of 32 lanes,
and once more into each other quarter of the lanes. A row's four scales then are column r // 32 of
lane r % 32, which is where a block-scaled ``tcgen05.mma`` looks for them. A product of 64 columns
of K uses all four of NVFP4, and the first or the second two of MXFP4 (PTX, scale factor layouts 4X
and 2X). A product of 32 columns of float8 or widened elements uses one (1X).
"""

import cutlass.cute as cute
from cutlass.cute.nvgpu import tcgen05

ATOM_ROWS, ATOM_COLS = 128, 4
ATOM_BYTES = ATOM_ROWS * ATOM_COLS
ATOM_COLUMNS = 4
"""Columns of tensor memory that an atom takes."""


def to_tensor_memory(
    group: tcgen05.CtaGroup,
    sS: cute.Tensor,  # stages of scales, in the layout that the products read
    tS: cute.Tensor,  # scales of one stage in tensor memory
):
    """``tcgen05.cp`` of a stage of scales into tensor memory.

    Returns the copy, its sources (a shared memory descriptor for each stage) and its target. The
    source gets a mode for the quarters of the lanes, all of which receive it: without that mode the
    tiles of the copy would reach past the atom.
    """
    atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(group), sS.element_type)
    source = tcgen05.append_s2t_broadcast_mode(atom.op, cute.filter_zeros(sS))
    target = cute.filter_zeros(tS)
    copy = tcgen05.make_s2t_copy(atom, target)
    thr_copy = copy.get_slice(0)
    descriptors = tcgen05.get_s2t_smem_desc_tensor(copy, thr_copy.partition_S(source))
    return copy, descriptors, thr_copy.partition_D(target)

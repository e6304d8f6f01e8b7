"""Block scales on their way to the tensor cores: global, shared and tensor memory.

An atom is four scales of each of 128 rows, 512 bytes: scale c of row r is byte
``r % 32 * 16 + r // 32 * 4 + c``, as in the swizzled layout of reference/_fp4.py. Atoms of the same
rows follow one another along K, in global memory and in a stage. TMA copies whole atoms, and writes
zeros past the last one. Padding along K within an atom is multiplied with codes that TMA made zero:
it must not be NaN, and the entry makes it zero.

``tcgen05.cp.32x128b.warpx4`` puts an atom's 32 pieces of 16 bytes into four columns of 32 lanes,
and once more into each other quarter of the lanes. A row's four scales then are column r // 32 of
lane r % 32, which is where a block-scaled ``tcgen05.mma`` of 64 columns of K looks for them: for
all four of NVFP4, for the first or the second two of MXFP4 (PTX, scale factor layouts 4X and 2X).
"""

import cutlass.cute as cute
from cutlass import Int16
from cutlass.cute.nvgpu import cpasync, tcgen05

ATOM_ROWS, ATOM_COLS = 128, 4
ATOM_BYTES = ATOM_ROWS * ATOM_COLS
PAIRS = ATOM_BYTES // 2
"""Pairs of scales in an atom. TMA copies pairs: a side of its box has at most 256 elements."""
ATOM_COLUMNS = 4
"""Columns of tensor memory that an atom takes."""


def stored(pointer: cute.Pointer, rows, k, size: int) -> cute.Tensor:
    """The scales in global memory of ``rows`` x ``k`` elements, one for ``size`` elements of a row.

    Returns (PAIRS, atoms along K, atoms along the rows), in pairs of scales.
    """
    atoms_k, atoms_rows = cute.ceil_div(k, ATOM_COLS * size), cute.ceil_div(rows, ATOM_ROWS)
    layout = cute.make_layout(
        (PAIRS, atoms_k, atoms_rows), stride=(1, PAIRS, PAIRS * atoms_k)
    )
    return cute.make_tensor(cute.recast_ptr(pointer, dtype=Int16), layout)


def stages_of(atoms_k: int, atoms_rows: int, num_stages: int) -> cute.Layout:
    """Stages in shared memory as TMA fills them: (PAIRS, atoms_k, atoms_rows, stages), in pairs."""
    return cute.make_layout((PAIRS, atoms_k, atoms_rows, num_stages))


def place_of(n_idx, block_n: int):
    """Where the scales of tile ``n_idx`` of ``block_n`` rows are.

    Returns the index of the box of whole atoms that TMA loads, and the first of the tile's columns
    of 32 rows in that box.
    """
    rows = max(block_n, ATOM_ROWS)
    return n_idx * block_n // rows, n_idx * block_n % rows // 32


def load_atom(
    group: tcgen05.CtaGroup,
    tensor: cute.Tensor,  # (PAIRS, atoms along K, atoms along the rows)
    stages: cute.Layout,  # (PAIRS, atoms_k, atoms_rows, stages)
):
    """TMA loads from a tensor that ``stored`` makes into a stage of a layout of ``stages_of``."""
    return cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(group),
        tensor,
        cute.select(stages, mode=[0, 1, 2]),
        stages.shape[:3],
    )


def as_pairs(
    sS: cute.Tensor,  # stages of scales, in the layout that the products read
    stages: cute.Layout,  # (PAIRS, atoms_k, atoms_rows, stages)
) -> cute.Tensor:
    """Stages of scales in the layout that TMA fills, in pairs."""
    return cute.make_tensor(cute.recast_ptr(sS.iterator, dtype=Int16), stages)


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

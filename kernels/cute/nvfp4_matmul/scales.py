"""Block scales on their way to the tensor cores: global, shared and tensor memory.

An atom is four scales of each of 128 rows, 512 bytes: scale c of row r is byte
``r % 32 * 16 + r // 32 * 4 + c``, as the swizzled layout of reference/_fp4.py has it. Atoms of the
same rows follow one another along K, in global memory and in a stage: TMA copies them whole. Past
the last one it writes zeros. Padding along K within an atom multiplies codes that TMA made zeros:
it must not be NaN, and the entry has it zero.

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
"""Of scales in an atom: TMA's boxes have at most 256 elements a side."""
ATOM_COLUMNS = 4
"""Of tensor memory."""


def stored(pointer: cute.Pointer, rows, k, size: int) -> cute.Tensor:
    """The scales of ``rows`` rows of K, one for ``size`` elements, in global memory.

    Returns (PAIRS, atoms along K, atoms along the rows), in pairs of scales.
    """
    atoms_k, atoms_rows = cute.ceil_div(k, ATOM_COLS * size), cute.ceil_div(rows, ATOM_ROWS)
    layout = cute.make_layout(
        (PAIRS, atoms_k, atoms_rows), stride=(1, PAIRS, PAIRS * atoms_k)
    )
    return cute.make_tensor(cute.recast_ptr(pointer, dtype=Int16), layout)


def stages_of(atoms_k: int, atoms_rows: int, stages: int) -> cute.Layout:
    """Stages in shared memory as TMA fills them: (PAIRS, atoms_k, atoms_rows, stages), in pairs."""
    return cute.make_layout((PAIRS, atoms_k, atoms_rows, stages))


def place_of(n_idx, block_n: int):
    """Where the scales of a tile of ``block_n`` rows are: the box of whole atoms that TMA loads,
    and the first of its columns in tensor memory, of 32 rows each.
    """
    rows = max(block_n, ATOM_ROWS)
    return n_idx * block_n // rows, n_idx * block_n % rows // 32


def load_atom(group: tcgen05.CtaGroup, tensor: cute.Tensor, stages: cute.Layout):
    """TMA from what ``stored`` gives into a stage of what ``stages_of`` gives."""
    return cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(group),
        tensor,
        cute.select(stages, mode=[0, 1, 2]),
        stages.shape[:3],
    )


def as_pairs(sS: cute.Tensor, stages: cute.Layout) -> cute.Tensor:
    """Stages of scales as TMA sees them."""
    return cute.make_tensor(cute.recast_ptr(sS.iterator, dtype=Int16), stages)


def to_tensor_memory(group: tcgen05.CtaGroup, sS: cute.Tensor, tS: cute.Tensor):
    """``tcgen05.cp`` of a stage: the copy, stages as descriptors of shared memory, its target.

    A source has an extent for the quarters of the lanes, too, which repeat it. It is made explicit:
    else the copy's tiles would reach past the atom.
    """
    atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(group), sS.element_type)
    source = tcgen05.append_s2t_broadcast_mode(atom.op, cute.filter_zeros(sS))
    target = cute.filter_zeros(tS)
    copy = tcgen05.make_s2t_copy(atom, target)
    thr_copy = copy.get_slice(0)
    descriptors = tcgen05.get_s2t_smem_desc_tensor(copy, thr_copy.partition_S(source))
    return copy, descriptors, thr_copy.partition_D(target)

"""Block scales on their way into a stage: atoms (``common/scale_atoms.py``), copied by TMA.

Atoms of the same rows follow one another along K, in global memory and in a stage. TMA copies whole
atoms, and writes zeros past the last one. Padding along K within an atom is multiplied with codes
that TMA made zero: it must not be NaN, and the entry makes it zero.
"""

import cutlass.cute as cute
from cutlass import Int16
from cutlass.cute.nvgpu import cpasync, tcgen05

from kernelcat.kernels.cute.common.scale_atoms import ATOM_BYTES, ATOM_COLS, ATOM_ROWS

PAIRS = ATOM_BYTES // 2
"""Pairs of scales in an atom. TMA copies pairs: a side of its box has at most 256 elements."""


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

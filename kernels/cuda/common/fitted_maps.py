"""Tensor maps of operands whose last tiles load no rows outside; see FittedOperand.

TMA fills what a box has outside of its tensor with zeros, and takes more than twice the time of a
row for each such row. Here the last tiles have maps with boxes of their own height.
"""

from __future__ import annotations

from collections.abc import Callable

from kernelcat.catalog.implementation import TensorMap
from kernelcat.kernels.cuda.common.persistent import PersistentPlan, loaded_rows

ATOM = 8
"""Rows that the swizzle takes together: boxes have whole atoms."""


def edge_rows(rows: int, block: int, part: int) -> int:
    """Rows of the last box of an operand of ``rows``, in whole atoms: of the ``part`` rows that a
    thread block loads of a tile of ``block``, those that exist; ``part`` if no box is shorter."""
    inside = -(-(rows % block) // ATOM) * ATOM
    return inside % part or part


def fitted_maps(
    make: Callable[[int], TensorMap], rows: int, block: int, sharers: int
) -> tuple[TensorMap, TensorMap]:
    """The maps of whole boxes and of the last one. ``make`` takes the height of a box; ``sharers``
    thread blocks need the ``block`` rows of a tile."""
    part = loaded_rows(block, sharers)
    return make(part), make(edge_rows(rows, block, part))


def nothing_outside(plan: PersistentPlan) -> str | None:
    """Why fitted maps save nothing, or None."""
    if plan.outside < ATOM:
        return "no tile has rows or columns outside of the product: wgmma takes as long"
    return None

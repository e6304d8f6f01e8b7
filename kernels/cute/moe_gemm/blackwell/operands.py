"""Operands of a tile on their way into a stage: by TMA, from any row on, or gathered row by row.

4-bit weights become widened elements: TMA puts sixteen codes, 8 bytes, into every 16 bytes of
shared memory (tensor map type 16U4_ALIGN16B), where kind::mxf8f6f4 looks for them. Such a tensor
map has rows of whole 128 codes. Rows of another length end in a k-block that begins 128 columns
before their end, which has a tensor map of its own.

Rows of A that are tokens come by TMA's tile::gather4, four rows with an instruction.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float4E2M1FN, Int32, Uint8
from cutlass.cute.nvgpu import cpasync, make_tiled_tma_atom_A, make_tiled_tma_atom_B

from kernelcat.kernels.cute.common.tma import partition

ALONE = (1, 1, 1, 1)
"""The cluster of a thread block that shares its operands with no other one."""


def weights_atom(tiled_mma, tiler, layout, tensor):
    """TMA loads of W (rows, k), the left operand; 4-bit codes are widened."""
    return make_tiled_tma_atom_A(
        cpasync.CopyBulkTensorTileG2SOp(),
        tensor,
        cute.select(layout, mode=[0, 1, 2]),
        tiler,
        tiled_mma,
        ALONE,
        internal_type=Uint8 if tensor.element_type is Float4E2M1FN else None,
    )


def rows_atom(tiled_mma, tiler, layout, tensor):
    """TMA loads of A (rows, k), the right operand."""
    stage = cute.select(layout, mode=[0, 1, 2])
    load = cpasync.CopyBulkTensorTileG2SOp()
    return make_tiled_tma_atom_B(load, tensor, stage, tiler, tiled_mma, ALONE)


def gather_atom(layout, tile, tensor, indices):
    """TMA loads of rows of A (rows, k) whose indices are ``indices`` (rows of a tile, k).

    ``layout`` is that of a stage as the products read it.
    """
    rows, cols = tile
    stage = cute.make_composed_layout(layout.inner, 0, plain_stages(rows, cols, 1))
    load = cpasync.CopyBulkTensor2DGather4G2SOp()
    return cpasync.make_tiled_tma_atom(
        load, tensor, cute.select(stage, mode=[0, 1]), tile, gmem_coord_tensor=indices
    )


def plain_stages(rows: int, cols: int, num_stages: int) -> cute.Layout:
    """Stages as (rows, columns, stages), before the swizzle; a row has 128 bytes."""
    return cute.make_layout((rows, cols, num_stages), stride=(cols, 1, rows * cols))


class Rows(NamedTuple):
    """A matrix whose rows follow one another, as TMA loads tiles of it."""

    atom: cute.CopyAtom
    stages: cute.Tensor  # as the products read them
    tensor: cute.Tensor  # (rows, k), coordinates for TMA
    tile: tuple[int, int]
    slice_of: Callable[[cute.Tensor], cute.Tensor]  # partitions a tile as the products do


class GatheredRows(NamedTuple):
    """A matrix of which a tile has the rows whose indices are in shared memory."""

    atom: cute.CopyAtom
    stages: cute.Tensor  # of ``plain_stages``
    tensor: cute.Tensor  # (block_m, k), coordinates for TMA
    tile: tuple[int, int]
    indices: cute.Tensor  # (block_m, k), the same in every column


def tiles_of(operand: Rows | GatheredRows, row: Int32, col: Int32):
    """Stages, and the tiles from a row and a column on, along K; gathered rows come by indices."""
    if isinstance(operand, Rows):
        tensor = cute.domain_offset((row, col), operand.tensor)
        tiles = cute.local_tile(tensor, operand.tile, (0, None))
        return partition(operand.atom, operand.stages, operand.slice_of(tiles))
    tensors = cute.domain_offset((0, col), operand.tensor), operand.indices
    tiles = [cute.local_tile(tensor, operand.tile, (0, None)) for tensor in tensors]
    return cpasync.tma_partition(
        operand.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(operand.stages, 0, 2),
        [cute.group_modes(tile, 0, 2) for tile in tiles],
    )


def load(operand: Rows | GatheredRows, tiles: tuple, k_idx: Int32, stage):
    """Start loading a tile of ``tiles_of`` into a stage, whose barrier counts the bytes."""
    stages, *sources = tiles
    parts = [source[None, k_idx] for source in sources]  # coordinates, and indices of rows
    source = parts if len(parts) > 1 else parts[0]
    cute.copy(operand.atom, source, stages[None, stage.index], tma_bar_ptr=stage.barrier)

"""Packed 4-bit weights W as wgmma kernels load them: stages of some rows by 128 columns of W."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.implementation import TensorMap
from kernelcat.reference._fp4_tiles import TILE_COLS, TILE_ROWS
from kernelcat.runtime.gpu import KB

STAGE_ROWS, STAGE_COLS = 128, 128
"""Rows of W in a stage, unless a kernel has stages of more, and columns."""


def stage_bytes(a_rows: int, scale_block: int, stage_rows: int = STAGE_ROWS) -> int:
    """Rows of A in 16 bits, codes and scales, padded to the next stage's alignment of 1 KB.

    ``scale_block`` weights share a scale; a stage has ``stage_rows`` rows of W.
    """
    weights = stage_rows * (STAGE_COLS // 2 + STAGE_COLS // scale_block)
    return 2 * a_rows * STAGE_COLS + ceil(weights / KB) * KB


def weight_maps(
    tile_rows: int, tile_cols: int, scale_block: int, stage_rows: int = STAGE_ROWS
) -> tuple[TensorMap, TensorMap]:
    """Maps of ``w`` and ``w_scale``: a tile row is a row of 32-bit words, a box fills a stage.

    W has ``tile_rows`` x ``tile_cols`` tiles, a stage ``stage_rows`` rows of W.
    """
    stage_tiles, stage_tile_rows = STAGE_COLS // TILE_COLS, stage_rows // TILE_ROWS

    def map_of(tensor: str, tile_bytes: int) -> TensorMap:
        words = tile_bytes // 4
        shape, box = (tile_cols * words, tile_rows), (stage_tiles * words, stage_tile_rows)
        return TensorMap(tensor, "int32", shape, (tile_cols * tile_bytes,), box)

    code_bytes = TILE_ROWS * TILE_COLS // 2
    return map_of("w", code_bytes), map_of("w_scale", 2 * code_bytes // scale_block)

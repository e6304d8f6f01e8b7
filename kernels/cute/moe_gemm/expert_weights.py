"""Weights of experts, one element at a time; reference/_experts.py defines formats and packings."""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32

from kernelcat.kernels.cute.common.float8 import to_float
from kernelcat.kernels.cute.common.fp4 import code_value, scale_value
from kernelcat.kernels.cute.common.quantize import BLOCK

TILE_ROWS, TILE_COLS = 16, 64
"""A tile of packed codes (reference/_fp4_tiles.py)."""
TILE_BYTES = TILE_ROWS * TILE_COLS // 2
SCALED_CODES = {"mxfp4": 32, "nvfp4": 16}
"""Codes that share a scale."""


class ExpertWeights:
    """The weights of all experts, (experts * n, k), in ``format``.

    ``in_tiles`` is for packed 4-bit weights. With ``rounded`` products of codes and scales are
    rounded to float16; only MXFP4 has products that float16 does not hold.
    """

    def __init__(self, format: str, in_tiles: bool, rounded: bool):
        self.is_fp8, self.is_fp4 = format == "fp8", format in SCALED_CODES
        self.is_nvfp4 = format == "nvfp4"
        self.in_tiles, self.rounded = in_tiles, rounded
        self.block = SCALED_CODES.get(format, BLOCK)

    @cute.jit
    def element(
        self,
        mW: cute.Tensor,  # flat: elements, or bytes
        mS: cute.Tensor,  # flat: float32, or bytes
        expert: Int32,
        row: Int32,
        col: Int32,
        n: Int32,
        k: Int32,
    ):
        """Element (row, col) of an expert's weights without the global scale of NVFP4."""
        all_rows = Int64(expert) * n + row
        if cutlass.const_expr(self.is_fp4):
            scale = Uint32(mS[self.scale_place(all_rows, col, k)])
            value = self.code(mW, all_rows, col, k) * scale_value(scale, self.is_nvfp4)
            if cutlass.const_expr(self.rounded):
                value = Float32(value.to(Float16))
        elif cutlass.const_expr(self.is_fp8):
            block_row = Int64(expert) * cute.ceil_div(n, BLOCK) + row // BLOCK
            scale = mS[block_row * cute.ceil_div(k, BLOCK) + col // BLOCK]
            value = to_float(mW[all_rows * k + col]) * scale
        else:
            value = Float32(mW[all_rows * k + col])
        return value

    @cute.jit
    def code(
        self,
        mW: cute.Tensor,  # flat bytes
        row: Int64,
        col: Int32,
        k: Int32,
    ):
        """The value of a 4-bit code."""
        if cutlass.const_expr(self.in_tiles):
            tile = row // TILE_ROWS * cute.ceil_div(k, TILE_COLS) + col // TILE_COLS
            tile_row = Int32(row % TILE_ROWS)
            lane = tile_row % 8 * 4 + col % 8 // 2
            nibble = tile_row // 8 + col % 16 // 8 * 2 + col % 2 * 4
            place = tile * TILE_BYTES + Int64(lane * 16 + col % TILE_COLS // 16 * 4 + nibble // 2)
        else:
            nibble, place = col % 2, row * (k // 2) + col // 2
        return code_value(Uint32(mW[place]) >> Uint32(4 * (nibble % 2)), 0)

    @cute.jit
    def scale_place(self, row: Int64, col: Int32, k: Int32):
        """The offset of the scale of a 4-bit code."""
        block = col // self.block
        if cutlass.const_expr(self.in_tiles):
            tile_blocks = TILE_COLS // self.block
            tile = row // TILE_ROWS * cute.ceil_div(k, TILE_COLS) + col // TILE_COLS
            tile_row = Int32(row % TILE_ROWS)
            within = (tile_row % 8 * 2 + tile_row // 8) * tile_blocks + block % tile_blocks
            place = tile * (TILE_ROWS * tile_blocks) + Int64(within)
        else:
            place = row * (k // self.block) + block
        return place

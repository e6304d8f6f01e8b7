"""Product with 4-bit weights without tricks: one thread for each element of D, in float32."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint32

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.epilogue import Epilogue
from kernelcat.kernels.cute.common.float8 import to_float
from kernelcat.kernels.cute.common.fp4 import (
    block_size,
    code_value,
    scale_offset,
    scale_value,
)

BLOCK = 16
TILE_ROWS, TILE_COLS = 16, 64


class Naive:
    """Computes any shape, K = 0 included, for either packing and every type of A."""

    def __init__(self, kind: str, out: str, nvfp4: bool, tiles: bool, bias: bool, activation: str):
        self.epilogue = Epilogue(out, bias, activation, residual=False)
        self.is_coded, self.fp8 = kind == "float4_e2m1fn_x2", kind == "float8_e4m3fn"
        self.dtype = BFloat16 if self.is_coded or self.fp8 else element_type(kind)
        self.nvfp4, self.tiles, self.block_size = nvfp4, tiles, block_size(nvfp4)

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (m, k), as bytes for float8; (m, k / 2) bytes of codes
        w: cute.Pointer,  # (n, k / 2) bytes, in rows or in tiles
        w_scale: cute.Pointer,  # (n, k / block_size) bytes, in rows or in tiles
        global_scale: cute.Pointer,  # (1,) float32, for NVFP4
        a_scale: cute.Pointer,  # (m,) float32, for float8
        a_block_scale: cute.Pointer,  # (m, k / block_size) bytes, swizzled, for codes
        bias: cute.Pointer,  # (n,)
        d: cute.Pointer,  # (m, n), or (m, n / 2) of swiglu
        m: Int32,
        n: Int32,
        k: Int32,
        stream: cuda.CUstream,
    ):
        num_cols = n // self.epilogue.span
        mD = cute.make_tensor(d, cute.make_layout((m, num_cols), stride=(Int64(num_cols), 1)))
        flat = cute.make_layout(Int64(1) << 40)  # the kernel computes offsets itself
        mA, mW = cute.make_tensor(a, flat), cute.make_tensor(w, flat)
        mWS, mAS = cute.make_tensor(w_scale, flat), cute.make_tensor(a_block_scale, flat)
        mG = cute.make_tensor(global_scale, cute.make_layout(1))
        mFactor = cute.make_tensor(a_scale, cute.make_layout(m))
        mBias = cute.make_tensor(bias, cute.make_layout(n))
        self.kernel(mA, mW, mWS, mG, mFactor, mAS, mBias, mD, k).launch(
            grid=(cute.ceil_div(num_cols, BLOCK), cute.ceil_div(m, BLOCK), 1),
            block=(BLOCK, BLOCK, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mA: cute.Tensor,  # flat
        mW: cute.Tensor,  # flat
        mWS: cute.Tensor,  # flat
        mG: cute.Tensor,  # (1,)
        mFactor: cute.Tensor,  # (m,)
        mAS: cute.Tensor,  # flat
        mBias: cute.Tensor,  # (n,)
        mD: cute.Tensor,  # (m, columns of D)
        k: Int32,
    ):
        x, y, _ = cute.arch.thread_idx()
        block_x, block_y, _ = cute.arch.block_idx()
        row, col = block_y * BLOCK + y, block_x * BLOCK + x
        if row < mD.shape[0] and col < mD.shape[1]:
            factor = Float32(1)
            if cutlass.const_expr(self.nvfp4):
                factor = mG[0]
            if cutlass.const_expr(self.fp8):
                factor = factor * mFactor[row]
            if cutlass.const_expr(self.epilogue.is_gated):
                gate = self.product(mA, mAS, mW, mWS, mBias, factor, row, 2 * col, k)
                up = self.product(mA, mAS, mW, mWS, mBias, factor, row, 2 * col + 1, k)
                value = self.epilogue.gate(gate, up)
            else:
                z = self.product(mA, mAS, mW, mWS, mBias, factor, row, col, k)
                value = self.epilogue.activate(z)
            mD[row, col] = value.to(self.epilogue.dtype)

    @cute.jit
    def product(
        self,
        mA: cute.Tensor,  # flat
        mAS: cute.Tensor,  # flat
        mW: cute.Tensor,  # flat
        mWS: cute.Tensor,  # flat
        mBias: cute.Tensor,  # (n,)
        factor: Float32,
        row: Int32,
        col: Int32,
        k: Int32,
    ):
        """Element (row, col) of factor * (A @ W^T) + bias."""
        total = Float32(0)
        for block in cutlass.range(k // self.block_size, unroll=1):
            scale = scale_value(Uint32(mWS[self.weight_scale(col, block, k)]), self.nvfp4)
            a_scale = Float32(1)
            if cutlass.const_expr(self.is_coded):
                place = scale_offset(Int64(row), block, k // self.block_size, True)
                a_scale = scale_value(Uint32(mAS[place]), self.nvfp4)
            for i in cutlass.range(self.block_size, unroll=1):
                at = block * self.block_size + i
                w = self.weight(mW, col, at, k) * scale
                if cutlass.const_expr(self.dtype is Float16):
                    w = Float32(w.to(Float16))
                total += w * self.activation(mA, row, at, k) * a_scale
        total = total * factor
        if cutlass.const_expr(self.epilogue.bias):
            total += Float32(mBias[col])
        return total

    @cute.jit
    def activation(
        self,
        mA: cute.Tensor,  # flat
        row: Int32,
        at: Int32,
        k: Int32,
    ):
        """A[row, at] without scales."""
        if cutlass.const_expr(self.is_coded):
            value = code_of(mA[Int64(row) * (k // 2) + at // 2], at % 2)
        elif cutlass.const_expr(self.fp8):
            value = to_float(mA[Int64(row) * k + at])
        else:
            value = Float32(mA[Int64(row) * k + at])
        return value

    @cute.jit
    def weight(
        self,
        mW: cute.Tensor,  # flat
        col: Int32,
        at: Int32,
        k: Int32,
    ):
        """W[col, at] without scales; tiles are laid out as in reference/_fp4_tiles.py."""
        if cutlass.const_expr(self.tiles):
            tile = Int64(col // TILE_ROWS) * cute.ceil_div(k, TILE_COLS) + at // TILE_COLS
            lane = col % 8 * 4 + at % 8 // 2
            nibble = col % 16 // 8 + at % 16 // 8 * 2 + at % 2 * 4
            place = tile * 512 + Int64(lane * 16 + at % TILE_COLS // 16 * 4 + nibble // 2)
            value = code_of(mW[place], nibble % 2)
        else:
            value = code_of(mW[Int64(col) * (k // 2) + at // 2], at % 2)
        return value

    @cute.jit
    def weight_scale(self, col: Int32, block: Int32, k: Int32):
        """The offset of the scale of block ``block`` of row ``col`` of W."""
        num_blocks = k // self.block_size
        if cutlass.const_expr(self.tiles):
            tile_blocks = TILE_COLS // self.block_size
            tile = Int64(col // TILE_ROWS) * cute.ceil_div(k, TILE_COLS) + block // tile_blocks
            within = (col % 8 * 2 + col % 16 // 8) * tile_blocks + block % tile_blocks
            place = tile * (TILE_ROWS * tile_blocks) + within
        else:
            place = scale_offset(Int64(col), block, num_blocks, self.is_coded)
        return place


@cute.jit
def code_of(pair: Uint8, index: Int32):
    """The value of the first (0) or second (1) code of a byte."""
    return code_value(Uint32(pair) >> Uint32(4 * index), 0)

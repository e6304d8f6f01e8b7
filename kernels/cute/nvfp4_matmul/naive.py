"""Codes by codes without tricks: one thread, one element of D, multiply-adds in float32."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint32

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.float8 import to_float
from kernelcat.kernels.cute.gemm.epilogue import Epilogue
from kernelcat.kernels.cute.nvfp4_quantize.fp4 import (
    block_size,
    code_value,
    scale_place,
    scale_value,
)

BLOCK = 16
TILE_ROWS, TILE_COLS = 16, 64


class Naive:
    """Any shape, either packing, every type of A; K = 0 included."""

    def __init__(self, kind: str, out: str, nvfp4: bool, tiles: bool, bias: bool, activation: str):
        self.epilogue = Epilogue(out, bias, activation, residual=False)
        self.coded, self.fp8 = kind == "float4_e2m1fn_x2", kind == "float8_e4m3fn"
        self.dtype = BFloat16 if self.coded or self.fp8 else element_type(kind)
        self.nvfp4, self.tiles, self.size = nvfp4, tiles, block_size(nvfp4)

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (m, k), or bytes: (m, k) of float8, (m, k / 2) of codes
        w: cute.Pointer,  # (n, k / 2) bytes, or tiles of them
        w_scale: cute.Pointer,  # (n, k / 16 or 32) bytes, or tiles of them
        global_scale: cute.Pointer,  # (1,) float32, of NVFP4
        a_scale: cute.Pointer,  # (m,) float32, of float8
        a_block_scale: cute.Pointer,  # bytes, swizzled, of codes
        bias: cute.Pointer,  # (n,)
        d: cute.Pointer,  # (m, n), or (m, n / 2) of swiglu
        m: Int32,
        n: Int32,
        k: Int32,
        stream: cuda.CUstream,
    ):
        cols = n // self.epilogue.span
        mD = cute.make_tensor(d, cute.make_layout((m, cols), stride=(Int64(cols), 1)))
        endless = cute.make_layout(Int64(1) << 40)  # where a place is computed
        mA, mW = cute.make_tensor(a, endless), cute.make_tensor(w, endless)
        mWS, mAS = cute.make_tensor(w_scale, endless), cute.make_tensor(a_block_scale, endless)
        mG = cute.make_tensor(global_scale, cute.make_layout(1))
        mFactor = cute.make_tensor(a_scale, cute.make_layout(m))
        mBias = cute.make_tensor(bias, cute.make_layout(n))
        self.kernel(mA, mW, mWS, mG, mFactor, mAS, mBias, mD, k).launch(
            grid=(cute.ceil_div(cols, BLOCK), cute.ceil_div(m, BLOCK), 1),
            block=(BLOCK, BLOCK, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mA: cute.Tensor,
        mW: cute.Tensor,
        mWS: cute.Tensor,
        mG: cute.Tensor,
        mFactor: cute.Tensor,
        mAS: cute.Tensor,
        mBias: cute.Tensor,
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
            if cutlass.const_expr(self.epilogue.gated):
                gate = self.product(mA, mAS, mW, mWS, mBias, factor, row, 2 * col, k)
                up = self.product(mA, mAS, mW, mWS, mBias, factor, row, 2 * col + 1, k)
                value = self.epilogue.gate(gate, up)
            else:
                z = self.product(mA, mAS, mW, mWS, mBias, factor, row, col, k)
                value = self.epilogue.activate(z)
            mD[row, col] = value.to(self.epilogue.dtype)

    @cute.jit
    def product(
        self, mA, mAS, mW, mWS, mBias, factor: Float32, row: Int32, col: Int32, k: Int32
    ):  # fmt: skip
        """One element of factor * (A @ W^T) + bias."""
        total = Float32(0)
        for block in cutlass.range(k // self.size, unroll=1):
            scale = scale_value(Uint32(mWS[self.weight_scale(col, block, k)]), self.nvfp4)
            a_scale = Float32(1)
            if cutlass.const_expr(self.coded):
                place = scale_place(Int64(row), block, k // self.size, True)
                a_scale = scale_value(Uint32(mAS[place]), self.nvfp4)
            for i in cutlass.range(self.size, unroll=1):
                at = block * self.size + i
                w = self.weight(mW, col, at, k) * scale
                if cutlass.const_expr(self.dtype is Float16):
                    w = Float32(w.to(Float16))
                total += w * self.activation(mA, row, at, k) * a_scale
        total = total * factor
        if cutlass.const_expr(self.epilogue.bias):
            total += Float32(mBias[col])
        return total

    @cute.jit
    def activation(self, mA: cute.Tensor, row: Int32, at: Int32, k: Int32):
        """A[row, at], without scales."""
        if cutlass.const_expr(self.coded):
            value = code_of(mA[Int64(row) * (k // 2) + at // 2], at % 2)
        elif cutlass.const_expr(self.fp8):
            value = to_float(mA[Int64(row) * k + at])
        else:
            value = Float32(mA[Int64(row) * k + at])
        return value

    @cute.jit
    def weight(self, mW: cute.Tensor, col: Int32, at: Int32, k: Int32):
        """The value of a code of W[col, at]; tiles are those of reference/_fp4_tiles.py."""
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
        """Where the scale of W[col, block] lies."""
        num_blocks = k // self.size
        if cutlass.const_expr(self.tiles):
            each = TILE_COLS // self.size
            tile = Int64(col // TILE_ROWS) * cute.ceil_div(k, TILE_COLS) + block // each
            within = (col % 8 * 2 + col % 16 // 8) * each + block % each
            place = tile * (TILE_ROWS * each) + within
        else:
            place = scale_place(Int64(col), block, num_blocks, self.coded)
        return place


@cute.jit
def code_of(pair: Uint8, index: Int32):
    """The first (0) or second (1) value of a pair."""
    return code_value(Uint32(pair) >> Uint32(4 * index), 0)

"""Products grouped by expert without tricks: one thread for each element of D, in float32."""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.float8 import to_float
from kernelcat.kernels.cute.common.gating import gated
from kernelcat.kernels.cute.common.quantize import BLOCK as SCALED
from kernelcat.kernels.cute.moe_gemm.expert_weights import ExpertWeights

BLOCK = 16
"""Rows and columns of D that a thread block computes."""


class Operands(NamedTuple):
    """What an element of a product is computed from."""

    a: cute.Tensor  # (a_rows, k)
    a_scale: cute.Tensor  # (a_rows, k / 128)
    w: cute.Tensor  # flat
    w_scale: cute.Tensor  # flat
    global_scale: cute.Tensor  # (experts,)
    bias: cute.Tensor  # (experts, n)
    n: Int32


class Groups(NamedTuple):
    """How rows are grouped by expert."""

    offsets: cute.Tensor  # (experts + 1,)
    order: cute.Tensor  # (rows,)
    top_k: Int32


class Naive:
    """Computes any shape in any format, K = 0 included."""

    def __init__(
        self,
        dtype: str,
        act_dtype: str,
        format: str,
        in_tiles: bool,
        activation: str,
        gather: bool,
        combine: bool,
        bias: bool,
        residual: bool,
    ):
        self.dtype, self.is_float8 = element_type(dtype), act_dtype == "float8_e4m3fn"
        self.weights = ExpertWeights(format, in_tiles, act_dtype == "float16")
        self.is_nvfp4, self.activation = format == "nvfp4", activation
        self.is_gated = activation != "none"
        self.gather, self.combine = gather, combine
        self.bias, self.residual = bias, residual

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (a_rows, k)
        a_scale: cute.Pointer,  # (k / 128, a_rows), for float8
        w: cute.Pointer,  # (experts, n, k) in the format
        w_scale: cute.Pointer,  # (experts, ...), for formats with scales
        global_scale: cute.Pointer,  # (experts,), for NVFP4
        bias: cute.Pointer,  # (experts, n)
        offsets: cute.Pointer,  # (experts + 1,)
        order: cute.Pointer,  # (tokens * top_k,)
        position: cute.Pointer,  # (tokens, top_k), with ``combine``
        gates: cute.Pointer,  # (tokens, top_k), with ``combine``
        residual: cute.Pointer,  # (tokens, columns of d)
        d: cute.Pointer,  # (tokens or tokens * top_k, n or n / 2)
        tokens: Int32,
        top_k: Int32,
        experts: Int32,
        n: Int32,
        k: Int32,
        stream: cuda.CUstream,
    ):
        num_rows = tokens * top_k
        a_rows = tokens if cutlass.const_expr(self.gather) else num_rows
        d_rows = tokens if cutlass.const_expr(self.combine) else num_rows
        d_cols = n // 2 if cutlass.const_expr(self.is_gated) else n
        matrix = cute.make_layout((d_rows, d_cols), stride=(Int64(d_cols), 1))
        slots = cute.make_layout((tokens, top_k), stride=(top_k, 1))
        flat = cute.make_layout(Int64(1) << 40)  # ExpertWeights computes offsets itself
        scales = cute.make_layout((a_rows, cute.ceil_div(k, SCALED)), stride=(1, Int64(a_rows)))
        self.kernel(
            cute.make_tensor(a, cute.make_layout((a_rows, k), stride=(Int64(k), 1))),
            cute.make_tensor(a_scale, scales),
            cute.make_tensor(w, flat),
            cute.make_tensor(w_scale, flat),
            cute.make_tensor(global_scale, cute.make_layout(experts)),
            cute.make_tensor(bias, cute.make_layout((experts, n), stride=(Int64(n), 1))),
            cute.make_tensor(offsets, cute.make_layout(experts + 1)),
            cute.make_tensor(order, cute.make_layout(num_rows)),
            cute.make_tensor(position, slots),
            cute.make_tensor(gates, slots),
            cute.make_tensor(residual, matrix),
            cute.make_tensor(d, matrix),
            n,
        ).launch(
            grid=(cute.ceil_div(d_cols, BLOCK), cute.ceil_div(d_rows, BLOCK), 1),
            block=(BLOCK, BLOCK, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mA: cute.Tensor,  # (a_rows, k)
        mAS: cute.Tensor,  # (a_rows, k / 128)
        mW: cute.Tensor,  # flat
        mWS: cute.Tensor,  # flat
        mG: cute.Tensor,  # (experts,)
        mBias: cute.Tensor,  # (experts, n)
        mOffsets: cute.Tensor,  # (experts + 1,)
        mOrder: cute.Tensor,  # (rows,)
        mPosition: cute.Tensor,  # (tokens, top_k)
        mGates: cute.Tensor,  # (tokens, top_k)
        mR: cute.Tensor,  # (tokens, columns of D)
        mD: cute.Tensor,  # (rows of D, columns of D)
        n: Int32,
    ):
        x, y, _ = cute.arch.thread_idx()
        block_x, block_y, _ = cute.arch.block_idx()
        row, col = block_y * BLOCK + y, block_x * BLOCK + x
        if row < mD.shape[0] and col < mD.shape[1]:
            source = Operands(mA, mAS, mW, mWS, mG, mBias, n)
            groups = Groups(mOffsets, mOrder, mPosition.shape[1])
            total = Float32(0)  # of rows without an assignment
            if cutlass.const_expr(self.combine):
                if cutlass.const_expr(self.residual):
                    total = Float32(mR[row, col])
                for slot in cutlass.range(mPosition.shape[1], unroll=1):
                    grouped_row = mPosition[row, slot]
                    if grouped_row >= 0:
                        total += mGates[row, slot] * self.result(source, groups, grouped_row, col)
            else:
                if row < mOffsets[cute.size(mG)]:
                    total = self.result(source, groups, row, col)
            mD[row, col] = total.to(self.dtype)

    @cute.jit
    def result(self, source: Operands, groups: Groups, row: Int32, col: Int32):
        """Element (row, col) of the activated product; ``row`` has an assignment."""
        expert = Int32(0)
        while row >= groups.offsets[expert + 1]:
            expert += 1
        a_row = row
        if cutlass.const_expr(self.gather):
            a_row = groups.order[row] // groups.top_k
        if cutlass.const_expr(self.is_gated):
            gate = self.product(source, a_row, expert, 2 * col)
            up = self.product(source, a_row, expert, 2 * col + 1)
            value = gated(gate, up, self.activation)
        else:
            value = self.product(source, a_row, expert, col)
        return value

    @cute.jit
    def product(self, source: Operands, a_row: Int32, expert: Int32, col: Int32):
        """Row ``a_row`` of A times row ``col`` of the expert's weights, plus the bias."""
        total, k = Float32(0), source.a.shape[1]
        for i in cutlass.range(k, unroll=4):
            if cutlass.const_expr(self.is_float8):
                value = to_float(source.a[a_row, i]) * source.a_scale[a_row, i // SCALED]
            else:
                value = Float32(source.a[a_row, i])
            total += value * self.weights.element(
                source.w, source.w_scale, expert, col, i, source.n, k
            )
        if cutlass.const_expr(self.is_nvfp4):
            total = total * source.global_scale[expert]
        if cutlass.const_expr(self.bias):
            total += Float32(source.bias[expert, col])
        return total

"""Merge without tricks: one warp per row, one part after another, one element at a time."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.attn_merge.part_weights import exp, finish
from kernelcat.kernels.cute.common.online_softmax import LOWEST

WARPS = 4
LANES = 32


class Naive:
    """Any shape. A row is a query token and head; a lane holds every 32nd element of a row."""

    def __init__(self, dtype: str, head_dim: int):
        self.dtype, self.head_dim = element_type(dtype), head_dim
        self.lane_elements = head_dim // LANES

    @cute.jit
    def __call__(
        self,
        outs: cute.Pointer,  # (num_parts, num_rows, head_dim)
        lses: cute.Pointer,  # (num_parts, num_rows) float32
        out: cute.Pointer,  # (num_rows, head_dim)
        lse: cute.Pointer,  # (num_rows,) float32
        num_parts: Int32,
        num_rows: Int32,
        stream: cuda.CUstream,
    ):
        dim = self.head_dim
        part_rows = Int64(num_rows)
        mX = cute.make_tensor(
            outs,
            cute.make_layout((dim, num_rows, num_parts), stride=(1, dim, part_rows * dim)),
        )
        mXL = cute.make_tensor(
            lses, cute.make_layout((num_rows, num_parts), stride=(1, part_rows))
        )
        mO = cute.make_tensor(out, cute.make_layout((dim, num_rows), stride=(1, dim)))
        mL = cute.make_tensor(lse, cute.make_layout(num_rows))
        self.kernel(mX, mXL, mO, mL).launch(
            grid=(cute.ceil_div(num_rows, WARPS), 1, 1), block=(LANES, WARPS, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,  # (head_dim, num_rows, num_parts)
        mXL: cute.Tensor,  # (num_rows, num_parts)
        mO: cute.Tensor,  # (head_dim, num_rows)
        mL: cute.Tensor,  # (num_rows,)
    ):
        lane, warp, _ = cute.arch.thread_idx()
        num_rows, num_parts = mXL.shape
        row_idx = cute.arch.block_idx()[0] * WARPS + warp
        if row_idx < num_rows:
            row = Int64(row_idx)  # the offset of a row in elements needs 64 bits
            values = cute.make_rmem_tensor(self.lane_elements, Float32)
            values.fill(0.0)
            max_lse, weight_sum = Float32(LOWEST), Float32(0)
            for part in cutlass.range(num_parts, unroll=1):
                part_lse = mXL[row, part]
                if part_lse > -Float32.inf:
                    old_max = max_lse
                    max_lse = cute.arch.fmax(max_lse, part_lse)
                    rescale, weight = exp(old_max - max_lse), exp(part_lse - max_lse)
                    weight_sum = weight_sum * rescale + weight
                    for i in cutlass.range_constexpr(self.lane_elements):
                        x = Float32(mX[i * LANES + lane, row, part])
                        values[i] = values[i] * rescale + x * weight

            factor, lse = finish(max_lse, weight_sum)
            for i in cutlass.range_constexpr(self.lane_elements):
                mO[i * LANES + lane, row] = (values[i] * factor).to(self.dtype)
            if lane == 0:
                mL[row] = lse

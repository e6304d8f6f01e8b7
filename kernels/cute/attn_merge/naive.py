"""Merge without tricks: one warp, one row, part after part and one element at a time."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.attn_merge.weights import exp, finish
from kernelcat.kernels.cute.paged_attn.softmax import LOWEST

WARPS = 4
LANES = 32


class Naive:
    """Any shape. A lane holds every 32nd element of its warp's row, a head of a token."""

    def __init__(self, dtype: str, head_dim: int):
        self.dtype, self.head_dim = element_type(dtype), head_dim
        self.held = head_dim // LANES

    @cute.jit
    def __call__(
        self,
        outs: cute.Pointer,  # (parts, rows, head_dim)
        lses: cute.Pointer,  # (parts, rows) float32
        out: cute.Pointer,  # (rows, head_dim)
        lse: cute.Pointer,  # (rows,) float32
        parts: Int32,
        rows: Int32,
        stream: cuda.CUstream,
    ):
        dim = self.head_dim
        part = Int64(rows)
        mX = cute.make_tensor(
            outs, cute.make_layout((dim, rows, parts), stride=(1, dim, part * dim))
        )
        mXL = cute.make_tensor(lses, cute.make_layout((rows, parts), stride=(1, part)))
        mO = cute.make_tensor(out, cute.make_layout((dim, rows), stride=(1, dim)))
        mL = cute.make_tensor(lse, cute.make_layout(rows))
        self.kernel(mX, mXL, mO, mL).launch(
            grid=(cute.ceil_div(rows, WARPS), 1, 1), block=(LANES, WARPS, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,  # (head_dim, rows, parts)
        mXL: cute.Tensor,  # (rows, parts)
        mO: cute.Tensor,  # (head_dim, rows)
        mL: cute.Tensor,  # (rows,)
    ):
        lane, warp, _ = cute.arch.thread_idx()
        rows, parts = mXL.shape
        index = cute.arch.block_idx()[0] * WARPS + warp
        if index < rows:
            row = Int64(index)  # its offset in elements needs 64 bits
            value = cute.make_rmem_tensor(self.held, Float32)
            value.fill(0.0)
            most, total = Float32(LOWEST), Float32(0)
            for part in cutlass.range(parts, unroll=1):
                lse = mXL[row, part]
                if lse > -Float32.inf:
                    before = most
                    most = cute.arch.fmax(most, lse)
                    kept, weight = exp(before - most), exp(lse - most)
                    total = total * kept + weight
                    for i in cutlass.range_constexpr(self.held):
                        x = Float32(mX[i * LANES + lane, row, part])
                        value[i] = value[i] * kept + x * weight

            factor, lse = finish(most, total)
            for i in cutlass.range_constexpr(self.held):
                mO[i * LANES + lane, row] = (value[i] * factor).to(self.dtype)
            if lane == 0:
                mL[row] = lse

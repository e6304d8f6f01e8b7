"""Merge in vectors of 16 bytes: several rows per thread block, several parts in flight.

The result of a part without visible keys is not read: loads of results wait for the parts' lses.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.attn_merge.part_weights import exp, finish
from kernelcat.kernels.cute.common.online_softmax import LOWEST

VECTOR = 8
"""Elements in 16 bytes."""


class Vectorized:
    """Any shape. A row is a query token and head; a thread holds one vector of one row.

    A thread loads ``unroll`` parts before it adds up the first of them.
    """

    def __init__(self, dtype: str, head_dim: int, threads: int, unroll: int):
        self.dtype, self.unroll = element_type(dtype), unroll
        self.row_vectors = head_dim // VECTOR
        self.block_rows = threads // self.row_vectors

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
        dim = self.row_vectors * VECTOR
        part_stride = cute.assume(Int64(num_rows) * dim, divby=dim)
        shape, stride = (VECTOR, self.row_vectors, num_rows), (1, VECTOR, dim)
        mX = cute.make_tensor(
            outs, cute.make_layout((*shape, num_parts), stride=(*stride, part_stride))
        )
        mXL = cute.make_tensor(
            lses, cute.make_layout((num_rows, num_parts), stride=(1, Int64(num_rows)))
        )
        mO = cute.make_tensor(out, cute.make_layout(shape, stride=stride))
        mL = cute.make_tensor(lse, cute.make_layout(num_rows))
        self.kernel(mX, mXL, mO, mL).launch(
            grid=(cute.ceil_div(num_rows, self.block_rows), 1, 1),
            block=(self.row_vectors, self.block_rows, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,  # (VECTOR, row_vectors, num_rows, num_parts)
        mXL: cute.Tensor,  # (num_rows, num_parts)
        mO: cute.Tensor,  # (VECTOR, row_vectors, num_rows)
        mL: cute.Tensor,  # (num_rows,)
    ):
        vector, block_row, _ = cute.arch.thread_idx()
        num_rows, num_parts = mXL.shape
        row_idx = cute.arch.block_idx()[0] * self.block_rows + block_row
        if row_idx < num_rows:
            row = Int64(row_idx)  # the offset of a row in elements needs 64 bits
            gX, gXL = mX[None, vector, row, None], mXL[row, None]
            rX = cute.make_rmem_tensor((VECTOR, self.unroll), self.dtype)
            part_lses = cute.make_rmem_tensor(self.unroll, Float32)
            values = cute.make_rmem_tensor(VECTOR, Float32)
            values.fill(0.0)
            max_lse, weight_sum = Float32(LOWEST), Float32(0)
            self.load(gX, gXL, Int32(0), num_parts, rX, part_lses)
            for first_part in cutlass.range(0, num_parts, self.unroll, unroll=1):
                old_max = max_lse
                for u in cutlass.range_constexpr(self.unroll):
                    max_lse = cute.arch.fmax(max_lse, part_lses[u])
                rescale = exp(old_max - max_lse)
                weight_sum *= rescale
                value = values.load() * rescale
                for u in cutlass.range_constexpr(self.unroll):
                    weight = exp(part_lses[u] - max_lse)
                    weight_sum += weight
                    value += rX[None, u].load().to(Float32) * weight
                values.store(value)
                self.load(gX, gXL, first_part + self.unroll, num_parts, rX, part_lses)

            factor, lse = finish(max_lse, weight_sum)
            rounded = cute.make_rmem_tensor(VECTOR, self.dtype)
            rounded.store((values.load() * factor).to(self.dtype))
            cute.autovec_copy(rounded, mO[None, vector, row])
            if vector == 0:
                mL[row] = lse

    @cute.jit
    def load(
        self,
        gX: cute.Tensor,  # (VECTOR, num_parts)
        gXL: cute.Tensor,  # (num_parts,)
        first_part: Int32,
        num_parts: Int32,
        rX: cute.Tensor,  # (VECTOR, unroll), written
        part_lses: cute.Tensor,  # (unroll,), written
    ):
        """Loads ``unroll`` parts from ``first_part`` on; those without visible keys as 0 and -inf.

        Callers use the vectors only after the branch of their loop. Within one block of code, the
        compiler waits for each load before it starts the next one.
        """
        for u in cutlass.range_constexpr(self.unroll):
            part_lses[u] = -Float32.inf
            if first_part + u < num_parts:
                part_lses[u] = gXL[first_part + u]
        rX.fill(0.0)
        for u in cutlass.range_constexpr(self.unroll):
            if part_lses[u] > -Float32.inf:
                cute.autovec_copy(gX[None, first_part + u], rX[None, u])

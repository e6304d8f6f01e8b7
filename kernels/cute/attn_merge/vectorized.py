"""Merge in vectors of 16 bytes: several rows a CTA, several parts in flight.

A part that saw no key is not read: loads wait for the log-sum-exps of their parts.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.attn_merge.weights import exp, finish
from kernelcat.kernels.cute.paged_attn.softmax import LOWEST

VECTOR = 8


class Vectorized:
    """Any shape. A thread holds a vector of a row; ``unroll`` parts are read before one is added.

    A row is a head of a token.
    """

    def __init__(self, dtype: str, head_dim: int, threads: int, unroll: int):
        self.dtype, self.unroll = element_type(dtype), unroll
        self.vectors = head_dim // VECTOR
        self.block_rows = threads // self.vectors

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
        dim = self.vectors * VECTOR
        part = cute.assume(Int64(rows) * dim, divby=dim)
        row_shape, row_stride = (VECTOR, self.vectors, rows), (1, VECTOR, dim)
        mX = cute.make_tensor(
            outs, cute.make_layout((*row_shape, parts), stride=(*row_stride, part))
        )
        mXL = cute.make_tensor(lses, cute.make_layout((rows, parts), stride=(1, Int64(rows))))
        mO = cute.make_tensor(out, cute.make_layout(row_shape, stride=row_stride))
        mL = cute.make_tensor(lse, cute.make_layout(rows))
        self.kernel(mX, mXL, mO, mL).launch(
            grid=(cute.ceil_div(rows, self.block_rows), 1, 1),
            block=(self.vectors, self.block_rows, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,  # (VECTOR, vectors, rows, parts)
        mXL: cute.Tensor,  # (rows, parts)
        mO: cute.Tensor,  # (VECTOR, vectors, rows)
        mL: cute.Tensor,  # (rows,)
    ):
        vector, its, _ = cute.arch.thread_idx()
        rows, parts = mXL.shape
        index = cute.arch.block_idx()[0] * self.block_rows + its
        if index < rows:
            row = Int64(index)  # its offset in elements needs 64 bits
            gX, gXL = mX[None, vector, row, None], mXL[row, None]
            held = cute.make_rmem_tensor((VECTOR, self.unroll), self.dtype)
            lses = cute.make_rmem_tensor(self.unroll, Float32)
            values = cute.make_rmem_tensor(VECTOR, Float32)
            values.fill(0.0)
            most, total = Float32(LOWEST), Float32(0)
            self.load(gX, gXL, Int32(0), parts, held, lses)
            for first in cutlass.range(0, parts, self.unroll, unroll=1):
                before = most
                for u in cutlass.range_constexpr(self.unroll):
                    most = cute.arch.fmax(most, lses[u])
                kept = exp(before - most)
                total *= kept
                value = values.load() * kept
                for u in cutlass.range_constexpr(self.unroll):
                    weight = exp(lses[u] - most)
                    total += weight
                    value += held[None, u].load().to(Float32) * weight
                values.store(value)
                self.load(gX, gXL, first + self.unroll, parts, held, lses)

            factor, lse = finish(most, total)
            rounded = cute.make_rmem_tensor(VECTOR, self.dtype)
            rounded.store((values.load() * factor).to(self.dtype))
            cute.autovec_copy(rounded, mO[None, vector, row])
            if vector == 0:
                mL[row] = lse

    @cute.jit
    def load(
        self,
        gX: cute.Tensor,  # (VECTOR, parts)
        gXL: cute.Tensor,  # (parts,)
        first: Int32,
        parts: Int32,
        held: cute.Tensor,  # (VECTOR, unroll), written
        lses: cute.Tensor,  # (unroll,), written
    ):
        """Vectors of ``unroll`` parts from ``first`` on: 0 at -inf where nothing was seen.

        Its uses are behind the loop's branch, else the compiler waits for one load before the next.
        """
        for u in cutlass.range_constexpr(self.unroll):
            lses[u] = -Float32.inf
            if first + u < parts:
                lses[u] = gXL[first + u]
        held.fill(0.0)
        for u in cutlass.range_constexpr(self.unroll):
            if lses[u] > -Float32.inf:
                cute.autovec_copy(gX[None, first + u], held[None, u])

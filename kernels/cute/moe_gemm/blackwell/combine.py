"""D[token] = residual + the sum over slots of gates * partial rows, in the order of the slots."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernelcat.jit.cute import element_type

VECTOR = 8
"""Columns of a thread."""
THREADS = 128
SLOTS = 4
"""Rows that a thread loads at a time."""


class Combine:
    """``is_aligned`` says whether n is a multiple of ``VECTOR``, so that vectors are stored."""

    def __init__(self, dtype: str, residual: bool, is_aligned: bool):
        self.dtype, self.residual, self.is_aligned = element_type(dtype), residual, is_aligned

    @cute.jit
    def __call__(
        self,
        partial: cute.Pointer,  # (rows, pitch), pitch a multiple of VECTOR
        position: cute.Pointer,  # (tokens, top_k)
        gates: cute.Pointer,  # (tokens, top_k)
        residual: cute.Pointer,  # like d
        d: cute.Pointer,  # (tokens, n)
        tokens: Int32,
        rows: Int32,
        top_k: Int32,
        n: Int32,
        pitch: Int32,
        stream: cuda.CUstream,
    ):
        pitch = cute.assume(Int64(pitch), divby=VECTOR)
        vectors = cute.make_layout(
            (VECTOR, pitch // VECTOR, rows), stride=(1, VECTOR, pitch)
        )
        slots = cute.make_layout((top_k, tokens), stride=(1, Int64(top_k)))
        stride = cute.assume(Int64(n), divby=VECTOR if self.is_aligned else 1)
        elements = cute.make_layout((VECTOR, pitch // VECTOR, tokens), stride=(1, VECTOR, stride))
        self.kernel(
            cute.make_tensor(partial, vectors),
            cute.make_tensor(position, slots),
            cute.make_tensor(gates, slots),
            cute.make_tensor(residual, elements),
            cute.make_tensor(d, elements),
            n,
        ).launch(
            grid=(tokens, cute.ceil_div(n, VECTOR * THREADS), 1),
            block=(THREADS, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mPartial: cute.Tensor,  # (VECTOR, vectors, rows)
        mPosition: cute.Tensor,  # (top_k, tokens)
        mGates: cute.Tensor,  # (top_k, tokens)
        mResidual: cute.Tensor,  # (VECTOR, vectors, tokens); the last vector may pass the row's end
        mD: cute.Tensor,  # like mResidual
        n: Int32,
    ):
        token, y, _ = cute.arch.block_idx()
        vector = y * THREADS + cute.arch.thread_idx()[0]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        count = n - vector * VECTOR
        if count > 0:
            sums = cute.make_rmem_tensor(VECTOR, Float32)
            sums.fill(0.0)
            if cutlass.const_expr(self.residual):
                self.load(mResidual[None, vector, token], sums, count)
            self.add(
                mPartial[None, vector, None], mPosition[None, token], mGates[None, token], sums
            )
            self.store(sums, mD[None, vector, token], count)

    @cute.jit
    def add(
        self,
        gPartial: cute.Tensor,  # (VECTOR, rows)
        gPosition: cute.Tensor,  # (top_k,)
        gGates: cute.Tensor,  # (top_k,)
        sums: cute.Tensor,  # (VECTOR,)
    ):
        """Adds the rows of a token; those of ``SLOTS`` slots are loaded before they are added."""
        top_k = cute.size(gPosition)
        rows = cute.make_rmem_tensor((VECTOR, SLOTS), self.dtype)
        gates = cute.make_rmem_tensor(SLOTS, Float32)
        for first in cutlass.range(0, top_k, SLOTS, unroll=1):
            rows.fill(0.0)
            gates.fill(0.0)
            for s in cutlass.range_constexpr(SLOTS):
                if first + s < top_k:
                    row = gPosition[first + s]
                    if row >= 0:
                        gates[s] = gGates[first + s]
                        cute.autovec_copy(gPartial[None, row], rows[None, s])
            for s in cutlass.range_constexpr(SLOTS):
                for v in cutlass.range_constexpr(VECTOR):
                    sums[v] += gates[s] * Float32(rows[v, s])

    @cute.jit
    def load(self, source: cute.Tensor, sums: cute.Tensor, count: Int32):
        """Reads the first ``count`` elements of a vector as float32."""
        if cutlass.const_expr(self.is_aligned):
            elements = cute.make_rmem_tensor(VECTOR, self.dtype)
            cute.autovec_copy(source, elements)
            for v in cutlass.range_constexpr(VECTOR):
                sums[v] = Float32(elements[v])
        else:
            for v in cutlass.range_constexpr(VECTOR):
                if v < count:
                    sums[v] = Float32(source[v])

    @cute.jit
    def store(self, sums: cute.Tensor, target: cute.Tensor, count: Int32):
        """Stores the first ``count`` elements of a vector."""
        if cutlass.const_expr(self.is_aligned):
            elements = cute.make_rmem_tensor(VECTOR, self.dtype)
            for v in cutlass.range_constexpr(VECTOR):
                elements[v] = sums[v].to(self.dtype)
            cute.autovec_copy(elements, target)
        else:
            for v in cutlass.range_constexpr(VECTOR):
                if v < count:
                    target[v] = sums[v].to(self.dtype)

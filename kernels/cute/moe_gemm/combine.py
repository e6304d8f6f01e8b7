"""D[token] = residual + the sum over slots of gates * rows, in the order of the slots."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernelcat.jit.cute import element_type

VECTOR = 8
"""Columns of a thread."""
THREADS = 128
SLOTS = 4
"""Rows that a thread loads at once."""


class Combine:
    """Sums of rows of ``row_dtype``; with ``is_aligned`` D has a multiple of 8 columns."""

    def __init__(self, dtype: str, row_dtype: str, residual: bool, is_aligned: bool):
        self.dtype, self.row_dtype = element_type(dtype), element_type(row_dtype)
        self.residual = residual
        self.vector = VECTOR if is_aligned else 1

    @cute.jit
    def __call__(
        self,
        rows: cute.Pointer,  # (tokens * top_k, pitch)
        position: cute.Pointer,  # (tokens, top_k)
        gates: cute.Pointer,  # (tokens, top_k)
        residual: cute.Pointer,  # (tokens, n)
        d: cute.Pointer,  # (tokens, n)
        tokens: Int32,
        top_k: Int32,
        n: Int32,
        pitch: Int32,  # a multiple of 8
        stream: cuda.CUstream,
    ):
        stride = cute.assume(Int64(pitch), divby=VECTOR)
        row_vectors = cute.make_layout(
            (VECTOR, pitch // VECTOR, tokens * top_k), stride=(1, VECTOR, stride)
        )
        slots = cute.make_layout((top_k, tokens), stride=(1, top_k))
        stride = cute.assume(Int64(n), divby=self.vector)
        vectors = cute.make_layout(
            (self.vector, n // self.vector, tokens), stride=(1, self.vector, stride)
        )
        self.kernel(
            cute.make_tensor(rows, row_vectors),
            cute.make_tensor(position, slots),
            cute.make_tensor(gates, slots),
            cute.make_tensor(residual, vectors),
            cute.make_tensor(d, vectors),
        ).launch(
            grid=(tokens, cute.ceil_div(n, VECTOR * THREADS), 1),
            block=(THREADS, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mRows: cute.Tensor,  # (VECTOR, vectors, tokens * top_k)
        mPosition: cute.Tensor,  # (top_k, tokens)
        mGates: cute.Tensor,  # (top_k, tokens)
        mR: cute.Tensor,  # (VECTOR, vectors, tokens), or (1, n, tokens)
        mD: cute.Tensor,  # like mR
    ):
        token, block, _ = cute.arch.block_idx()
        at = block * THREADS + cute.arch.thread_idx()[0]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if at * VECTOR < mD.shape[0] * mD.shape[1]:
            self.add(mRows, mPosition[None, token], mGates[None, token], mR[None, None, token],
                     mD[None, None, token], at)  # fmt: skip

    @cute.jit
    def add(
        self,
        mRows: cute.Tensor,  # (VECTOR, vectors, tokens * top_k)
        positions: cute.Tensor,  # (top_k,)
        gates: cute.Tensor,  # (top_k,)
        residual: cute.Tensor,  # (VECTOR, vectors), or (1, n)
        d: cute.Tensor,  # like residual
        at: Int32,
    ):
        """Computes vector ``at`` of a row of D."""
        sums = cute.make_rmem_tensor(VECTOR, Float32)
        sums.fill(0.0)
        part, parts = cute.make_rmem_tensor(self.vector, self.dtype), VECTOR // self.vector
        if cutlass.const_expr(self.residual):
            for i in cutlass.range_constexpr(parts):
                if at * parts + i < residual.shape[1]:
                    cute.autovec_copy(residual[None, at * parts + i], part)
                    for v in cutlass.range_constexpr(self.vector):
                        sums[i * self.vector + v] = Float32(part[v])
        for first in cutlass.range(0, cute.size(positions), SLOTS, unroll=1):
            self.add_slots(sums, mRows[None, at, None], positions, gates, first)
        for i in cutlass.range_constexpr(parts):
            if at * parts + i < d.shape[1]:
                for v in cutlass.range_constexpr(self.vector):
                    part[v] = sums[i * self.vector + v].to(self.dtype)
                cute.autovec_copy(part, d[None, at * parts + i])

    @cute.jit
    def add_slots(
        self,
        sums: cute.Tensor,  # (VECTOR,)
        rows: cute.Tensor,  # (VECTOR, tokens * top_k)
        positions: cute.Tensor,  # (top_k,)
        gates: cute.Tensor,  # (top_k,)
        first: Int32,
    ):
        """Adds ``SLOTS`` slots from ``first`` on.

        Slots without an expert load row 0, so that no load waits for a branch. Row 0 may hold
        anything then, and is not added.
        """
        loaded = cute.make_rmem_tensor((VECTOR, SLOTS), self.row_dtype)
        gate, is_served = cute.make_rmem_tensor(SLOTS, Float32), [None] * SLOTS
        for s in cutlass.range_constexpr(SLOTS):
            slot = cutlass.min(first + s, cute.size(positions) - 1)
            row = positions[slot]
            gate[s] = gates[slot]
            is_served[s] = (row >= 0) & (first + s < cute.size(positions))
            cute.autovec_copy(rows[None, cutlass.max(row, 0)], loaded[None, s])
        for s in cutlass.range_constexpr(SLOTS):
            for v in cutlass.range_constexpr(VECTOR):
                product = gate[s] * Float32(loaded[v, s])
                sums[v] += product if is_served[s] else 0.0

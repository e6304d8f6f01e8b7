"""What follows a product Z: D = activation(Z + bias) + residual, in float32, rounded once."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernelcat.jit.cute import element_type

VECTOR = 8
"""16-bit elements in 16 bytes."""

PADDING = 4
"""Floats between rows of Z in shared memory: a warp then writes to 32 different banks."""


@cute.jit
def silu(x: Float32):
    """x * sigmoid(x), by the hardware's 2^x and 1/x (each within 2 units in the last place)."""
    return x * cute.arch.rcp_approx(1.0 + cute.math.exp(-x, fastmath=True))


@cute.jit
def gelu(x: Float32):
    """x * (1 + erf(x / sqrt 2)) / 2, not the approximation by tanh."""
    return 0.5 * x * (1.0 + cute.math.erf(x * 0.5**0.5))


class Epilogue:
    """The epilogue of a kernel: ``dtype`` is of bias, residual and D, the rest are axes of `gemm`.

    A column of D takes ``span`` columns of Z: two for swiglu, of which the even one is the gate.
    Pointers of absent tensors are null and not read.
    """

    def __init__(self, dtype: str, bias: bool, activation: str, residual: bool):
        self.dtype = element_type(dtype)
        self.bias, self.activation, self.residual = bias, activation, residual
        self.is_gated = activation == "swiglu"
        self.span = 2 if self.is_gated else 1

    def vectors(self, bias, residual, d, m, n):
        """Bias, residual and D in vectors of 8 elements; n is a multiple of 8 times ``span``."""
        vector = cute.make_layout((VECTOR, n // VECTOR), stride=(1, VECTOR))
        mBias = cute.make_tensor(bias, vector)
        cols = cute.assume(Int64(n // self.span), divby=VECTOR)
        vectors = cute.make_layout((VECTOR, cols // VECTOR, m), stride=(1, VECTOR, cols))
        return mBias, cute.make_tensor(residual, vectors), cute.make_tensor(d, vectors)

    @cute.jit
    def activate(self, z: Float32):
        """The activation of one column; ``gate`` is that of two."""
        if cutlass.const_expr(self.activation == "silu"):
            z = silu(z)
        if cutlass.const_expr(self.activation == "gelu"):
            z = gelu(z)
        return z

    @cute.jit
    def gate(self, z: Float32, up: Float32):
        """swiglu of a gate and the column that it gates."""
        return silu(z) * up

    @cute.jit
    def store_columns(
        self,
        columns: cute.Tensor,  # neighbours of a row of Z, float32 in registers
        mBias: cute.Tensor,  # (8, n / 8)
        mR: cute.Tensor,  # (8, columns of D / 8, m)
        mD: cute.Tensor,  # (8, columns of D / 8, m)
        row: Int32,
        col: Int32,
    ):
        """Compute and store what ``columns`` of Z, from ``col`` on, make of a row of D."""
        width = VECTOR * self.span
        z = cute.make_rmem_tensor(width, Float32)
        for j in cutlass.range_constexpr(cute.size(columns) // width):
            vector = col // width + j
            if row < mD.shape[2] and vector < mD.shape[1]:
                for v in cutlass.range_constexpr(width):
                    z[v] = columns[j * width + v]
                self.store_vector(z, mBias, mR, mD, row, vector)

    @cute.jit
    def store_vector(
        self,
        z: cute.Tensor,  # (8 * span,) float32 in registers, overwritten
        mBias: cute.Tensor,  # (8, n / 8)
        mR: cute.Tensor,  # (8, columns of D / 8, m)
        mD: cute.Tensor,  # (8, columns of D / 8, m)
        row: Int32,
        vector: Int32,
    ):
        """Compute and store a vector of D: eight neighbours of a row."""
        elements = cute.make_rmem_tensor(VECTOR, self.dtype)
        if cutlass.const_expr(self.bias):
            for i in cutlass.range_constexpr(self.span):
                cute.autovec_copy(mBias[None, vector * self.span + i], elements)
                for v in cutlass.range_constexpr(VECTOR):
                    z[i * VECTOR + v] += Float32(elements[v])
        for v in cutlass.range_constexpr(VECTOR):
            if cutlass.const_expr(self.is_gated):
                z[v] = self.gate(z[2 * v], z[2 * v + 1])
            else:
                z[v] = self.activate(z[v])
        if cutlass.const_expr(self.residual):
            cute.autovec_copy(mR[None, vector, row], elements)
            for v in cutlass.range_constexpr(VECTOR):
                z[v] += Float32(elements[v])
        for v in cutlass.range_constexpr(VECTOR):
            elements[v] = z[v].to(self.dtype)
        cute.autovec_copy(elements, mD[None, vector, row])

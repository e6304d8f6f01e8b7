"""What follows a product: D = activation(Z + bias) + residual, in float32, and one rounding."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernelcat.jit.cute import element_type

VECTOR = 8
"""Elements in 16 bytes."""


@cute.jit
def silu(x: Float32):
    """x * sigmoid(x), by the hardware's 2^x and 1/x (each within 2 units in the last place)."""
    return x * cute.arch.rcp_approx(1.0 + cute.math.exp(-x, fastmath=True))


@cute.jit
def gelu(x: Float32):
    """The exact one: x * (1 + erf(x / sqrt 2)) / 2."""
    return 0.5 * x * (1.0 + cute.math.erf(x * 0.5**0.5))


class Epilogue:
    """The epilogue of one kernel, as ``gemm``'s axes say; absent tensors are null and not read.

    ``span`` columns of Z make one column of D: 2 for swiglu, where even columns are the gate.
    """

    def __init__(self, dtype: str, bias: bool, activation: str, residual: bool):
        self.dtype = element_type(dtype)
        self.bias, self.activation, self.residual = bias, activation, residual
        self.gated = activation == "swiglu"
        self.span = 2 if self.gated else 1

    def vectors(self, bias, residual, d, m, n):
        """The tensors of ``store_vector``; n is a multiple of 8 times ``span``."""
        vector = cute.make_layout((VECTOR, n // VECTOR), stride=(1, VECTOR))
        mBias = cute.make_tensor(bias, vector)
        cols = cute.assume(Int64(n // self.span), divby=VECTOR)
        vectors = cute.make_layout((VECTOR, cols // VECTOR, m), stride=(1, VECTOR, cols))
        return mBias, cute.make_tensor(residual, vectors), cute.make_tensor(d, vectors)

    @cute.jit
    def activate(self, z: Float32):
        """One column by itself; ``gate`` is for two."""
        if cutlass.const_expr(self.activation == "silu"):
            z = silu(z)
        if cutlass.const_expr(self.activation == "gelu"):
            z = gelu(z)
        return z

    @cute.jit
    def gate(self, z: Float32, up: Float32):
        return silu(z) * up

    @cute.jit
    def store_vector(
        self,
        z: cute.Tensor,  # (8 * span,) float32 in registers, finished in place
        mBias: cute.Tensor,  # (8, n / 8)
        mR: cute.Tensor,  # (8, columns of D / 8, m)
        mD: cute.Tensor,  # (8, columns of D / 8, m)
        row: Int32,
        vector: Int32,
    ):
        """Eight neighbours of a row of D from their columns of Z."""
        part = cute.make_rmem_tensor(VECTOR, self.dtype)
        if cutlass.const_expr(self.bias):
            for i in cutlass.range_constexpr(self.span):
                cute.autovec_copy(mBias[None, vector * self.span + i], part)
                for v in cutlass.range_constexpr(VECTOR):
                    z[i * VECTOR + v] += Float32(part[v])
        for v in cutlass.range_constexpr(VECTOR):
            if cutlass.const_expr(self.gated):
                z[v] = self.gate(z[2 * v], z[2 * v + 1])
            else:
                z[v] = self.activate(z[v])
        if cutlass.const_expr(self.residual):
            cute.autovec_copy(mR[None, vector, row], part)
            for v in cutlass.range_constexpr(VECTOR):
                z[v] += Float32(part[v])
        for v in cutlass.range_constexpr(VECTOR):
            part[v] = z[v].to(self.dtype)
        cute.autovec_copy(part, mD[None, vector, row])

"""Activations of mixture-of-experts layers: a gate and the value that it gates become one column.

reference/_experts.py defines them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from kernelcat.kernels.cute.common.epilogue import silu

LIMIT, ALPHA = 7.0, 1.702
"""gpt-oss's SwiGLU: the clamp of gates and values, and the factor in the sigmoid."""


@cute.jit
def gated(gate: Float32, up: Float32, activation: cutlass.Constexpr[str]):
    """swiglu or swiglu_oai of a gate and the value ``up`` that it gates; NaN passes the clamps."""
    if cutlass.const_expr(activation == "swiglu"):
        value = silu(gate) * up
    else:
        gate = cute.arch.fmin(gate, Float32(LIMIT), nan=True)
        up = cute.arch.fmin(up, Float32(LIMIT), nan=True)
        up = cute.arch.fmax(up, Float32(-LIMIT), nan=True)
        sigmoid = cute.arch.rcp_approx(1.0 + cute.math.exp(-ALPHA * gate, fastmath=True))
        value = gate * sigmoid * (up + 1.0)
    return value

"""SwiGLU as a function of Triton, which `triton_kernels` calls in the epilogue of its product.

Triton reads the source of this function, so the function is in a module that imports Triton.
"""

import triton
import triton.language as tl


@triton.jit
def silu_and_mul(x, one):
    """silu(x[:, 2j]) * x[:, 2j + 1] * one, (rows, columns / 2), for a tile ``x`` (rows, columns).

    ``one`` is 1: an activation of `triton_kernels` has at least one argument.
    """
    gate, up = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return gate / (1 + tl.exp(-gate)) * up * one

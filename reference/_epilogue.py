"""What follows a matrix product Z = A @ B^T before it is stored: a bias, then an activation.

    none     Z
    silu     Z * sigmoid(Z)
    gelu     Z * (1 + erf(Z / sqrt 2)) / 2, the exact form
    swiglu   silu(Z[:, 2j]) * Z[:, 2j + 1], which has half as many columns

swiglu takes gates from the even columns and the values that they gate from the odd ones, so rows 2j
and 2j + 1 of B belong together. gpt-oss stores its weights in this order.
"""

from __future__ import annotations

from kernelcat.catalog.spec import Axis, Derived, Problem

ACTIVATIONS = ("none", "silu", "gelu", "swiglu")

BIAS = Axis.flag("bias", "whether a bias is added before the activation", minor=True)
ACTIVATION = Axis.choice(
    "activation", "function of the product plus bias; swiglu halves the columns",
    *ACTIVATIONS, default="none", minor=True,
)  # fmt: skip


def out_cols(axes):
    """Columns of the result: N, or half of it for swiglu."""
    return axes["N"] // 2 if axes["activation"] == "swiglu" else axes["N"]


OUT_COLS = Derived("N or N/2", out_cols)


def odd_error(problem: Problem, matrix: str) -> str | None:
    """Why swiglu cannot halve the columns, or None; ``matrix`` is the name of the operand B."""
    if problem["activation"] == "swiglu" and problem["N"] % 2:
        return f"N={problem['N']} must be even for swiglu, which pairs rows of {matrix}"
    return None


def silu(x):
    """x * sigmoid(x)."""
    import numpy as np

    return x / (1 + np.exp(-x))


def _gelu(x):
    """x * (1 + erf(x / sqrt 2)) / 2, erf by Abramowitz and Stegun 7.1.26 (error below 2e-7)."""
    import numpy as np

    z = np.abs(x) * 0.5**0.5
    t = 1 / (1 + 0.3275911 * z)
    series = 0.0
    for term in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = (series + term) * t
    tail = series * np.exp(-z * z)  # 1 - erf(z)
    return x * 0.5 * (1 + np.sign(x) * (1 - tail))


def activate(activation: str, z):
    """``activation`` of a float32 array ``z`` (M, N): (M, N), or (M, N / 2) for swiglu."""
    if activation == "silu":
        return silu(z)
    if activation == "gelu":
        return _gelu(z)
    if activation == "swiglu":
        return silu(z[:, ::2]) * z[:, 1::2]
    return z


def torch_activation(activation: str):
    """``activation`` as a function of a torch tensor (M, N), in torch's own operators."""
    from torch.nn import functional

    return {
        "none": lambda z: z,
        "silu": functional.silu,
        "gelu": functional.gelu,
        "swiglu": lambda z: functional.silu(z[:, ::2]) * z[:, 1::2],
    }[activation]

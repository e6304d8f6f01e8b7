"""`gemm`: D = activation(A @ B^T + bias) + residual, 16 bits in and out, float32 in between.

Activations are silu (x * sigmoid(x)), gelu (the exact one, by erf) and swiglu, which halves the
columns: rows 2j of B make the gate and rows 2j+1 what it gates, side by side as gpt-oss stores
them, so that D[:, j] = silu(Z[:, 2j]) * Z[:, 2j+1] for Z = A @ B^T + bias.
"""

from __future__ import annotations

from kernelcat.catalog.spec import Axis, Derived, Entry, Peer, Problem, Tensor, Tolerance
from kernelcat.errors import MissingDependency, Unsupported

DTYPES = ("bfloat16", "float16")
ACTIVATIONS = ("none", "silu", "gelu", "swiglu")


def out_cols(axes):
    """Columns of D: N, or half of it for swiglu."""
    return axes["N"] // 2 if axes["activation"] == "swiglu" else axes["N"]


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


def activate(activation, z):
    """The activation called ``activation`` of float32 ``z``."""
    if activation == "silu":
        return silu(z)
    if activation == "gelu":
        return _gelu(z)
    if activation == "swiglu":
        return silu(z[:, ::2]) * z[:, 1::2]
    return z


def _oracle(problem, arrays):
    d = arrays["a"] @ arrays["b"].T
    if problem["bias"]:
        d += arrays["bias"]
    d = activate(problem["activation"], d)
    if problem["residual"]:
        d += arrays["residual"]
    return {"d": d}


def _make_inputs(problem, normal):
    """B is scaled by K^-1/2, so that D has variance 1 and a lost k-slice shows."""
    m, n, k = problem["M"], problem["N"], problem["K"]
    inputs = {"a": normal((m, k)), "b": normal((n, k)) * max(k, 1) ** -0.5}
    if problem["bias"]:
        inputs["bias"] = normal((n,))
    if problem["residual"]:
        inputs["residual"] = normal((m, out_cols(problem)))
    return inputs


def _bytes_moved(problem: Problem) -> int:
    m, n, k = problem["M"], problem["N"], problem["K"]
    d = m * out_cols(problem) * (2 if problem["residual"] else 1)
    return 2 * (m * k + n * k + d + (n if problem["bias"] else 0))


def product(m: int, n: int, k: int, dtype: str = "bfloat16") -> Problem:
    """The problem A @ B^T, with nothing before or after it."""
    return Problem.of(
        "gemm", M=m, N=n, K=k, dtype=dtype, bias=False, activation="none", residual=False
    )


def _constraint(problem):
    if problem["activation"] == "swiglu" and problem["N"] % 2:
        return f"swiglu pairs rows of B, and N={problem['N']} is odd"
    return None


def _cublas():
    """cuBLAS through torch; activation and residual follow as torch's own kernels."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingDependency("the peer cublas needs torch: pip install torch") from error

    functional = torch.nn.functional
    activations = {
        "none": lambda z: z,
        "silu": functional.silu,
        "gelu": functional.gelu,
        "swiglu": lambda z: functional.silu(z[:, ::2]) * z[:, 1::2],
    }

    def make(problem, arrays):
        a, b, d, bias = arrays["a"], arrays["b"].t(), arrays["d"], arrays.get("bias")
        activate, residual = activations[problem["activation"]], arrays.get("residual")

        def multiply(out=None):
            return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)

        if problem["activation"] == "none" and residual is None:
            return lambda: multiply(out=d)
        if residual is None:
            return lambda: d.copy_(activate(multiply()))
        return lambda: torch.add(activate(multiply()), residual, out=d)

    return make


def _quack():
    """QuACK chooses its configuration by a tuner of its own, at the first call with a shape."""
    try:
        from quack.gemm_interface import gemm
    except ModuleNotFoundError as error:
        raise MissingDependency("the peer quack needs: pip install quack-kernels") from error

    def make(problem, arrays):
        if problem["activation"] != "none" or problem["residual"]:
            raise Unsupported("QuACK is raced without an epilogue but for the bias")
        a, b, d, bias = arrays["a"], arrays["b"].t(), arrays["d"], arrays.get("bias")
        return lambda: gemm(a, b, out=d, bias=bias)

    return make


TARGETS = (
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (2048, 2048, 2048),
    (4096, 7168, 2048),
    (4096, 24576, 1536),
    (128, 24576, 1536),
    (64, 7168, 16384),
    (64, 2112, 7168),
    (16, 7168, 2048),
    (4097, 5000, 2056),
)
"""Large squares, DeepSeek-V3 projections, and one ragged in every axis."""

GPT_OSS = tuple(
    (m, n, k)
    for n, k in ((5120, 2880), (2880, 4096), (201088, 2880))
    for m in (1, 8, 64, 1024, 8192)
)
"""QKV projection, output projection and vocabulary of gpt-oss-20b."""

OUT_COLS = Derived("N or N/2", out_cols)

ENTRY = Entry(
    name="gemm",
    summary="D = activation(A @ B^T + bias) + residual: dense matrix product.",
    axes=(
        Axis.size("M", "rows of A and D", 0, 400),
        Axis.size("N", "rows of B, columns of D (twice as many for swiglu)", 0, 400),
        Axis.size("K", "columns of A and B", 0, 600),
        Axis.choice("dtype", "element type of all arrays", *DTYPES, minor=True),
        Axis.flag("bias", "whether a bias is added before the activation", minor=True),
        Axis.choice(
            "activation", "applied to the product", *ACTIVATIONS, default="none", minor=True
        ),
        Axis.flag("residual", "whether a matrix is added after the activation", minor=True),
    ),
    inputs=(
        Tensor("a", ("M", "K"), "dtype", "left operand"),
        Tensor("b", ("N", "K"), "dtype", "right operand, transposed"),
        Tensor("bias", ("N",), "dtype", "added to every row of the product", flag="bias"),
        Tensor("residual", ("M", OUT_COLS), "dtype", "added to the result", flag="residual"),
    ),
    outputs=(Tensor("d", ("M", OUT_COLS), "dtype", "the result"),),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance={"bfloat16": Tolerance(2e-3, 2**-8), "float16": Tolerance(5e-4, 2**-10)},
    flops=lambda problem: 2 * problem["M"] * problem["N"] * problem["K"],
    bytes_moved=_bytes_moved,
    problems={"x".join(map(str, shape)): product(*shape) for shape in TARGETS + GPT_OSS},
    peers=(Peer("cublas", _cublas), Peer("quack", _quack)),
    constraint=_constraint,
)

"""`fp8_gemm`: D = A @ B^T in float8_e4m3fn with float32 scales a block, bfloat16 out.

A has a scale for every row and 128 columns, B one for every 128 x 128, as in DeepSeek-V3's report.
"""

from __future__ import annotations

from kernelcat.catalog.spec import Axis, Derived, Entry, Peer, Problem, Tensor, Tolerance
from kernelcat.errors import MissingDependency, Unsupported

BLOCK = 128
"""Rows of B, and columns of A and B, that share a scale."""

N_BLOCKS = Derived("ceil(N/128)", lambda axes: -(-axes["N"] // BLOCK))
K_BLOCKS = Derived("ceil(K/128)", lambda axes: -(-axes["K"] // BLOCK))


def _oracle(problem, arrays):
    """Both operands decoded to float32, then one product."""
    n, k = problem["N"], problem["K"]
    a_scale = arrays["a_scale"].T.repeat(BLOCK, axis=1)[:, :k]
    b_scale = arrays["b_scale"].repeat(BLOCK, axis=0)[:n].repeat(BLOCK, axis=1)[:, :k]
    return {"d": (arrays["a"] * a_scale) @ (arrays["b"] * b_scale).T}


def _make_inputs(problem, normal):
    """D has a variance of about 1, so that a lost k-slice shows; scales differ by up to 3 x."""
    m, n, k = problem["M"], problem["N"], problem["K"]
    n_blocks, k_blocks = N_BLOCKS.of(problem.values), K_BLOCKS.of(problem.values)
    return {
        "a": normal((m, k)),
        "a_scale": _between(0.5, 1.5, normal((k_blocks, m))),
        "b": normal((n, k)),
        "b_scale": _between(0.5, 1.5, normal((n_blocks, k_blocks))) * max(k, 1) ** -0.5,
    }


def _between(low, high, x):
    """``x`` squeezed into (low, high)."""
    return low + (high - low) / 2 * (1 + x / (1 + abs(x)))


def _bytes_moved(problem: Problem) -> int:
    m, n, k = problem["M"], problem["N"], problem["K"]
    n_blocks, k_blocks = N_BLOCKS.of(problem.values), K_BLOCKS.of(problem.values)
    return m * k + n * k + 2 * m * n + 4 * k_blocks * (m + n_blocks)


def _problem(m: int, n: int, k: int) -> Problem:
    return Problem.of("fp8_gemm", M=m, N=n, K=k, dtype="float8_e4m3fn")


def _torch():
    """cuBLAS by ``torch.nn.functional.scaled_mm``, through the overload that takes an output."""
    try:
        import torch
        from torch.nn.functional import ScalingType
    except ImportError as error:
        raise MissingDependency("the peer torch needs: pip install 'torch>=2.10'") from error
    recipes = [ScalingType.BlockWise1x128.value], [ScalingType.BlockWise128x128.value]

    def make(problem, arrays):
        """scale_a is (M, K/128) with M contiguous, scale_b (K/128, N/128) with K contiguous and
        its rows padded to a multiple of 4."""
        a, b, d = arrays["a"], arrays["b"].t(), arrays["d"]
        a_scale, b_scale = arrays["a_scale"].t(), arrays["b_scale"]
        b_scale = torch.nn.functional.pad(b_scale, (0, -b_scale.shape[1] % 4)).t()

        def run():
            torch._scaled_mm_v2(
                a, b, [a_scale], recipes[0], [], [b_scale], recipes[1], [], None, d.dtype, out=d
            )

        try:
            run()
        except (RuntimeError, ValueError) as error:
            raise Unsupported(f"torch: {str(error).splitlines()[0]}") from error
        return run

    return make


TARGETS = (
    (8192, 8192, 8192),
    (4096, 4096, 7168),
    (4096, 7168, 16384),
    (4096, 7168, 2048),
    (1024, 4096, 7168),
    (128, 24576, 1536),
    (64, 7168, 16384),
    (64, 2112, 7168),
    (16, 7168, 2048),
    (4097, 5000, 2064),
)
"""A large square, DeepSeek-V3 projections, and one ragged in every axis."""

# Two errors beside bfloat16's rounding of D (relative 2^-9; the tolerance has twice that).
# Hopper's tensor cores add fp8 products after cutting each to 13 bits below the largest: a sum of
# 128 gets, by simulation, an error of 1.3e-4 of its own spread, and 2.7e-3 at most in 200,000.
# Scales make a lone block's spread 2.25 at most; 2.25 * 2.7e-3 = 0.0061, rounded up.
TOLERANCE = Tolerance(2**-7, 2**-8)

ENTRY = Entry(
    name="fp8_gemm",
    summary="D = A @ B^T of float8_e4m3fn with block scales (1x128, 128x128), float32 promotion.",
    axes=(
        Axis.size("M", "rows of A and D", 0, 400),
        Axis.size("N", "rows of B, columns of D", 0, 400),
        Axis.size("K", "columns of A and B", 0, 600),
        Axis.choice("dtype", "element type of A and B", "float8_e4m3fn"),
    ),
    inputs=(
        Tensor("a", ("M", "K"), "dtype", "left operand"),
        Tensor("a_scale", (K_BLOCKS, "M"), "float32", "of 1 x 128 elements of A, k-block major"),
        Tensor("b", ("N", "K"), "dtype", "right operand, transposed"),
        Tensor("b_scale", (N_BLOCKS, K_BLOCKS), "float32", "of 128 x 128 elements of B"),
    ),
    outputs=(Tensor("d", ("M", "N"), "bfloat16", "the product"),),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance={"float8_e4m3fn": TOLERANCE},
    flops=lambda problem: 2 * problem["M"] * problem["N"] * problem["K"],
    bytes_moved=_bytes_moved,
    problems={"x".join(map(str, shape)): _problem(*shape) for shape in TARGETS},
    peers=(Peer("torch", _torch),),
)

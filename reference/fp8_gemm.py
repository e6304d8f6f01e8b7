"""`fp8_gemm`: D = A @ B^T for float8_e4m3fn operands with block scales, bfloat16 out.

    D[m, n] = sum over k of (A[m, k] * a_scale[k / 128, m]) * (B[n, k] * b_scale[n / 128, k / 128])

A (M, K) has a float32 scale for every row and 128 columns, stored with the k-blocks first, as
(ceil(K / 128), M). B (N, K) has one for every 128 x 128 elements, (ceil(N / 128), ceil(K / 128)).
Source of the scheme: DeepSeek-V3 technical report. `fp8_quantize` makes both operands.
"""

from __future__ import annotations

from random import Random

from kernelcat.catalog.spec import Axis, Derived, Entry, Peer, Problem, Tensor, Tolerance
from kernelcat.errors import Unsupported
from kernelcat.reference._fp8 import BLOCK, FP8, expand
from kernelcat.reference._peers import required_by
from kernelcat.reference._random_sizes import log_uniform, weight_sizes

N_BLOCKS = Derived("ceil(N/128)", lambda axes: -(-axes["N"] // BLOCK))
K_BLOCKS = Derived("ceil(K/128)", lambda axes: -(-axes["K"] // BLOCK))


def _oracle(problem, arrays):
    """Both operands are decoded to float32 before one product."""
    a, b = arrays["a"], arrays["b"]
    a_scale = expand(arrays["a_scale"].T, 1, a.shape)
    b_scale = expand(arrays["b_scale"], BLOCK, b.shape)
    return {"d": (a * a_scale) @ (b * b_scale).T}


def _make_inputs(problem, normal):
    """D has a variance of about 1, so that a missing slice of K shows.

    Scales of one operand differ by up to a factor of 3.
    """
    m, n, k = problem["M"], problem["N"], problem["K"]
    n_blocks, k_blocks = N_BLOCKS.of(problem.values), K_BLOCKS.of(problem.values)
    return {
        "a": normal((m, k)),
        "a_scale": _between(0.5, 1.5, normal((k_blocks, m))),
        "b": normal((n, k)),
        "b_scale": _between(0.5, 1.5, normal((n_blocks, k_blocks))) * max(k, 1) ** -0.5,
    }


def _between(low, high, x):
    """Values in (low, high) in the order of ``x``, which may be any real numbers."""
    return low + (high - low) / 2 * (1 + x / (1 + abs(x)))


def _bytes_moved(problem: Problem) -> int:
    m, n, k = problem["M"], problem["N"], problem["K"]
    n_blocks, k_blocks = N_BLOCKS.of(problem.values), K_BLOCKS.of(problem.values)
    return m * k + n * k + 2 * m * n + 4 * k_blocks * (m + n_blocks)


def _problem(m: int, n: int, k: int) -> Problem:
    return Problem.of("fp8_gemm", M=m, N=n, K=k, dtype=FP8)


def _torch():
    """cuBLAS behind ``torch.nn.functional.scaled_mm``, by the overload that takes an output."""
    with required_by("torch", "pip install 'torch>=2.10'"):
        import torch
        from torch.nn.functional import ScalingType
    recipes = [ScalingType.BlockWise1x128.value], [ScalingType.BlockWise128x128.value]

    def make(problem, arrays):
        """Converts the scales to cuBLAS's shapes and strides before the race.

        ``a_scale`` becomes (M, K / 128) with M contiguous, ``b_scale`` (K / 128, N / 128) with K
        contiguous and its columns K / 128 padded to a multiple of 4.
        """
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
"""M, N and K: a square, DeepSeek-V3's projections, and a shape that no tile divides evenly."""


def _random_problem(dice: Random) -> Problem:
    """A layer's projection, mostly of sizes that cuBLAS computes.

    cuBLAS needs N and K in multiples of the scales' blocks, and M in multiples of 4. One M of four
    is any number, for which the race has no peer.
    """
    m_step = dice.choice((1, 4, 4, 4))
    return _problem(log_uniform(dice, 1, 8192, m_step), *weight_sizes(dice, BLOCK))


# The tolerance covers bfloat16's rounding of D (2^-9 relative, of which it allows twice as much)
# and the sums of Hopper's tensor cores. These cut each fp8 product to 13 bits below the largest one
# before they add: in a simulation a sum of 128 products was off by 1.3e-4 of the sums' standard
# deviation, and by 2.7e-3 at most in 200,000 sums. The scales of the inputs let one block have a
# standard deviation of 2.25 at most; 2.25 * 2.7e-3 = 0.0061, rounded up to 2^-7.
TOLERANCE = Tolerance(2**-7, 2**-8)

ENTRY = Entry(
    name="fp8_gemm",
    summary="D = A @ B^T of float8_e4m3fn with block scales (A 1x128, B 128x128), bfloat16 out.",
    axes=(
        Axis.size("M", "rows of A and D", 0, 400, varies=True, fine=True),
        Axis.size("N", "rows of B, columns of D", 0, 400),
        Axis.size("K", "columns of A and B", 0, 600),
        Axis.choice("dtype", "element type of A and B", FP8),
    ),
    inputs=(
        Tensor("a", ("M", "K"), "dtype", "left operand A"),
        Tensor(
            "a_scale", (K_BLOCKS, "M"), "float32",
            "a_scale[j, m] multiplies A[m, 128 j : 128 (j + 1)]",
        ),
        Tensor("b", ("N", "K"), "dtype", "right operand B, which is multiplied transposed"),
        Tensor(
            "b_scale", (N_BLOCKS, K_BLOCKS), "float32",
            "b_scale[i, j] multiplies B[128 i : 128 (i + 1), 128 j : 128 (j + 1)]",
        ),
    ),
    outputs=(Tensor("d", ("M", "N"), "bfloat16", "the product D"),),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance={FP8: TOLERANCE},
    flops=lambda problem: 2 * problem["M"] * problem["N"] * problem["K"],
    bytes_moved=_bytes_moved,
    problems={"x".join(map(str, shape)): _problem(*shape) for shape in TARGETS},
    random_problem=_random_problem,
    peers=(Peer("torch", _torch),),
    without_peer={
        "4097x5000x2064": "torch's scaled product takes N in multiples of 16",
    },
)  # fmt: skip

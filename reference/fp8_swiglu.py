"""`fp8_swiglu`: silu(gate) * up, quantized to float8_e4m3fn with a scale for each row and 128.

In a gated feed-forward layer in fp8 this stands between the two products. One pass replaces an
activation that writes 16 bits and a quantizer that reads them. x (M, N) has gates in the even
columns and the values that they gate in the odd ones, the order of `gemm`'s swiglu and of gpt-oss:

    y[m, j] = silu(x[m, 2 j]) * x[m, 2 j + 1]

y (M, N / 2) is quantized in blocks of 1 x 128 as `_fp8` defines it. All arithmetic is in float32;
y is not rounded to 16 bits in between. x must be finite.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.precondition import below_infinity
from kernelcat.catalog.spec import Axis, Derived, Entry, Peer, Problem, Tensor, Tolerance
from kernelcat.errors import Unsupported
from kernelcat.reference._epilogue import silu
from kernelcat.reference._fp8 import BLOCK, FP8, MIN_AMAX, quantize
from kernelcat.reference._magnitudes import magnitudes
from kernelcat.reference._peers import import_torch
from kernelcat.reference.fp8_quantize import DTYPES

COLS = Derived("N/2", lambda axes: axes["N"] // 2)
BLOCKS = Derived("ceil(N/256)", lambda axes: -(-axes["N"] // (2 * BLOCK)))


def _oracle(problem, arrays):
    gate, up = arrays["x"][:, ::2], arrays["x"][:, 1::2]
    q, scale = quantize(silu(gate) * up, rows=1)
    return {"q": dtypes.decode(q, FP8), "scale": scale.T.copy()}


def _make_inputs(problem, normal):
    """Magnitudes of rows differ by up to 4,096."""
    magnitude = magnitudes(normal((problem["M"], 1)), 6)
    return {"x": normal((problem["M"], problem["N"])) * magnitude}


def _bytes_moved(problem: Problem) -> int:
    m, n = problem["M"], problem["N"]
    return 2 * m * n + m * COLS.of(problem.values) + 4 * m * BLOCKS.of(problem.values)


def _torch():
    """The definition in torch's operators, fused by ``torch.compile``."""
    torch = import_torch("torch")

    @torch.compile(fullgraph=True, dynamic=False)
    def run(x, q, scale):
        gate, up = x.float().unflatten(1, (-1, 2)).unbind(2)
        y = (torch.nn.functional.silu(gate) * up).unflatten(1, (-1, BLOCK))
        amax = y.abs().amax(2).clamp_min(MIN_AMAX)
        q.copy_((y * (dtypes.E4M3_MAX / amax)[:, :, None]).view_as(q).to(q.dtype))
        scale.copy_((amax / dtypes.E4M3_MAX).t())

    def make(problem, arrays):
        if problem["M"] == 0 or problem["N"] == 0 or problem["N"] % (2 * BLOCK):
            raise Unsupported("torch is raced where N is a multiple of 256")
        return lambda: run(arrays["x"], arrays["q"], arrays["scale"])

    return make


def _constraint(problem: Problem) -> str | None:
    n = problem["N"]
    return f"N={n} must be even: columns of x are pairs of a gate and a value" if n % 2 else None


TARGETS = ((16, 4096), (128, 4096), (4096, 4096), (4096, 36864), (8192, 5760))
"""M and N: DeepSeek-V3's experts and dense layers, and gpt-oss's experts."""

# A y near the border between two e4m3 values may be rounded to either of them. Neighbouring values
# differ by an eighth, subnormal ones by 2^-9.
TOLERANCE = Tolerance(2**-9, 2**-3)
# A scale is not rounded: its error is that of exp, about 2^-18 for fast approximations.
SCALE_TOLERANCE = Tolerance(1e-15, 2**-16)

ENTRY = Entry(
    name="fp8_swiglu",
    summary="silu(gate) * up quantized to float8_e4m3fn with a float32 scale per 1x128.",
    axes=(
        Axis.size("M", "rows", 0, 400, varies=True),
        Axis.size("N", "columns of x, even; q has N / 2", 0, 2000),
        Axis.choice("dtype", "element type of x", *DTYPES, minor=True),
    ),
    inputs=(
        Tensor(
            "x", ("M", "N"), "dtype",
            "even columns are gates, odd columns the values that they gate; must be finite",
        ),
    ),
    outputs=(
        Tensor("q", ("M", COLS), FP8, "y / scale, where y = silu(x[:, ::2]) * x[:, 1::2]"),
        Tensor(
            "scale", (BLOCKS, "M"), "float32",
            "scale[j, m] = max |y[m, 128 j : 128 (j + 1)]| / 448, as fp8_gemm reads it",
            tolerance=SCALE_TOLERANCE,
        ),
    ),
    preconditions=(below_infinity("x", minus_infinity=False),),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance=dict.fromkeys(DTYPES, TOLERANCE),
    flops=lambda problem: 6 * problem["M"] * problem["N"],
    bytes_moved=_bytes_moved,
    problems={
        f"{m}x{n}": Problem.of("fp8_swiglu", M=m, N=n, dtype="bfloat16") for m, n in TARGETS
    },
    peers=(Peer("torch", _torch),),
    without_peer={
        "8192x5760": "torch's definition is written for N in multiples of 256",
    },
    constraint=_constraint,
)  # fmt: skip

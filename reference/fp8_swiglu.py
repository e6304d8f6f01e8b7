"""`fp8_swiglu`: silu(gate) * up, quantized to float8_e4m3fn with a float32 scale a row and 128.

What stands between the two products of a gated layer in fp8: one pass instead of an activation
that writes 16 bits and a quantizer that reads them back. Gates are the even columns of x and what
they gate the odd ones, as `gemm` and gpt-oss have them. All arithmetic is float32:

    y = silu(x[:, 2j]) * x[:, 2j+1]
    amax = max(|y| in the block, 1e-10)
    scale = amax / 448
    q = e4m3(y * (448 / amax))      to nearest, ties to even, saturating

x is finite. y is not rounded to 16 bits in between.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import Axis, Derived, Entry, Peer, Problem, Tensor, Tolerance
from kernelcat.errors import MissingDependency, Unsupported
from kernelcat.reference.fp8_quantize import BLOCK, DTYPES, LEAST_AMAX, quantize
from kernelcat.reference.gemm import silu

COLS = Derived("N/2", lambda axes: axes["N"] // 2)
BLOCKS = Derived("ceil(N/256)", lambda axes: -(-axes["N"] // (2 * BLOCK)))


def _oracle(problem, arrays):
    gate, up = arrays["x"][:, ::2], arrays["x"][:, 1::2]
    q, scale = quantize(silu(gate) * up, rows=1)
    return {"q": dtypes.decode(q, "float8_e4m3fn"), "scale": scale.T.copy()}


def _make_inputs(problem, normal):
    """Rows differ 4,096 times in magnitude."""
    level = normal((problem["M"], 1))
    return {"x": normal((problem["M"], problem["N"])) * 2.0 ** (6 * level / (1 + abs(level)))}


def _bytes_moved(problem: Problem) -> int:
    m, n = problem["M"], problem["N"]
    return 2 * m * n + m * COLS.of(problem.values) + 4 * m * BLOCKS.of(problem.values)


def _torch():
    """The definition in torch's operators, fused by ``torch.compile``."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingDependency("the peer torch needs torch: pip install torch") from error

    @torch.compile(fullgraph=True, dynamic=False)
    def run(x, q, scale):
        gate, up = x.float().unflatten(1, (-1, 2)).unbind(2)
        y = (torch.nn.functional.silu(gate) * up).unflatten(1, (-1, BLOCK))
        amax = y.abs().amax(2).clamp_min(LEAST_AMAX)
        q.copy_((y * (dtypes.E4M3_MAX / amax)[:, :, None]).view_as(q).to(q.dtype))
        scale.copy_((amax / dtypes.E4M3_MAX).t())

    def make(problem, arrays):
        if problem["M"] == 0 or problem["N"] == 0 or problem["N"] % (2 * BLOCK):
            raise Unsupported("torch's reshapes take whole blocks only")
        return lambda: run(arrays["x"], arrays["q"], arrays["scale"])

    return make


def _constraint(problem: Problem) -> str | None:
    n = problem["N"]
    return f"gates and what they gate are pairs, and N={n} is odd" if n % 2 else None


TARGETS = ((16, 4096), (128, 4096), (4096, 4096), (4096, 36864), (8192, 5760))
"""DeepSeek-V3's experts and dense layers, and gpt-oss's experts."""

# A y that lies on the border of two e4m3 values may go to either: neighbours differ by an eighth,
# subnormals by 2^-9. A scale has no such border: it errs as exp does, 2^-18 or so in a fast form.
TOLERANCE = Tolerance(2**-9, 2**-3)
SCALE_TOLERANCE = Tolerance(1e-15, 2**-16)

ENTRY = Entry(
    name="fp8_swiglu",
    summary="silu(gate) * up quantized to float8_e4m3fn with a float32 scale per 1x128.",
    axes=(
        Axis.size("M", "rows", 0, 400),
        Axis.size("N", "columns of x, twice those of q", 0, 2000),
        Axis.choice("dtype", "element type of x", *DTYPES, minor=True),
    ),
    inputs=(Tensor("x", ("M", "N"), "dtype", "gates and what they gate, by turns; finite"),),
    outputs=(
        Tensor("q", ("M", COLS), "float8_e4m3fn", "y / scale"),
        Tensor(
            "scale", (BLOCKS, "M"), "float32", "k-block major, as fp8_gemm takes it",
            tolerance=SCALE_TOLERANCE,
        ),
    ),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance=dict.fromkeys(DTYPES, TOLERANCE),
    flops=lambda problem: 6 * problem["M"] * problem["N"],
    bytes_moved=_bytes_moved,
    problems={
        f"{m}x{n}": Problem.of("fp8_swiglu", M=m, N=n, dtype="bfloat16") for m, n in TARGETS
    },
    peers=(Peer("torch", _torch),),
    constraint=_constraint,
)  # fmt: skip

"""`fp8_quantize`: float8_e4m3fn with a float32 scale for each block of 1 x 128 or 128 x 128.

It makes the operands of `fp8_gemm`: activations with blocks of 1x128, weights with 128x128. `_fp8`
defines the arithmetic; results equal the oracle's bit by bit. x must be finite. Blocks at the right
and lower border may be smaller.

Scales of 1x128 are stored with the k-blocks first, (ceil(K / 128), M), so that a kernel loads the
scales of neighbouring rows as contiguous memory. Scales of 128x128 are (ceil(M / 128),
ceil(K / 128)).
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.precondition import below_infinity
from kernelcat.catalog.spec import EXACT, Axis, Derived, Entry, Peer, Problem, Tensor
from kernelcat.errors import Unsupported
from kernelcat.reference._fp8 import BLOCK, FP8, MIN_AMAX, expand, quantize
from kernelcat.reference._magnitudes import block_magnitudes
from kernelcat.reference._peers import import_torch

DTYPES = ("bfloat16", "float16")


def block_rows(axes) -> int:
    """Rows that share a scale."""
    return 1 if axes["block"] == "1x128" else BLOCK


def _scale_shape(axes):
    m_blocks, k_blocks = -(-axes["M"] // block_rows(axes)), -(-axes["K"] // BLOCK)
    return (k_blocks, m_blocks) if axes["block"] == "1x128" else (m_blocks, k_blocks)


SCALE_ROWS = Derived("ceil(K/128) or ceil(M/128)", lambda axes: _scale_shape(axes)[0])
SCALE_COLS = Derived("M or ceil(K/128)", lambda axes: _scale_shape(axes)[1])


def _oracle(problem, arrays):
    x = dtypes.decode(arrays["x"], problem["dtype"])
    q, scale = quantize(x, block_rows(problem.values))
    return {"q": q, "scale": scale.T.copy() if problem["block"] == "1x128" else scale}


def _make_inputs(problem, normal):
    """Magnitudes of blocks differ by up to 65,536, and one block in nine is zero."""
    m, k = problem["M"], problem["K"]
    magnitude = block_magnitudes(normal((-(-m // BLOCK), -(-k // BLOCK))))
    return {"x": normal((m, k)) * expand(magnitude, BLOCK, (m, k))}


def _bytes_moved(problem: Problem) -> int:
    rows, cols = _scale_shape(problem.values)
    return 3 * problem["M"] * problem["K"] + 4 * rows * cols


def _torch():
    """The definition in torch's operators, fused by ``torch.compile``."""
    torch = import_torch("torch")

    @torch.compile(fullgraph=True, dynamic=False)
    def run(x, q, scale, rows):
        blocks = x.float().unflatten(0, (-1, rows)).unflatten(2, (-1, BLOCK))
        # Inductor's float32 division is approximate; by way of float64 it is correctly rounded.
        amax = blocks.abs().amax((1, 3)).clamp_min(MIN_AMAX).double()
        inverse = (dtypes.E4M3_MAX / amax).float()
        q.copy_((blocks * inverse[:, None, :, None]).view_as(q).to(q.dtype))
        scales = (amax / dtypes.E4M3_MAX).float()
        scale.copy_(scales.t() if rows == 1 else scales)

    def make(problem, arrays):
        rows = block_rows(problem.values)
        if problem["M"] * problem["K"] == 0 or problem["M"] % rows or problem["K"] % BLOCK:
            raise Unsupported("torch is raced where M and K are multiples of the block")
        return lambda: run(arrays["x"], arrays["q"], arrays["scale"], rows)

    return make


def _problem(m: int, k: int, block: str, dtype: str = "bfloat16") -> Problem:
    return Problem.of("fp8_quantize", M=m, K=k, block=block, dtype=dtype)


TARGETS = (
    (16, 7168, "1x128"),
    (128, 7168, "1x128"),
    (4096, 7168, "1x128"),
    (8192, 8192, "1x128"),
    (4096, 7168, "128x128"),
    (7168, 16384, "128x128"),
)
"""M, K and block: activations and weights of DeepSeek-V3."""

ENTRY = Entry(
    name="fp8_quantize",
    summary="Quantize to float8_e4m3fn with a float32 scale per 1x128 or 128x128, bit-exact.",
    axes=(
        Axis.size("M", "rows of x", 0, 400, varies=True),
        Axis.size("K", "columns of x", 0, 1500),
        Axis.choice("dtype", "element type of x", *DTYPES),
        Axis.choice("block", "rows x columns that share a scale", "1x128", "128x128"),
    ),
    inputs=(Tensor("x", ("M", "K"), "dtype", "matrix to quantize; must be finite"),),
    outputs=(
        Tensor("q", ("M", "K"), FP8, "x / scale, rounded to nearest"),
        Tensor(
            "scale", (SCALE_ROWS, SCALE_COLS), "float32",
            "max |x| of the block / 448; for 1x128 transposed, (k-blocks, rows), as fp8_gemm reads",
        ),
    ),
    preconditions=(below_infinity("x", minus_infinity=False),),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance=dict.fromkeys(DTYPES, EXACT),
    flops=lambda problem: problem["M"] * problem["K"],
    bytes_moved=_bytes_moved,
    problems={f"{m}x{k}-{block}": _problem(m, k, block) for m, k, block in TARGETS},
    peers=(Peer("torch", _torch),),
)  # fmt: skip

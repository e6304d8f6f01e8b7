"""`fp8_quantize`: float8_e4m3fn with one float32 scale a block of 1 x 128 or 128 x 128.

The operands of `fp8_gemm`: activations by 1x128, weights by 128x128. All arithmetic is float32,
every operation rounded to nearest:

    amax = max(|x| in the block, 1e-10)
    scale = amax / 448
    q = e4m3(x * (448 / amax))      to nearest, ties to even, saturating

so that results are the same bit by bit everywhere. x is finite.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import EXACT, Axis, Derived, Entry, Peer, Problem, Tensor
from kernelcat.errors import MissingDependency, Unsupported

BLOCK = 128
LEAST_AMAX = 1e-10
"""Keeps the scale of a block of zeros finite."""

DTYPES = ("bfloat16", "float16")


def block_rows(axes) -> int:
    """Rows that share a scale."""
    return 1 if axes["block"] == "1x128" else BLOCK


def _scale_shape(axes):
    """(K/128, M) for 1x128, so that the scales of a tile of rows are contiguous, and
    (M/128, K/128) for 128x128."""
    m_blocks, k_blocks = -(-axes["M"] // block_rows(axes)), -(-axes["K"] // BLOCK)
    return (k_blocks, m_blocks) if axes["block"] == "1x128" else (m_blocks, k_blocks)


SCALE_ROWS = Derived("ceil(K/128) or ceil(M/128)", lambda axes: _scale_shape(axes)[0])
SCALE_COLS = Derived("M or ceil(K/128)", lambda axes: _scale_shape(axes)[1])


def quantize(x, rows: int):
    """``(q, scale)`` of float32 ``x`` by blocks of ``rows`` x 128: e4m3 storage, and float32 of
    (ceil(M / rows), ceil(K / 128))."""
    from numpy import pad  # CuPy's own for CuPy arrays

    m, k = x.shape
    blocks = pad(abs(x), ((0, -m % rows), (0, -k % BLOCK)))
    blocks = blocks.reshape(-(-m // rows), rows, -(-k // BLOCK), BLOCK)
    amax = blocks.max(axis=(1, 3)).clip(LEAST_AMAX, None)
    inverse = (dtypes.E4M3_MAX / amax).repeat(rows, axis=0)[:m].repeat(BLOCK, axis=1)[:, :k]
    return dtypes.encode(x * inverse, "float8_e4m3fn"), amax / dtypes.E4M3_MAX


def _oracle(problem, arrays):
    x = dtypes.decode(arrays["x"], problem["dtype"])
    q, scale = quantize(x, block_rows(problem.values))
    return {"q": q, "scale": scale.T.copy() if problem["block"] == "1x128" else scale}


def _make_inputs(problem, normal):
    """Blocks differ 65,536 times in magnitude, and one in nine is zero."""
    m, k = problem["M"], problem["K"]
    level = normal((-(-m // BLOCK), -(-k // BLOCK)))
    magnitude = 2.0 ** (8 * level / (1 + abs(level))) * (level > -1.2)
    return {"x": normal((m, k)) * magnitude.repeat(BLOCK, axis=0)[:m].repeat(BLOCK, axis=1)[:, :k]}


def _bytes_moved(problem: Problem) -> int:
    rows, cols = _scale_shape(problem.values)
    return 3 * problem["M"] * problem["K"] + 4 * rows * cols


def _torch():
    """The definition in torch's operators, fused by ``torch.compile``."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingDependency("the peer torch needs torch: pip install torch") from error

    @torch.compile(fullgraph=True, dynamic=False)
    def quantize(x, q, scale, rows):
        blocks = x.float().unflatten(0, (-1, rows)).unflatten(2, (-1, BLOCK))
        # Inductor's float32 division is approximate; through float64 it is correctly rounded.
        amax = blocks.abs().amax((1, 3)).clamp_min(LEAST_AMAX).double()
        inverse = (dtypes.E4M3_MAX / amax).float()
        q.copy_((blocks * inverse[:, None, :, None]).view_as(q).to(q.dtype))
        scales = (amax / dtypes.E4M3_MAX).float()
        scale.copy_(scales.t() if rows == 1 else scales)

    def make(problem, arrays):
        rows = block_rows(problem.values)
        if problem["M"] * problem["K"] == 0 or problem["M"] % rows or problem["K"] % BLOCK:
            raise Unsupported("torch's reshapes take whole blocks only")
        return lambda: quantize(arrays["x"], arrays["q"], arrays["scale"], rows)

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
"""Activations and weights of DeepSeek-V3."""

ENTRY = Entry(
    name="fp8_quantize",
    summary="Quantize to float8_e4m3fn with a float32 scale per 1x128 or 128x128, bit-exact.",
    axes=(
        Axis.size("M", "rows", 0, 400),
        Axis.size("K", "columns", 0, 1500),
        Axis.choice("dtype", "element type of x", *DTYPES),
        Axis.choice("block", "rows x columns that share a scale", "1x128", "128x128"),
    ),
    inputs=(Tensor("x", ("M", "K"), "dtype", "what is quantized; finite"),),
    outputs=(
        Tensor("q", ("M", "K"), "float8_e4m3fn", "x / scale"),
        Tensor("scale", (SCALE_ROWS, SCALE_COLS), "float32", "k-block major for 1x128"),
    ),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance=dict.fromkeys(DTYPES, EXACT),
    flops=lambda problem: problem["M"] * problem["K"],
    bytes_moved=_bytes_moved,
    problems={f"{m}x{k}-{block}": _problem(m, k, block) for m, k, block in TARGETS},
    peers=(Peer("torch", _torch),),
)

"""`nvfp4_quantize`: rows to NVFP4 or MXFP4, bit by bit as `reference/_fp4.py` defines them.

``format`` says which. NVFP4 takes ``global_scale``, float32 of (1,): what values are multiplied by
when they are read, ``x = e2m1 * scale * global_scale`` (``_fp4.global_scale_of`` makes it of the
largest element). Libraries that want its inverse get 1 / global_scale. It must lie within 2^-64
and 2^64. Scales are ``linear`` or ``swizzled``.

What optional arrays ask for happens in this order, all in float32, nothing rounded to 16 bits in
between:

1. ``weight``, (K,): RMSNorm, ``h = (x * rstd) * weight``, rstd = 1 / sqrt(sum / K + eps). sum adds
   squares of neighbours, then neighbouring sums, and so on, as if zeros filled K up to a power of
   two. eps must be 1e-12 at least.
2. ``signs``, (16,) of +1 and -1: the Hadamard transform of every 16 neighbours times their signs,
   a quarter of what four rounds of sums and differences give: of elements 1 apart, then 2, 4, 8.
   It is its own inverse but for the signs.
3. ``seed``, int32 of (2,): stochastic rounding of values (never of scales) with nine of Philox's
   bits, as `_philox.nine_bits` and `_fp4.stochastic` say: an element's expected value is the
   element, to 2^-10 of the step between two codes.

Outliers, zeros, infinities and NaN: see `_fp4`.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import EXACT, Axis, Entry, Peer, Problem, Tensor
from kernelcat.reference._arrays import library_of
from kernelcat.reference._fp4 import (
    CODES,
    FORMATS,
    HALF_K,
    LAYOUTS,
    SCALE,
    block_of,
    exact,
    laid_out,
    quantize,
    scale_sizes,
)
from kernelcat.reference._nvfp4_peers import torch_quantize
from kernelcat.reference._philox import nine_bits

DTYPES = ("bfloat16", "float16")
HADAMARD = 16
"""Elements of one transform."""


def normalized(x, weight, eps: float):
    """RMSNorm of float32 (rows, K), its sum of squares a tree of neighbours."""
    xp = library_of(x)
    k = x.shape[1]
    total = xp.pad(x * x, ((0, 0), (0, (1 << max(k - 1, 0).bit_length()) - k)))
    while total.shape[1] > 1:
        total = total[:, ::2] + total[:, 1::2]
    root = xp.sqrt((total / xp.float32(max(k, 1)) + xp.float32(eps)).astype("float64")).astype(
        "float32"
    )
    return x * (1.0 / root.astype("float64")).astype("float32") * weight


def rotated(h, signs):
    """The Hadamard transform of every 16 neighbours of float32 (rows, K), times ``signs``."""
    xp = library_of(h)
    shape, h = h.shape, h.reshape(-1, HADAMARD) * signs
    for step in (1, 2, 4, 8):
        pairs = h.reshape(-1, HADAMARD // (2 * step), 2, step)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        h = xp.stack((first + second, first - second), axis=2).reshape(-1, HADAMARD)
    return (h * xp.float32(0.25)).reshape(shape)


def _oracle(problem, arrays):
    from numpy import errstate

    h = exact(arrays["x"], problem["dtype"])
    with errstate(invalid="ignore", over="ignore"):  # of infinities
        if problem["rms_norm"]:
            weight = dtypes.decode(arrays["weight"], problem["dtype"])
            h = normalized(h.astype("float32"), weight, problem["eps"]).astype("float64")
        if problem["hadamard"]:
            h = rotated(h.astype("float32"), arrays["signs"]).astype("float64")
    random = nine_bits(arrays["seed"], *h.shape) if problem["stochastic"] else None
    codes, scales = quantize(h, problem["format"], arrays.get("global_scale"), random)
    return {"q": codes, "scale": laid_out(problem.values, scales)}


def _make_inputs(problem, normal):
    """Blocks differ 65,536 times in magnitude and one in nine is zero.

    The global scale is such that some saturate and others get the least scale. One row in fifteen
    has an infinity or a NaN.
    """
    m, k = problem["M"], problem["K"]
    level = normal((m, k // 16))
    magnitude = 2.0 ** (8 * level / (1 + abs(level))) * (level > -1.2)
    x, row = normal((m, k)) * magnitude.repeat(16, axis=1), normal((m, 1))
    xp = library_of(x)
    at = xp.arange(k)[None, :] % 97 == 5
    x = xp.where(at & (row > 1.5), xp.where(row > 1.8, xp.float32("nan"), xp.float32("inf")), x)
    inputs = {"x": x}
    if problem["format"] == "nvfp4":
        inputs["global_scale"] = 0.05 * xp.exp(0.3 * normal((1,)))
    if problem["rms_norm"]:
        inputs["weight"] = 1 + 0.2 * normal((k,))
    if problem["hadamard"]:
        inputs["signs"] = (normal((HADAMARD,)) > 0) * xp.float32(2) - 1
    if problem["stochastic"]:
        inputs["seed"] = (normal((2,)).clip(-4, 4) * 5e8).astype("int32")
    return inputs


def _bytes_moved(problem: Problem) -> int:
    m, k = problem["M"], problem["K"]
    x = 2 * (m * k + (k if problem["rms_norm"] else 0))
    return int(x + m * k // 2 + m * k // block_of(problem.values))


def _constraint(problem: Problem) -> str | None:
    if problem["K"] % block_of(problem.values):
        return f"blocks of {problem['format']} are {block_of(problem.values)} elements long"
    if problem["rms_norm"] and problem["eps"] < 1e-12:
        return "eps must be 1e-12 at least"
    return None


def rows(m: int, k: int, format: str = "nvfp4", **options: bool | str) -> Problem:
    """The problem of quantizing bfloat16 (m, k), without options but those given."""
    axes = {
        "dtype": "bfloat16", "format": format, "scale_layout": "linear", "rms_norm": False,
        "hadamard": False, "stochastic": False, "eps": 1e-5, **options,
    }  # fmt: skip
    return Problem.of("nvfp4_quantize", M=m, K=k, **axes)


SHAPES = ((16, 7168), (128, 7168), (4096, 7168), (8192, 8192), (8192, 2880))
"""Activations of DeepSeek-V3 and gpt-oss, and a square."""


def _names() -> dict[str, Problem]:
    names = {f"{m}x{k}-{f}": rows(m, k, f) for f in FORMATS for m, k in SHAPES}
    return names | {
        "8192x8192-nvfp4-swizzled": rows(8192, 8192, scale_layout="swizzled"),
        "128x7168-nvfp4-rms": rows(128, 7168, rms_norm=True, scale_layout="swizzled"),
        "8192x7168-nvfp4-rms": rows(8192, 7168, rms_norm=True, scale_layout="swizzled"),
        "8192x8192-nvfp4-training": rows(8192, 8192, hadamard=True, stochastic=True),
    }


ENTRY = Entry(
    name="nvfp4_quantize",
    summary="Quantize to NVFP4 or MXFP4, bit-exact; RMSNorm, Hadamard, stochastic rounding.",
    axes=(
        Axis.size("M", "rows", 0, 300),
        Axis.size("K", "columns, a multiple of the format's block", 0, 1024, step=16),
        Axis.choice("dtype", "element type of x and weight", *DTYPES, minor=True),
        Axis.choice("format", "of the result", *FORMATS, default="nvfp4"),
        Axis.choice("scale_layout", "order of the scales", *LAYOUTS, default="linear"),
        Axis.flag("rms_norm", "whether RMSNorm comes first"),
        Axis.flag("hadamard", "whether groups of 16 are rotated"),
        Axis.flag("stochastic", "whether rounding is random"),
        Axis.number("eps", "RMSNorm's epsilon, 1e-12 at least", 1e-5, 1e-6, default=1e-5),
    ),
    inputs=(
        Tensor("x", ("M", "K"), "dtype", "what is quantized"),
        Tensor(
            "global_scale", (1,), "float32", "what values are multiplied by when read",
            flag="format", when="nvfp4",
        ),
        Tensor("weight", ("K",), "dtype", "of RMSNorm", flag="rms_norm"),
        Tensor("signs", (HADAMARD,), "float32", "of the transform, +1 or -1", flag="hadamard"),
        Tensor("seed", (2,), "int32", "of stochastic rounding", flag="stochastic"),
    ),
    outputs=(
        Tensor("q", ("M", HALF_K), CODES, "pairs of values, the first in the low half"),
        Tensor("scale", scale_sizes("M"), SCALE, "of 16 (nvfp4) or 32 (mxfp4) of a row"),
    ),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance=dict.fromkeys(DTYPES, EXACT),
    flops=lambda problem: problem["M"] * problem["K"],
    bytes_moved=_bytes_moved,
    problems=_names(),
    peers=(Peer("torch", torch_quantize),),
    constraint=_constraint,
)  # fmt: skip

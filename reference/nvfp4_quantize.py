"""`nvfp4_quantize`: rows to NVFP4 or MXFP4, bit-exact, with optional steps in the same pass.

`_fp4` defines formats, layouts of the scales, arithmetic and special values. ``format`` chooses
NVFP4 or MXFP4. NVFP4 takes ``global_scale``, float32 (1,), between 2^-64 and 2^64, which multiplies
values when they are read: ``x = e2m1 * scale * global_scale``. `_fp4.global_scale_of` computes it
from the largest magnitude. Libraries that take its inverse get 1 / global_scale.

The options are applied in this order to a row of x, in float32 and without rounding to 16 bits in
between. Each is given by an array:

1. ``weight``, (K,): RMSNorm, ``h = (x * rstd) * weight`` with rstd = 1 / sqrt(sum / K + eps). The
   order of the sum is defined, so that results are exact: squares of neighbours are added, then
   neighbouring sums, and so on, with zeros that pad K to a power of two. eps is at least 1e-12.
2. ``signs``, (16,) of +1 and -1: each 16 neighbours are multiplied by the signs, then by the
   Hadamard matrix, then by 1/4. The product is four rounds of sums and differences, of elements 1,
   2, 4 and 8 apart. The transform without signs is its own inverse.
3. ``seed``, int32 (2,): codes (never scales) are rounded at random, with nine bits for each element
   (`_philox.nine_bits`, `_fp4.encode_stochastic`). The expected value of an element is the element
   itself, to 2^-10 of the distance between two codes.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import EXACT, Axis, Entry, Peer, Problem, Tensor
from kernelcat.reference._arrays import library_of
from kernelcat.reference._fp4 import (
    CODES,
    CODES_DOC,
    FORMATS,
    LAYOUT_DOC,
    LAYOUTS,
    PACKED_K,
    SCALE,
    SCALE_DOC,
    block_error,
    block_of,
    quantize,
    scale_sizes,
    to_layout,
    widen,
)
from kernelcat.reference._magnitudes import block_magnitudes
from kernelcat.reference._nvfp4_peers import torch_quantize
from kernelcat.reference._philox import nine_bits

DTYPES = ("bfloat16", "float16")
HADAMARD = 16
"""Elements that one Hadamard transform takes."""
MIN_EPS = 1e-12


def rms_norm(x, weight, eps: float):
    """RMSNorm of x (rows, K) by weight (K,); squares are added as a tree of neighbours.

    Arithmetic is in the type of x, float32 or float64.
    """
    xp = library_of(x)
    k = x.shape[1]
    total = xp.pad(x * x, ((0, 0), (0, (1 << max(k - 1, 0).bit_length()) - k)))
    while total.shape[1] > 1:
        total = total[:, ::2] + total[:, 1::2]
    mean = total / xp.float32(max(k, 1)) + xp.float32(eps)
    # A root and a quotient of float32 are correctly rounded if they are computed in float64.
    root = xp.sqrt(mean.astype("float64")).astype(x.dtype)
    return x * (1.0 / root.astype("float64")).astype(x.dtype) * weight


def hadamard(h, signs):
    """The Hadamard transform of each 16 neighbours in float32 h (rows, K) times signs (16,)."""
    xp = library_of(h)
    shape, h = h.shape, h.reshape(-1, HADAMARD) * signs
    for step in (1, 2, 4, 8):
        pairs = h.reshape(-1, HADAMARD // (2 * step), 2, step)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        h = xp.stack((first + second, first - second), axis=2).reshape(-1, HADAMARD)
    return (h * xp.float32(0.25)).reshape(shape)


def _oracle(problem, arrays):
    from numpy import errstate

    h = widen(arrays["x"], problem["dtype"])
    with errstate(invalid="ignore", over="ignore"):  # rows with infinities
        if problem["rms_norm"]:
            weight = dtypes.decode(arrays["weight"], problem["dtype"])
            h = rms_norm(h.astype("float32"), weight, problem["eps"]).astype("float64")
        if problem["hadamard"]:
            h = hadamard(h.astype("float32"), arrays["signs"]).astype("float64")
    random = nine_bits(arrays["seed"], *h.shape) if problem["stochastic"] else None
    codes, scales = quantize(h, problem["format"], arrays.get("global_scale"), random)
    return {"q": codes, "scale": to_layout(problem.values, scales)}


def _make_inputs(problem, normal):
    """Magnitudes of blocks differ by up to 65,536, and one block in nine is zero.

    With the global scale some blocks saturate and others get the smallest scale. One row in fifteen
    has infinities or NaN.
    """
    m, k = problem["M"], problem["K"]
    magnitude = block_magnitudes(normal((m, k // 16)))
    x, row = normal((m, k)) * magnitude.repeat(16, axis=1), normal((m, 1))
    xp = library_of(x)
    is_special = (xp.arange(k)[None, :] % 97 == 5) & (row > 1.5)
    special = xp.where(row > 1.8, xp.float32("nan"), xp.float32("inf"))
    inputs = {"x": xp.where(is_special, special, x)}
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
    if reason := block_error(problem):
        return reason
    if problem["rms_norm"] and problem["eps"] < MIN_EPS:
        return f"eps={problem['eps']} must be at least {MIN_EPS}"
    return None


def rows(m: int, k: int, format: str = "nvfp4", **options: bool | str) -> Problem:
    """The problem of quantizing bfloat16 (m, k), without options unless ``options`` has them."""
    axes = {
        "dtype": "bfloat16", "format": format, "scale_layout": "linear", "rms_norm": False,
        "hadamard": False, "stochastic": False, "eps": 1e-5, **options,
    }  # fmt: skip
    return Problem.of("nvfp4_quantize", M=m, K=k, **axes)


SHAPES = ((16, 7168), (128, 7168), (4096, 7168), (8192, 8192), (8192, 2880))
"""M and K: activations of DeepSeek-V3 and gpt-oss, and a square."""


def _problems() -> dict[str, Problem]:
    problems = {f"{m}x{k}-{f}": rows(m, k, f) for f in FORMATS for m, k in SHAPES}
    return problems | {
        "8192x8192-nvfp4-swizzled": rows(8192, 8192, scale_layout="swizzled"),
        "128x7168-nvfp4-rms": rows(128, 7168, rms_norm=True, scale_layout="swizzled"),
        "8192x7168-nvfp4-rms": rows(8192, 7168, rms_norm=True, scale_layout="swizzled"),
        "8192x8192-nvfp4-training": rows(8192, 8192, hadamard=True, stochastic=True),
    }


ENTRY = Entry(
    name="nvfp4_quantize",
    summary="Quantize to NVFP4 or MXFP4, bit-exact; RMSNorm, Hadamard, stochastic rounding.",
    axes=(
        Axis.size("M", "rows of x", 0, 300, varies=True),
        Axis.size(
            "K", "columns of x, a multiple of 16 (nvfp4) or 32 (mxfp4)", 0, 1024, step=16
        ),
        Axis.choice("dtype", "element type of x and weight", *DTYPES, minor=True),
        Axis.choice("format", "format of q and scale", *FORMATS, default="nvfp4"),
        Axis.choice("scale_layout", LAYOUT_DOC, *LAYOUTS, default="linear"),
        Axis.flag("rms_norm", "whether RMSNorm with weight comes first"),
        Axis.flag("hadamard", "whether each 16 columns go through a Hadamard transform"),
        Axis.flag("stochastic", "whether codes are rounded at random"),
        Axis.number("eps", "RMSNorm's epsilon, at least 1e-12", 1e-5, 1e-6, default=1e-5),
    ),
    inputs=(
        Tensor("x", ("M", "K"), "dtype", "matrix to quantize"),
        Tensor(
            "global_scale", (1,), "float32",
            "NVFP4: factor of all values when they are read, 2^-64 to 2^64",
            flag="format", when="nvfp4",
        ),
        Tensor("weight", ("K",), "dtype", "factor of each column after RMSNorm", flag="rms_norm"),
        Tensor(
            "signs", (HADAMARD,), "float32", "+1 or -1: factors before the Hadamard transform",
            flag="hadamard",
        ),
        Tensor("seed", (2,), "int32", "key of the random numbers (Philox)", flag="stochastic"),
    ),
    outputs=(
        Tensor("q", ("M", PACKED_K), CODES, CODES_DOC),
        Tensor("scale", scale_sizes("M"), SCALE, SCALE_DOC),
    ),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance=dict.fromkeys(DTYPES, EXACT),
    flops=lambda problem: problem["M"] * problem["K"],
    bytes_moved=_bytes_moved,
    problems=_problems(),
    peers=(Peer("torch", torch_quantize),),
    without_peer={
        "*-swizzled": "torch's definition has linear scales only",
        "*-rms": "torch's definition has no RMSNorm",
        "*-training": "torch's definition has no Hadamard transform and no stochastic rounding",
    },
    constraint=_constraint,
)  # fmt: skip

"""Weights of experts: one matrix (N, K) an expert, in 16 bits, block-scaled float8 or 4 bits.

    format               weight of expert e                                     scales
    bfloat16, float16    w[e, n, k]
    fp8                  w[e, n, k] * w_scale[e, n / 128, k / 128]              float32
    mxfp4                w[e, n, k] * w_scale[e, n, k / 32]                     E8M0
    nvfp4                w[e, n, k] * w_scale[e, n, k / 16] * global_scale[e]   E4M3

`_fp8` and `_fp4` define the numbers. 4-bit weights are E2M1 codes, two in a byte, in rows as
checkpoints store them or in tiles (`_fp4_tiles`, each expert by itself). ``act_dtype`` is
the type of the activations that are multiplied: the 16-bit type ``dtype``, or float8_e4m3fn with a
float32 scale for every row and 128 columns.

Weights of a large model do not fit into memory as float32, so inputs and oracles take them as they
are stored (`Tensor.as_stored`), one expert at a time.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import Axis, Derived, ElementType, Problem, Tensor
from kernelcat.reference import _fp4, _fp8
from kernelcat.reference._arrays import library_of
from kernelcat.reference._epilogue import silu
from kernelcat.reference._fp4_tiles import (
    TILE_COLS,
    TILE_ROWS,
    pack_codes,
    pack_scales,
    unpack_codes,
    unpack_scales,
)

DTYPES = ("bfloat16", "float16")
FP8 = _fp8.FP8
FORMATS = (*DTYPES, "fp8", "mxfp4", "nvfp4")
FP4 = ("mxfp4", "nvfp4")
SCALED = ("fp8", *FP4)
PACKINGS = ("rows", "tiles")
ACTIVATIONS = ("none", "swiglu", "swiglu_oai")

EXPERTS = Axis.size("experts", "experts", 1, 24)
DTYPE = Axis.choice("dtype", "element type of biases and the result", *DTYPES)
FORMAT = Axis.choice("format", "number format of the weights", *FORMATS)
ACT_DTYPE = Axis.choice(
    "act_dtype", "element type of activations that are multiplied", *DTYPES, FP8
)
PACKING = Axis.choice(
    "packing", "order of 4-bit weights: rows, or tiles that fp4.prepack makes", *PACKINGS,
    default="rows",
)  # fmt: skip
_WEIGHTS = {**{name: name for name in DTYPES}, "fp8": FP8, **dict.fromkeys(FP4, _fp4.CODES)}
WEIGHT = ElementType("format", tuple(_WEIGHTS.items()))
SCALE = ElementType.of("format", fp8="float32", mxfp4="float8_e8m0fnu", nvfp4=FP8)


# ---- shapes -------------------------------------------------------------------------------------


def _padded(axes, n: int, k: int) -> tuple[int, int]:
    """Rows and columns of a matrix as stored: 4-bit tiles pad both."""
    if axes["format"] in FP4 and axes["packing"] == "tiles":
        return _fp4.padded(n, TILE_ROWS), _fp4.padded(k, TILE_COLS)
    return n, k


def weight_shape(axes, n: int, k: int) -> tuple[int, int]:
    """Shape of one expert's weights (n, k) as stored; 4-bit codes count in bytes."""
    rows, cols = _padded(axes, n, k)
    return (rows, cols // 2) if axes["format"] in FP4 else (rows, cols)


def scale_shape(axes, n: int, k: int) -> tuple[int, int]:
    """Shape of one expert's scales."""
    if axes["format"] in FP4:
        rows, cols = _padded(axes, n, k)
        return rows, cols // _fp4.BLOCKS[axes["format"]]
    return -(-n // _fp8.BLOCK), -(-k // _fp8.BLOCK)


def weight_bytes(axes, n: int, k: int) -> int:
    """Bytes of one expert's weights, scales included."""
    rows, cols = weight_shape(axes, n, k)
    size = rows * cols * dtypes.itemsize(WEIGHT.where(axes))
    if axes["format"] in SCALED:
        rows, cols = scale_shape(axes, n, k)
        size += rows * cols * dtypes.itemsize(SCALE.where(axes))
    return int(size)


def tensors(number: str, n, k, rows_tell: tuple) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The weights of a matrix of ``n(axes)`` x ``k(axes)`` an expert, and what is optional.

    Optional are scales, global scale and bias. ``number`` is appended to the tensors' names.
    ``rows_tell`` is `Derived.tells` of the number of rows.
    """
    w = tuple(
        Derived(
            f"{what} of w{number}", lambda axes, i=i: weight_shape(axes, n(axes), k(axes))[i],
            tells=rows_tell if i == 0 else None,
        )
        for i, what in enumerate(("rows", "columns"))
    )  # fmt: skip
    s = tuple(
        Derived(
            f"{what} of w{number}_scale",
            lambda axes, i=i: scale_shape(axes, n(axes), k(axes))[i],
        )
        for i, what in enumerate(("rows", "columns"))
    )
    weights = Tensor(f"w{number}", ("experts", *w), WEIGHT, "weights", as_stored=True)
    return weights, (
        Tensor(
            f"w{number}_scale", ("experts", *s), SCALE, "scales of the weights",
            flag="format", when=SCALED, as_stored=True,
        ),
        Tensor(
            f"w{number}_global_scale", ("experts",), "float32", "factor of each expert's weights",
            flag="format", when="nvfp4",
        ),
        Tensor(
            f"bias{number}", ("experts", Derived(f"rows of w{number}", n)), "dtype",
            "added to each row of the product", flag="bias",
        ),
    )  # fmt: skip


def error(problem: Problem, n: int, k: int) -> str | None:
    """Why there is no matrix of ``n`` x ``k`` in the problem's format, or None."""
    format, dtype = problem["format"], problem["dtype"]
    if format in DTYPES and format != dtype:
        return f"weights are {format} and activations {dtype}; 16-bit types must be equal"
    if format not in FP4 and problem["packing"] != "rows":
        return f"packing={problem['packing']} is for 4-bit weights, not for {format}"
    if format in FP4:
        if k % _fp4.BLOCKS[format]:
            return f"{k} columns of weights must be a multiple of {_fp4.BLOCKS[format]}: {format}"
        if problem["packing"] == "tiles" and n % TILE_ROWS:
            return f"{n} rows of weights must be a multiple of {TILE_ROWS} in tiles"
    if problem["act_dtype"] not in (dtype, FP8):
        return f"act_dtype={problem['act_dtype']} must be dtype ({dtype}) or {FP8}"
    if problem["act_dtype"] == FP8 and format in DTYPES:
        return f"float8 activations need weights of 8 or 4 bits, not {format}"
    return None


# ---- values -------------------------------------------------------------------------------------


def draw(problem: Problem, number: str, n: int, k: int, normal) -> dict:
    """Weights, scales, global scale and bias by tensor name; rows have a norm of about 1."""
    deviation = max(k, 1) ** -0.5
    drawn = [_draw_expert(problem, n, k, normal, deviation) for _ in range(problem["experts"])]
    xp = _library(normal)
    out = {f"w{number}": xp.stack([w for w, _, _ in drawn])}
    if problem["format"] in SCALED:
        out[f"w{number}_scale"] = xp.stack([scale for _, scale, _ in drawn])
    if problem["format"] == "nvfp4":
        out[f"w{number}_global_scale"] = xp.stack([g for _, _, g in drawn])
    if problem["bias"]:
        out[f"bias{number}"] = 0.5 * normal((problem["experts"], n))
    return out


def _library(normal):
    return library_of(normal((1,)))


def _draw_expert(problem, n: int, k: int, normal, deviation: float):
    """Weights and scales of one expert as stored, and its global scale; None where absent."""
    xp, axes, format = _library(normal), problem.values, problem["format"]
    if format in DTYPES:
        return dtypes.encode(deviation * normal((n, k)), format), None, None
    if format == "fp8":
        spread = normal(scale_shape(axes, n, k))
        scale = (deviation * (1 + 0.5 * spread / (1 + abs(spread)))).astype("float32")
        return dtypes.encode(normal((n, k)), FP8), scale, None
    codes = dtypes.encode((3 * normal((n, k))).clip(-6, 6), _fp4.CODES)
    spread, global_scale = normal((n, k // _fp4.BLOCKS[format])), None
    if format == "nvfp4":
        scale = 1 + 0.5 * spread / (1 + abs(spread))
        global_scale = (deviation / 3.1 * (1 + 0.1 * normal((1,)).clip(-3, 3)))[0]
    else:
        exponent = xp.floor(xp.log2(xp.float32(deviation / 3.1)))
        scale = 2.0 ** (exponent + xp.rint(spread).clip(-2, 1))
    scales = dtypes.encode(scale.astype("float32"), SCALE.where(axes))
    if problem["packing"] == "tiles":
        codes, scales = pack_codes(codes), pack_scales(scales, format)
    return codes, scales, global_scale


def weights(problem: Problem, arrays, number: str, expert: int, n: int, k: int):
    """The float32 weights (n, k) that a product multiplies.

    In 4 bits beside 16-bit activations they are w * w_scale rounded to the activations' type
    (exact but for MXFP4 in float16); NVFP4's global scale is included, unrounded.
    """
    format, codes = problem["format"], arrays[f"w{number}"][expert]
    if codes.dtype == "float32":  # stands for 16 bits
        return codes
    if format in DTYPES:
        return dtypes.decode(codes, format)
    scales = arrays[f"w{number}_scale"][expert]
    if format == "fp8":
        scale = _fp8.expand(scales, _fp8.BLOCK, (n, k))
        return dtypes.decode(codes, FP8) * scale
    if problem["packing"] == "tiles":
        codes, scales = unpack_codes(codes, n, k), unpack_scales(scales, format, n, k)
    scale = dtypes.decode(scales, SCALE.where(problem.values)).repeat(_fp4.BLOCKS[format], axis=1)
    w = dtypes.decode(codes, _fp4.CODES) * scale
    if problem["dtype"] == "float16" and problem["act_dtype"] != FP8:
        w = dtypes.decode(dtypes.encode(w, "float16"), "float16")
    return w * arrays[f"w{number}_global_scale"][expert] if format == "nvfp4" else w


def quantized(x):
    """Float32 ``x`` (rows, K) after a round trip through float8 with scales of 1 x 128."""
    q, scale = _fp8.quantize(x, 1)
    return dtypes.decode(q, FP8) * _fp8.expand(scale, 1, x.shape)


LIMIT, ALPHA = 7.0, 1.702
"""gpt-oss's SwiGLU: the clamp of gates and values, and the factor in the sigmoid."""


def activate(activation: str, z):
    """``activation`` of float32 ``z`` (rows, N): (rows, N), or (rows, N / 2) for both SwiGLU.

    swiglu      silu(z[:, 2j]) * z[:, 2j + 1]
    swiglu_oai  g * sigmoid(1.702 g) * (u + 1), g = min(z[:, 2j], 7), u = z[:, 2j + 1] in +-7
    """
    if activation == "swiglu":
        return silu(z[:, ::2]) * z[:, 1::2]
    if activation == "swiglu_oai":
        import numpy as np

        gate, up = z[:, ::2].clip(None, LIMIT), z[:, 1::2].clip(-LIMIT, LIMIT)
        return gate / (1 + np.exp(-ALPHA * gate)) * (up + 1)
    return z

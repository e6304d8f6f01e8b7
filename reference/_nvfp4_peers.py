"""Peers of the entries for NVFP4 and MXFP4, in torch.

The peers of `nvfp4_quantize` and `nvfp4_dequantize` are their definitions (`_fp4`) under
``torch.compile``. The peer of `nvfp4_matmul` is cuBLAS with weights in 16 bits.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.errors import Unsupported
from kernelcat.reference._arrays import bytes_of
from kernelcat.reference._epilogue import torch_activation
from kernelcat.reference._fp4 import BLOCKS, CODES, MIN_NVFP4_SCALE, NAN_SCALE, unswizzle
from kernelcat.reference._fp4_tiles import unpack_codes, unpack_scales
from kernelcat.reference._peers import import_torch

MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""MIDPOINTS[i] lies between E2M1 codes i and i + 1; it is rounded to the even one of them."""


def encode(torch, y):
    """E2M1 codes (rows, K / 2), uint8, of float32 ``y`` (rows, K), rounded to nearest."""
    magnitude = y.abs()
    code = torch.signbit(y).to(torch.uint8) * 8
    for i, midpoint in enumerate(MIDPOINTS):
        is_above = magnitude >= midpoint if i % 2 else magnitude > midpoint
        code = code + is_above.to(torch.uint8)
    return code[:, ::2] | code[:, 1::2] << 4


def quantize(torch, x, format: str, global_scale):
    """``(q, scale)``, uint8 (rows, K / 2) and (rows, K / block), of ``x`` (rows, K) in 16 bits.

    Divisions are in float64, because Inductor's float32 divisions are approximate.
    """
    blocks = x.float().unflatten(1, (-1, BLOCKS[format]))
    amax = blocks.abs().amax(2)
    has_nan = torch.isnan(amax)
    if format == "mxfp4":
        scale = ((amax.view(torch.int32) >> 23).clamp(2, 254) - 2).to(torch.int32)
        inverse = (254 - scale << 23).view(torch.float32)
    else:
        per_six = (1 / (dtypes.E2M1_MAX * global_scale).double()).float()
        scale = (amax * per_six).clamp(MIN_NVFP4_SCALE, dtypes.E4M3_MAX).to(torch.float8_e4m3fn)
        inverse = (1 / (scale.float() * global_scale).double()).float()
        scale = scale.view(torch.uint8)
    codes = encode(torch, (blocks * inverse[:, :, None]).flatten(1))
    is_nan = has_nan.repeat_interleave(BLOCKS[format] // 2, dim=1)
    scale = torch.where(has_nan, NAN_SCALE[format], scale.to(torch.uint8))
    return torch.where(is_nan, 0, codes), scale


def dequantize(torch, q, scale, format: str, global_scale):
    """Float32 (rows, K) of uint8 ``q`` (rows, K / 2) and ``scale`` (rows, K / block)."""
    codes = torch.stack((q & 15, q >> 4), dim=-1).flatten(1)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor(magnitudes + [-value for value in magnitudes], device=q.device)
    element = torch.float8_e8m0fnu if format == "mxfp4" else torch.float8_e4m3fn
    factor = scale.view(element).float().repeat_interleave(BLOCKS[format], dim=1)
    values = table[codes.int()] * factor
    return values if global_scale is None else values * global_scale


def _check(problem) -> None:
    """Raises ``Unsupported`` for problems that torch's definitions do not cover."""
    if problem["M"] * problem["K"] == 0:
        raise Unsupported("torch is not raced where M or K is 0")
    if problem["scale_layout"] != "linear":
        raise Unsupported("torch's definition has linear scales only")


def torch_quantize():
    """The definition of `nvfp4_quantize` without its options, under ``torch.compile``."""
    torch = import_torch("torch")

    @torch.compile(fullgraph=True, dynamic=False)
    def run(x, global_scale, q, scale, format):
        codes, scales = quantize(torch, x, format, global_scale)
        q.copy_(codes)
        scale.copy_(scales)

    def make(problem, arrays):
        _check(problem)
        if problem["rms_norm"] or problem["hadamard"] or problem["stochastic"]:
            raise Unsupported("torch's definition has no RMSNorm, Hadamard or stochastic rounding")
        q, scale = (arrays[name].view(torch.uint8) for name in ("q", "scale"))
        global_scale = arrays.get("global_scale")
        return lambda: run(arrays["x"], global_scale, q, scale, problem["format"])

    return make


def torch_dequantize():
    """The definition of `nvfp4_dequantize`, under ``torch.compile``."""
    torch = import_torch("torch")

    @torch.compile(fullgraph=True, dynamic=False)
    def run(q, scale, global_scale, x, format):
        x.copy_(dequantize(torch, q, scale, format, global_scale).to(x.dtype))

    def make(problem, arrays):
        _check(problem)
        q, scale = (arrays[name].view(torch.uint8) for name in ("q", "scale"))
        global_scale = arrays.get("global_scale")
        return lambda: run(q, scale, global_scale, arrays["x"], problem["format"])

    return make


def _weight_bytes(torch, problem, arrays):
    """Codes (N, K / 2) and linear scales (N, K / block) of W in rows, as torch's uint8."""
    codes, scales = (arrays[name].view(torch.uint8) for name in ("w", "w_scale"))
    n, k, format = problem["N"], problem["K"], problem["format"]
    if problem["packing"] == "tiles":
        codes = torch.from_dlpack(unpack_codes(bytes_of(codes), n, k))
        scales = torch.from_dlpack(unpack_scales(bytes_of(scales), format, n, k))
    elif problem["dtype"] == CODES:
        scales = unswizzle(scales, n, k // BLOCKS[format])
    return codes, scales


def _activation_bytes(torch, problem, arrays):
    """Codes (M, K / 2) and linear scales (M, K / block) of A in 4 bits, as torch's uint8."""
    codes, scales = (arrays[name].view(torch.uint8) for name in ("a", "a_block_scale"))
    return codes, unswizzle(scales, problem["M"], problem["K"] // BLOCKS[problem["format"]])


def torch_matmul():
    """cuBLAS through torch, with weights that are dequantized to 16 bits before the race.

    A in float8 or 4 bits is converted to bfloat16 before the race as well. The row scales of A in
    float8 multiply the product in float32, so that the result is rounded once.
    """
    torch = import_torch("cublas")

    def in_16_bits(problem, codes, scales):
        values = dequantize(torch, codes, scales, problem["format"], None)
        return values.to(torch.float16 if problem["dtype"] == "float16" else torch.bfloat16)

    def make(problem, arrays):
        a, d, bias, a_scale = (arrays.get(name) for name in ("a", "d", "bias", "a_scale"))
        if a_scale is not None and (bias is not None or problem["activation"] != "none"):
            raise Unsupported("with A in float8 cuBLAS is raced without bias and activation")
        is_fp4 = problem["dtype"] == CODES
        a = in_16_bits(problem, *_activation_bytes(torch, problem, arrays)) if is_fp4 else a
        a, w = a.to(d.dtype), in_16_bits(problem, *_weight_bytes(torch, problem, arrays)).t()
        alpha = float(arrays["global_scale"]) if "global_scale" in arrays else 1.0
        added, beta = (d.new_zeros(1), 0) if bias is None else (bias, 1)
        if a_scale is not None:
            factors = (a_scale * alpha)[:, None]
            if not a.is_cuda:  # torch has products of 16 bits into float32 on GPUs only
                return lambda: torch.mul(torch.mm(a.float(), w.float()), factors, out=d)
            return lambda: torch.mul(torch.mm(a, w, out_dtype=torch.float32), factors, out=d)

        def multiply(out=None):
            return torch.addmm(added, a, w, beta=beta, alpha=alpha, out=out)

        if problem["activation"] == "none":
            return lambda: multiply(out=d)
        activation = torch_activation(problem["activation"])
        return lambda: d.copy_(activation(multiply()))

    return make

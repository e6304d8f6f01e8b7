"""Peers of `nvfp4_quantize` and `nvfp4_dequantize`: their definitions in torch, compiled."""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.errors import MissingDependency, Unsupported
from kernelcat.reference._fp4 import BLOCKS, CODES, LEAST_SCALE, NAN_SCALE
from kernelcat.reference._fp4_tiles import unpack_codes, unpack_scales

TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between codes i and i + 1; the even one gets the tie."""


def import_torch():
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingDependency("the peer torch needs torch: pip install torch") from error
    return torch


def packed(torch, y):
    """Bytes of pairs of codes of float32 (rows, K), to nearest."""
    size = y.abs()
    code = torch.signbit(y).to(torch.uint8) * 8
    for i, tie in enumerate(TIES):
        code = code + (size >= tie if i % 2 else size > tie).to(torch.uint8)
    return code[:, ::2] | code[:, 1::2] << 4


def quantized(torch, x, format: str, global_scale):
    """``(q, scale)`` as bytes. Divisions are float64's: Inductor's in float32 are approximate."""
    blocks = x.float().unflatten(1, (-1, BLOCKS[format]))
    amax = blocks.abs().amax(2)
    missing = torch.isnan(amax)
    if format == "mxfp4":
        scale = ((amax.view(torch.int32) >> 23).clamp(2, 254) - 2).to(torch.int32)
        inverse = (254 - scale << 23).view(torch.float32)
    else:
        per_six = (1 / (dtypes.E2M1_MAX * global_scale).double()).float()
        coded = (amax * per_six).clamp(LEAST_SCALE, dtypes.E4M3_MAX).to(torch.float8_e4m3fn)
        inverse = (1 / (coded.float() * global_scale).double()).float()
        scale = coded.view(torch.uint8)
    codes = packed(torch, (blocks * inverse[:, :, None]).flatten(1))
    lost = missing.repeat_interleave(BLOCKS[format] // 2, dim=1)
    scale = torch.where(missing, NAN_SCALE[format], scale.to(torch.uint8))
    return torch.where(lost, 0, codes), scale


def dequantized(torch, q, scale, format: str, global_scale):
    """Float32 values of bytes."""
    codes = torch.stack((q & 15, q >> 4), dim=-1).flatten(1)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor(values + [-value for value in values], device=q.device)
    element = torch.float8_e8m0fnu if format == "mxfp4" else torch.float8_e4m3fn
    factor = scale.view(element).float().repeat_interleave(BLOCKS[format], dim=1)
    found = table[codes.int()] * factor
    return found if global_scale is None else found * global_scale


def unswizzled(scales, rows: int, cols: int):
    """(rows, cols) bytes of the swizzled layout's (`_fp4`)."""
    tiles, tile_cols = scales.shape[0] // 128, scales.shape[1] // 4
    parts = scales.reshape(tiles, tile_cols, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return parts.reshape(scales.shape)[:rows, :cols].contiguous()


def _plain(problem) -> None:
    if problem["M"] * problem["K"] == 0 or problem["scale_layout"] != "linear":
        raise Unsupported("torch's formulation has linear scales, and something to do")


def torch_quantize():
    """The definition without its options."""
    torch = import_torch()

    @torch.compile(fullgraph=True, dynamic=False)
    def run(x, global_scale, q, scale, format):
        found = quantized(torch, x, format, global_scale)
        q.copy_(found[0])
        scale.copy_(found[1])

    def make(problem, arrays):
        _plain(problem)
        if problem["rms_norm"] or problem["hadamard"] or problem["stochastic"]:
            raise Unsupported("torch's formulation has no options")
        q, scale = (arrays[name].view(torch.uint8) for name in ("q", "scale"))
        given = arrays.get("global_scale")
        return lambda: run(arrays["x"], given, q, scale, problem["format"])

    return make


def torch_dequantize():
    """The definition."""
    torch = import_torch()

    @torch.compile(fullgraph=True, dynamic=False)
    def run(q, scale, global_scale, x, format):
        x.copy_(dequantized(torch, q, scale, format, global_scale).to(x.dtype))

    def make(problem, arrays):
        _plain(problem)
        q, scale = (arrays[name].view(torch.uint8) for name in ("q", "scale"))
        given = arrays.get("global_scale")
        return lambda: run(q, scale, given, arrays["x"], problem["format"])

    return make


def in_rows(torch, problem, codes, scales):
    """Weights' bytes as quantizers store them, whatever the problem's packing."""
    if problem["packing"] == "rows":
        return codes, scales
    n, k = problem["N"], problem["K"]
    if codes.device.type == "cpu":
        codes, scales = codes.numpy(), scales.numpy()
    else:
        import cupy

        codes, scales = cupy.from_dlpack(codes), cupy.from_dlpack(scales)
    codes, scales = unpack_codes(codes, n, k), unpack_scales(scales, problem["format"], n, k)
    return torch.from_dlpack(codes), torch.from_dlpack(scales)


def torch_matmul():
    """cuBLAS in 16 bits through torch, of weights that were dequantized ahead of time.

    A in float8 or 4 bits is made bfloat16 ahead of time as well; float8's scales come after the
    product.
    """
    torch = import_torch()
    activations = {
        "none": lambda z: z,
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "swiglu": lambda z: torch.nn.functional.silu(z[:, ::2]) * z[:, 1::2],
    }

    def stored(array):
        return array.view(torch.uint8)

    def values(problem, codes, scales, is_swizzled: bool):
        codes, scales = stored(codes), stored(scales)
        if is_swizzled:
            cols = problem["K"] // BLOCKS[problem["format"]]
            scales = unswizzled(scales, codes.shape[0], cols)
        found = dequantized(torch, codes, scales, problem["format"], None)
        return found.to(torch.float16 if problem["dtype"] == "float16" else torch.bfloat16)

    def make(problem, arrays):
        a, d, bias, a_scale = (arrays.get(name) for name in ("a", "d", "bias", "a_scale"))
        if a_scale is not None and (bias is not None or problem["activation"] != "none"):
            raise Unsupported("with float8 cuBLAS is raced without bias and activation")
        in_codes, in_tiles = problem["dtype"] == CODES, problem["packing"] == "tiles"
        a = values(problem, a, arrays["a_block_scale"], True) if in_codes else a.to(d.dtype)
        codes, scales = in_rows(torch, problem, stored(arrays["w"]), stored(arrays["w_scale"]))
        w = values(problem, codes, scales, in_codes and not in_tiles).t()
        alpha = float(arrays["global_scale"]) if "global_scale" in arrays else 1.0
        added, beta = (d.new_zeros(1), 0) if bias is None else (bias, 1)
        if a_scale is not None:
            factors, alpha = (a_scale * alpha)[:, None], 1.0

        def multiply(out=None):
            return torch.addmm(added, a, w, beta=beta, alpha=alpha, out=out)

        if a_scale is not None:
            return lambda: torch.mul(multiply(), factors, out=d)
        if problem["activation"] == "none":
            return lambda: multiply(out=d)
        activation = activations[problem["activation"]]
        return lambda: d.copy_(activation(multiply()))

    return make

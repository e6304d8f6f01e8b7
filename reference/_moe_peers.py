"""Peers of `moe_mlp`: torch's grouped products, and the fused kernels of `triton_kernels`.

Weights are brought into the order that a peer reads fastest before the race.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelcat.errors import Unsupported
from kernelcat.reference._arrays import bytes_of
from kernelcat.reference._experts import ALPHA, DTYPES, FP8, LIMIT
from kernelcat.reference._fp4_tiles import unpack_codes, unpack_scales
from kernelcat.reference._peers import import_torch
from kernelcat.reference._triton_kernels import load


def check(problem, peer: str, formats) -> None:
    """Raise ``Unsupported`` unless ``peer`` can compute ``problem`` with weights in ``formats``."""
    if problem["format"] not in formats:
        raise Unsupported(f"{peer} is raced with weights in {', '.join(formats)}")
    if problem["act_dtype"] == FP8 and peer != "humming":
        raise Unsupported(f"{peer} is raced with activations in 16 bits")
    plain = {"score": "softmax", "renormalize": True, "bias": False, "residual": False}
    for axis, value in plain.items():
        if problem[axis] != value:
            raise Unsupported(f"{peer} is raced where {axis} is {value}")
    if problem["scaling"] != 1 or problem["tokens"] == 0:
        raise Unsupported(f"{peer} is raced with scaling 1 and at least one token")


def check_hopper(peer: str) -> None:
    """Raise ``Unsupported`` unless the GPU is a Hopper, for which ``peer`` has its kernels."""
    major, minor = import_torch(peer).cuda.get_device_capability()
    if major != 9:
        raise Unsupported(f"{peer} is raced on Hopper (sm_90), not on sm_{major}{minor}")


def mxfp4_rows(problem, arrays, number: str, n: int, k: int):
    """Codes (experts, n, k / 2) and scales (experts, n, k / 32) in rows, torch tensors of uint8."""
    torch = import_torch("torch")
    w, scale = arrays[f"w{number}"], arrays[f"w{number}_scale"]
    if problem["packing"] == "rows":
        return w.view(torch.uint8), scale.view(torch.uint8)
    unpacked = ([], [])
    for codes, scales in zip(w, scale, strict=True):
        unpacked[0].append(torch.from_dlpack(unpack_codes(bytes_of(codes), n, k)))
        unpacked[1].append(torch.from_dlpack(unpack_scales(bytes_of(scales), "mxfp4", n, k)))
    return torch.stack(unpacked[0]), torch.stack(unpacked[1])


# ---- torch --------------------------------------------------------------------------------------


def torch_experts():
    """Top-k, sort, two grouped products and a batched weighted sum, all operators of torch."""
    torch = import_torch("torch")

    def make(problem, arrays):
        check(problem, "torch", DTYPES)
        tokens, k, experts = (problem[axis] for axis in ("tokens", "top_k", "experts"))
        # torch is faster with gates and values in contiguous halves than with alternating rows.
        halves = torch.cat((arrays["w1"][:, ::2], arrays["w1"][:, 1::2]), 1).transpose(1, 2)
        down = arrays["w2"].transpose(1, 2)
        token = torch.arange(tokens * k, device=down.device) // k
        ones = torch.ones(tokens * k, device=down.device, dtype=torch.int32)
        is_clamped = problem["activation"] == "swiglu_oai"

        def run():
            values, ids = arrays["logits"].topk(k)
            flat, gates = ids.flatten(), values.float().softmax(-1)
            order = flat.argsort()
            counts = torch.zeros(experts, device=down.device, dtype=torch.int32)
            offsets = counts.scatter_add_(0, flat, ones).cumsum(0, dtype=torch.int32)
            h = torch._grouped_mm(arrays["x"][token[order]], halves, offs=offsets)
            gate, up = h.chunk(2, 1)
            if is_clamped:
                gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
                h = gate * torch.sigmoid(ALPHA * gate) * (up + 1)
            else:
                h = torch.nn.functional.silu(gate) * up
            y = torch._grouped_mm(h, down, offs=offsets)
            y = torch.empty_like(y).index_copy_(0, order, y).view(tokens, k, -1)
            torch.bmm(gates.to(y.dtype)[:, None], y, out=arrays["out"][:, None])

        return run

    return make


# ---- triton_kernels -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Weights:
    """A weight in the layout of triton_kernels, and what its products need beside it."""

    matrix: Any
    precision: Any


def _mxfp4_weights(kernels, codes, scales) -> _Weights:
    """``codes`` (experts, n, k / 2) and ``scales`` (experts, n, k / 32), uint8."""
    from triton_kernels.matmul import PrecisionConfig
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    order = layout.make_default_matmul_mxfp4_w_layout(mx_axis=-2)
    scale_order = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=-2, num_warps=8)
    matrix = convert_layout(wrap_torch_tensor(codes.transpose(1, 2), dtype=FP4), order)
    scale = convert_layout(wrap_torch_tensor(scales.transpose(1, 2)), scale_order)
    return _Weights(matrix, PrecisionConfig(b_mx_scale=scale, b_microblock_size=32))


def triton_kernels():
    """Top-k with sorting, gathering product with SwiGLU, scattering product, weighted sum."""
    kernels = load()
    torch = import_torch("triton_kernels")
    from triton_kernels.matmul import FnSpecs, FusedActivation, PrecisionConfig, matmul
    from triton_kernels.reduce import reduce_forward
    from triton_kernels.swiglu import swiglu_fn
    from triton_kernels.tensor import make_ragged_tensor_metadata
    from triton_kernels.topk import topk

    from kernelcat.reference._triton_activation import silu_and_mul

    def weights(problem, arrays, number, n, k) -> _Weights:
        if problem["format"] in DTYPES:
            w = arrays[f"w{number}"].transpose(1, 2).contiguous()
            return _Weights(w, PrecisionConfig())
        return _mxfp4_weights(kernels, *mxfp4_rows(problem, arrays, number, n, k))

    def make(problem, arrays):
        check(problem, "triton_kernels", (*DTYPES, "mxfp4"))
        tokens, k, hidden, inter = (problem[a] for a in ("tokens", "top_k", "hidden", "inter"))
        up = weights(problem, arrays, "1", 2 * inter, hidden)
        down = weights(problem, arrays, "2", hidden, inter)
        if problem["activation"] == "swiglu_oai":
            specs = FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2)
            activation = FusedActivation(specs, (ALPHA, LIMIT))
        else:
            specs = FnSpecs("silu_and_mul", silu_and_mul, ("one",), reduction_n=2)
            activation = FusedActivation(specs, (1.0,))

        def run():
            routed = topk(arrays["logits"], k)
            mask = routed.mask_metadata
            ragged = make_ragged_tensor_metadata(mask.col_sum, tokens * k)
            order = mask.col_sorted_indx
            gather = torch.div(order, k, rounding_mode="trunc")
            h = matmul(
                arrays["x"], up.matrix, None, a_ragged_metadata=ragged, gather_indx=gather,
                precision_config=up.precision, fused_activation=activation,
            )  # fmt: skip
            y = matmul(
                h, down.matrix, None, a_ragged_metadata=ragged, scatter_indx=order,
                precision_config=down.precision, gammas=routed.vals.flatten()[order],
            )  # fmt: skip
            reduce_forward(y.view(tokens, k, hidden), dim=1, y=arrays["out"])

        return run

    return make

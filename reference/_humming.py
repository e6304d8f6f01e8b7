"""`humming` as a peer of `moe_mlp`: products of 4- and 8-bit weights that gather and scatter rows.

humming brings the products and the activation. Its router here is the top-k of `triton_kernels`,
its sort and weighted sum are those of `_padded_segments`.
"""

from __future__ import annotations

from kernelcat.reference._experts import FP8
from kernelcat.reference._fp8 import BLOCK
from kernelcat.reference._moe_peers import check, mxfp4_rows
from kernelcat.reference._peers import required_by
from kernelcat.reference._triton_kernels import load

SILU_AND_MUL = "a / (1.f + __expf(-a)) * b"
CLAMPED = (
    "fminf(a, 7.f) / (1.f + __expf(-1.702f * fminf(a, 7.f))) * (fminf(fmaxf(b, -7.f), 7.f) + 1.f)"
)
"""Activations of a gate a and a value b in CUDA C++, as humming takes them."""


def _layer(problem, arrays, number: str, n: int, k: int):
    """humming's form of the weights ``number`` (experts, n, k)."""
    import torch
    from humming.layer import HummingLayer

    if problem["format"] == "mxfp4":
        config = {"quant_method": "gpt_oss_mxfp4"}
        codes, scales = mxfp4_rows(problem, arrays, number, n, k)
        tensors = {"weight": codes, "weight_scale": scales}
    else:
        config = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
        scales = arrays[f"w{number}_scale"]
        tensors = {"weight": arrays[f"w{number}"], "weight_scale_inv": scales}
    inputs = None
    if problem["act_dtype"] == FP8:
        inputs = {"dtype": "float8e4m3", "group_size": BLOCK, "quant_mode": "dynamic_group"}
    dtype = getattr(torch, problem["dtype"])
    with torch.device("cuda"):
        # humming asserts on gpt-oss's 2880 columns unless n is padded.
        layer = HummingLayer(
            n, k, config, inputs, num_experts=problem["experts"], torch_dtype=dtype,
            pad_n_to_multiple=BLOCK,
        ).cuda()  # fmt: skip
        layer.load_from_tensors(tensors)
        layer.transform()
    return layer


def humming():
    """Top-k, sort, gathering product, activation, scattering product, weighted sum."""
    load()
    with required_by("humming", "pip install humming-kernels"):
        from humming.forward import humming_forward, may_process_input
        from humming.tune import get_heuristics_config
    from triton_kernels.topk import topk_forward

    from kernelcat.reference._padded_segments import sort, weighted_sum

    def make(problem, arrays):
        check(problem, "humming", ("fp8", "mxfp4"))
        tokens, k, hidden, inter = (problem[a] for a in ("tokens", "top_k", "hidden", "inter"))
        up = _layer(problem, arrays, "1", 2 * inter, hidden)
        down = _layer(problem, arrays, "2", hidden, inter)
        compute = {"gemm_type": "indexed"}
        tuned_up, tuned_down = (
            get_heuristics_config(layer.humming_config, shape_m=tokens * k, gemm_type="indexed")
            for layer in (up, down)
        )
        tiles = [tuned["block_shape"][0] for tuned in (tuned_up, tuned_down)]
        is_clamped = problem["activation"] == "swiglu_oai"

        def product(layer, x, rows, top_k, tuned, scale=None):
            return humming_forward(
                layer.humming_config, x, layer.weight, layer.weight_scale,
                getattr(layer, "zero_point", None),
                weight_scale_2=getattr(layer, "weight_scale_2", None), input_scale=scale,
                sorted_ids=rows.rows, expert_ids=rows.tile_experts, num_tokens_padded=rows.total,
                locks=layer.locks, top_k=top_k, compute_config=compute, tuning_config=tuned,
            )  # fmt: skip

        def run():
            gates, ids, _ = topk_forward(arrays["logits"], k)
            first = sort(ids, problem["experts"], tiles[0])
            second = first
            if tiles[0] != tiles[1]:
                second = sort(ids, problem["experts"], tiles[1])
            h = product(up, arrays["x"], first, k, tuned_up)
            h, scale, _ = may_process_input(
                down.humming_config, h, activation_type="binary_interleaved",
                activation_impl=CLAMPED if is_clamped else SILU_AND_MUL,
            )  # fmt: skip
            y = product(down, h, second, 1, tuned_down, scale)
            weighted_sum(y, gates, arrays["out"])

        return run

    return make

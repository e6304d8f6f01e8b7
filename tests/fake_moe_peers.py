"""Stand-ins for FlashInfer's, QuACK's and `triton_kernels`' functions, in torch on the CPU.

Each does slowly what its documentation says of its arguments, and leaves NaN where it promises
nothing. :func:`judge_peer` runs a peer with them, its Triton kernels in Triton's interpreter.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

from kernelcat import catalog
from kernelcat.jit.interpreter import true_floats
from kernelcat.reference import _tile_race
from kernelcat.runtime import gpu
from kernelcat.verify import gate

HOST = SimpleNamespace(xp=np, gpu=gpu.find("h200"), synchronize=lambda: None)
LEAD = "flashinfer.fused_moe.cute_dsl.sm90_contiguous_"
timed: list = []


def sigmoid_linear(gate, up, alpha=1.0, beta=0.0, limit=float("inf")):
    # Drawn problems never reach the clamp, so the gate cannot see a wrong one.
    assert (alpha, beta, limit) in ((1.0, 0.0, float("inf")), (1.702, 1.0, 7.0))
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


# ---- triton_kernels -----------------------------------------------------------------------------


def topk_forward(logits, k):
    values, ids = logits.float().topk(k)
    return values.softmax(-1).to(logits.dtype), ids.to(torch.int16), None


# ---- FlashInfer: rows padded to whole tiles -----------------------------------------------------


def tiles_of(tile_experts, tile_ends, used_tiles, tile_m):
    """Expert and rows of each tile in use."""
    for tile in range(int(used_tiles)):
        yield int(tile_experts[tile]), slice(tile * tile_m, int(tile_ends[tile]))


def gather_and_activate(
    x, w1_weight, tile_experts, tile_ends, row_ids, used_tiles, *, topk, permuted_m, tile_shape_mn,
    swizzle_size, swiglu_alpha=1.0, swiglu_beta=0.0, swiglu_limit=float("inf"),
):  # fmt: skip
    tile_m, tile_n = tile_shape_mn
    assert tile_m in (64, 128) and tile_n in (64, 128, 192, 256) and swizzle_size >= 1
    assert permuted_m == row_ids.numel() == tile_experts.numel() * tile_m
    inter = w1_weight.shape[1] // 2
    h = x.new_full((permuted_m, inter), float("nan"))
    for expert, rows in tiles_of(tile_experts, tile_ends, used_tiles, tile_m):
        z = x[row_ids[rows].long() // topk].float() @ w1_weight[expert].float().T
        up, gate = z.view(len(z), inter // 32, 2, 32).unbind(2)
        h[rows] = sigmoid_linear(gate, up, swiglu_alpha, swiglu_beta, swiglu_limit).flatten(1).to(h)
    return h


def multiply_and_combine(
    a, w2_weight, tile_experts, tile_ends, row_ids, used_tiles, scales, out, *, topk,
    tile_shape_mn, cluster_shape_mn,
):  # fmt: skip
    tile_m, tile_n = tile_shape_mn
    assert tile_m in (64, 128) and tile_n <= (256 if tile_m == 128 else 128)
    assert cluster_shape_mn == (1, 1) or -(-out.shape[1] // tile_n) % 2 == 0
    assert scales.dtype == torch.float32
    for expert, rows in tiles_of(tile_experts, tile_ends, used_tiles, tile_m):
        ids = row_ids[rows].long()
        y = a[rows].float() @ w2_weight[expert].float().T * scales.flatten()[ids, None]
        out.index_add_(0, ids // topk, y.to(out))


# ---- QuACK: groups of rows without gaps ---------------------------------------------------------


class Epilogue:
    def __init__(self, function, outputs, mode):
        self.function, self.outputs, self.mode = function, outputs, mode

    def plan(self, a, b, *, config, out, cu_seqlens_m, A_idx, **operands):
        assert config.cluster_n == 1 and not config.is_dynamic_persistent  # for A_idx on Hopper
        assert config.tile_m * config.tile_n <= 256 * 128
        return self

    def run(self, a, b, *, out, cu_seqlens_m, A_idx, bias=None):
        (name, result), = out.items()  # fmt: skip
        assert name == (self.outputs[0] if self.outputs else "D")
        assert cu_seqlens_m.dtype == torch.int32 and len(cu_seqlens_m) == len(b) + 1
        for expert, (first, end) in enumerate(pairwise(cu_seqlens_m.tolist())):
            rows = a[first:end] if A_idx is None else a[A_idx[first:end].long()]
            z = rows.float() @ b[expert].float()
            operands = {} if bias is None else {"bias": bias[expert].float()}
            result[first:end] = self.function(z, **operands)[name].to(result)


def gemm_epilogue(outputs=(), mode=None):
    return lambda function: Epilogue(function, outputs, mode)


FAKES = {
    "triton_kernels.topk": {"topk_forward": topk_forward},
    f"{LEAD}gather_grouped_gemm_act_fusion": {
        "sm90_contiguous_gather_grouped_gemm_act_fusion": gather_and_activate
    },
    f"{LEAD}grouped_gemm_finalize_fusion": {
        "sm90_contiguous_grouped_gemm_finalize_fusion": multiply_and_combine
    },
    "quack.activation": {
        "swiglu": sigmoid_linear,
        "swiglu_oai": lambda gate, up, alpha, limit: sigmoid_linear(gate, up, alpha, 1.0, limit),
    },
    "quack.epilogue": {
        "gemm_epilogue": gemm_epilogue, "unpack": lambda pairs: (pairs[:, ::2], pairs[:, 1::2])
    },
    "quack.gemm_config": {"GemmConfig": SimpleNamespace},
}  # fmt: skip


def plant() -> None:
    """Puts the stand-ins in the place of the libraries, for the rest of the process."""
    for name, functions in FAKES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(sys.modules[name]).update(functions)
    torch.cuda.get_device_capability = lambda: (9, 0)
    _tile_race.median_us = lambda run: timed.append(run()) or float(-len(timed))


# ---- the judge ----------------------------------------------------------------------------------


def tensors(arrays: dict) -> dict:
    """The gate's bfloat16, int32 and float32 as torch tensors, without a copy."""
    return {
        name: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype == np.uint16
        else torch.from_numpy(array)
        for name, array in arrays.items()
    }


def judge_peer(entry: str, name: str, config: dict, axes: dict) -> list:
    """How many candidates were timed, and what the gate says of the peer ``name``.

    The arrays are bound twice, and the second copy, whose race is already decided, is judged too.
    """
    plant()
    spec = catalog.entry(entry)
    problem = spec.problem(**axes)
    make = next(peer for peer in spec.peers if peer.name == name).load()
    timed.clear()
    prepared = gate.prepare(spec, problem, HOST)
    copy = prepared.copy()
    with true_floats():
        runs = [make(problem, tensors(arrays)) for arrays in (prepared.arrays, copy.arrays)]
        verdict = prepared.verify_run(lambda: [run() for run in runs], copies=[copy], peer=True)
    return [len(timed), verdict.passed, verdict.detail]

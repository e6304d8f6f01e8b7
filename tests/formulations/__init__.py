"""A second, slow formulation of every entry, independent of its oracle.

Each is a function of the problem and of its input arrays (NumPy, decoded values) by name, and
returns its outputs by name. The arrays have the shapes that the entry defines.
"""

from __future__ import annotations

import numpy as np

from formulations.attention import attn_merge, flashmla, paged_attn
from formulations.caches import kv_write, mla_kv_write
from formulations.exchange import kv_transfer, moe_combine, moe_dispatch
from formulations.experts import moe_gemm
from formulations.float4 import nvfp4_dequantize, nvfp4_matmul, nvfp4_quantize
from formulations.float8 import fp8_gemm, fp8_quantize, fp8_swiglu
from formulations.layers import out_router, qkv_rope_write
from formulations.mlp import moe_mlp
from formulations.norms import rms_norm
from formulations.products import gemm, multicast_gemm
from formulations.routing import moe_route
from formulations.tokens import embedding, lm_head, sample
from kernelcat import dtypes
from kernelcat.catalog.spec import Problem


def tma_copy(problem: Problem, src):
    """Element by element."""
    out = np.empty((problem["rows"], problem["cols"]), src.dtype)
    for row in range(problem["rows"]):
        for col in range(problem["cols"]):
            out[row, col] = src[row, col]
    return {"dst": out}


def all_reduce(problem: Problem, x, residual=None, weight=None):
    """By running sums over the ranks, of which the last one is the result; norms row by row."""
    out, normed = np.empty_like(x), np.empty(x.shape)
    for rank in range(problem["ranks"]):
        terms = x if residual is None else np.concatenate([residual[rank : rank + 1], x])
        total = np.cumsum(terms, axis=0, dtype=np.float32)[-1]
        out[rank] = dtypes.decode(dtypes.encode(total, problem["dtype"]), problem["dtype"])
        for token, row in enumerate(out[rank].astype("float64") if problem["norm"] else []):
            mean_square = (row * row).mean() if row.size else 0.0
            normed[rank, token] = row / np.sqrt(mean_square + problem["eps"]) * weight[rank]
    return {"out": out, "normed": normed}


INDEPENDENT = {
    "all_reduce": all_reduce,
    "attn_merge": attn_merge,
    "embedding": embedding,
    "flashmla": flashmla,
    "fp8_gemm": fp8_gemm,
    "fp8_quantize": fp8_quantize,
    "fp8_swiglu": fp8_swiglu,
    "gemm": gemm,
    "kv_transfer": kv_transfer,
    "kv_write": kv_write,
    "lm_head": lm_head,
    "mla_kv_write": mla_kv_write,
    "moe_combine": moe_combine,
    "moe_dispatch": moe_dispatch,
    "moe_gemm": moe_gemm,
    "moe_mlp": moe_mlp,
    "moe_route": moe_route,
    "multicast_gemm": multicast_gemm,
    "nvfp4_dequantize": nvfp4_dequantize,
    "nvfp4_matmul": nvfp4_matmul,
    "nvfp4_quantize": nvfp4_quantize,
    "out_router": out_router,
    "paged_attn": paged_attn,
    "qkv_rope_write": qkv_rope_write,
    "rms_norm": rms_norm,
    "sample": sample,
    "tma_copy": tma_copy,
}

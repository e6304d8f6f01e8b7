"""A second, slow formulation of every entry, independent of its oracle.

Each is a function of the problem and of its input arrays (NumPy, decoded values) by name, and
returns its outputs by name. The arrays have the shapes that the entry defines.
"""

from __future__ import annotations

import numpy as np

from formulations.attention import attn_merge, flashmla, paged_attn
from formulations.caches import kv_write, mla_kv_write
from formulations.exchange import moe_combine, moe_dispatch
from formulations.experts import moe_gemm
from formulations.float4 import nvfp4_dequantize, nvfp4_matmul, nvfp4_quantize
from formulations.float8 import fp8_gemm, fp8_quantize, fp8_swiglu
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


def all_reduce(problem: Problem, x):
    """By running sums over the ranks, of which the last one is the result on every rank."""
    row = np.cumsum(x, axis=0, dtype=np.float32)[-1]
    row = dtypes.decode(dtypes.encode(row, problem["dtype"]), problem["dtype"])
    return {"out": np.broadcast_to(row, x.shape)}


INDEPENDENT = {
    "all_reduce": all_reduce,
    "attn_merge": attn_merge,
    "embedding": embedding,
    "flashmla": flashmla,
    "fp8_gemm": fp8_gemm,
    "fp8_quantize": fp8_quantize,
    "fp8_swiglu": fp8_swiglu,
    "gemm": gemm,
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
    "paged_attn": paged_attn,
    "rms_norm": rms_norm,
    "sample": sample,
    "tma_copy": tma_copy,
}

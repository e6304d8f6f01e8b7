"""The attention entries, query by query and key by key in float64."""

from __future__ import annotations

import math

import numpy as np

from formulations.float8 import E4M3
from kernelcat.catalog.spec import Problem

NVFP4 = "float4_e2m1fn_x2"


def attn_merge(problem: Problem, outs, lses):
    """Row by row; parts without a visible key are left out."""
    out, lse = np.zeros(outs.shape[1:]), np.full(lses.shape[1:], -np.inf)
    for row in np.ndindex(*lse.shape):
        parts = [part for part in range(problem["parts"]) if lses[part][row] > -np.inf]
        if parts:
            lse[row] = np.logaddexp.reduce([float(lses[part][row]) for part in parts])
            for part in parts:
                out[row] += math.exp(lses[part][row] - lse[row]) * outs[part][row].astype(float)
    return {"out": out, "lse": lse}


def paged_attn(problem: Problem, q, k_cache, v_cache, block_table, kv_lens, cu_q, **more):
    """Query by query and key by key; ``more`` are scales and sinks."""
    group, size = problem["heads"] // problem["kv_heads"], problem["page_size"]
    scale = problem["sm_scale"] or 1 / math.sqrt(problem["head_dim"])
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for s in range(problem["batch"]):
        for t, head in np.ndindex(cu_q[s + 1] - cu_q[s], problem["heads"]):
            query_token = kv_lens[s] - (cu_q[s + 1] - cu_q[s]) + t
            first = max(0, query_token - problem["window"] + 1) if problem["window"] else 0
            logits, values = [], [np.zeros(problem["head_dim"])]
            for token in range(first, query_token + 1):
                page = block_table[s, token // size]
                at = page, token % size, head // group
                k, v = k_cache[at].astype("float64"), v_cache[at].astype("float64")
                if problem["kv_dtype"] == NVFP4:
                    block = np.arange(problem["head_dim"]) // 16
                    k *= more["k_block_scale"][at][block]
                    v *= more["v_block_scale"][at][block]
                if problem["has_scales"]:
                    row = page if problem["page_scales"] else 0, head // group
                    k, v = k * more["k_scale"][row], v * more["v_scale"][row]
                logit = scale * (q[cu_q[s] + t, head] @ k)
                if problem["softcap"]:
                    logit = problem["softcap"] * math.tanh(logit / problem["softcap"])
                logits.append(logit)
                values.append(v)
            sink = more["sinks"][head] if problem["has_sinks"] else -math.inf
            total = np.logaddexp.reduce([sink, *logits])
            if total > -math.inf:
                weights = np.exp(np.array([-math.inf, *logits]) - total)
                out[cu_q[s] + t, head], lse[cu_q[s] + t, head] = weights @ values, total
    return {"out": out, "lse": lse}


def unpacked_row(packed):
    """576 numbers of a row of 656 bytes: 512 float8 codes with their scales, then 64 bfloat16."""
    codes, scales, rope = packed[:512].tolist(), packed[512:528].tobytes(), packed[528:].tobytes()
    values = [math.copysign(E4M3[code & 0x7F], 127.5 - code) for code in codes]
    scales = np.frombuffer(scales, "<f4").astype("float64")
    halves = np.frombuffer(rope, "<u2").astype("<u4") << 16
    return np.concatenate((np.repeat(scales, 128) * values, halves.view("<f4")))


def flashmla(problem: Problem, q, kv_cache, block_table, kv_lens, cu_q):
    """Query by query and head by head."""
    size, scale = problem["page_size"], problem["sm_scale"]
    out, lse = np.zeros((*q.shape[:2], 512)), np.full(q.shape[:2], -np.inf)
    for s in range(problem["batch"]):
        rows = np.zeros((kv_lens[s], 576))
        for token in range(kv_lens[s]):
            row = kv_cache[block_table[s, token // size], token % size]
            is_packed = problem["kv_dtype"] == "uint8"
            rows[token] = unpacked_row(row.astype("uint8")) if is_packed else row
        for t, head in np.ndindex(cu_q[s + 1] - cu_q[s], problem["heads"]):
            visible = rows[: kv_lens[s] - (cu_q[s + 1] - cu_q[s]) + t + 1]
            logits = scale * (visible @ q[cu_q[s] + t, head].astype("float64"))
            total = np.logaddexp.reduce(logits)
            out[cu_q[s] + t, head] = np.exp(logits - total) @ visible[:, :512]
            lse[cu_q[s] + t, head] = total
    return {"out": out, "lse": lse}

"""The entries that write to paged caches, token by token and pair by pair."""

from __future__ import annotations

import math

import numpy as np

from formulations.float8 import FP8, e4m3
from kernelcat import dtypes
from kernelcat.catalog.spec import Problem


def pair_of(problem: Problem, i: int) -> list[int]:
    """Elements of a head that RoPE rotates by angle ``i``."""
    half = problem["rotary_dim"] // 2
    return [2 * i, 2 * i + 1] if problem["style"] == "interleaved" else [i, i + half]


def kv_write(problem: Problem, q, k, v, block_table, kv_lens, cu_q, cos_sin, **more):
    """RoPE as products of complex numbers in float64; the rest of the caches stays.

    ``more`` are caches and scales.
    """
    half, size = problem["rotary_dim"] // 2, problem["page_size"]
    out = {"q_out": q.astype(float), **{n: more[n].astype(float) for n in ("k_cache", "v_cache")}}

    def rotate(row, at):
        row = row.astype(float)
        for i in range(half):
            pair = pair_of(problem, i)
            rotated = complex(*row[pair]) * complex(cos_sin[at, i], cos_sin[at, half + i])
            row[pair] = rotated.real, rotated.imag
        return row

    for s in range(problem["batch"]):
        for t in range(cu_q[s], cu_q[s + 1]):
            at = kv_lens[s] - cu_q[s + 1] + t
            page = block_table[s, at // size]
            for head in range(problem["heads"]):
                out["q_out"][t, head] = rotate(q[t, head], at)
            for head in range(problem["kv_heads"]):
                for name, row in (("k", rotate(k[t, head], at)), ("v", v[t, head])):
                    if problem["has_scales"]:
                        row = row / more[f"{name}_scale"][page * problem["page_scales"], head]
                    if problem["kv_dtype"] == FP8:
                        row = np.minimum(np.maximum(row, -448), 448)
                    out[f"{name}_cache"][page, at % size, head] = row
    return out


def packed_row(row):
    """The 656 bytes of a row of 576 numbers, element by element."""
    codes, scales = [], []
    for group in row[:512].reshape(4, 128).astype("float64"):
        scales.append(2.0 ** math.ceil(math.log2(max(np.abs(group).max() / 448, 1e-4))))
        codes += [e4m3(value / scales[-1]) for value in group]
    rope = dtypes.encode(row[512:], "bfloat16")
    parts = np.uint8(codes), np.float32(scales).view("uint8"), rope.view("uint8")
    return np.concatenate(parts)


def mla_kv_write(problem: Problem, c, k_pe, block_table, kv_lens, cu_q, cos_sin, kv_cache):
    """RoPE in float32, because bytes are compared; the rest of the cache stays."""
    half, size, out = problem["rotary_dim"] // 2, problem["page_size"], kv_cache.copy()
    for s in range(problem["batch"]):
        for t in range(cu_q[s], cu_q[s + 1]):
            at, rotated = kv_lens[s] - cu_q[s + 1] + t, k_pe[t].copy()
            for i in range(half):
                pair = pair_of(problem, i)
                (x, y), cos, sin = k_pe[t, pair], cos_sin[at, i], cos_sin[at, half + i]
                rotated[pair] = x * cos - y * sin, y * cos + x * sin
            row = np.concatenate((c[t], rotated))
            is_packed = problem["kv_dtype"] == "uint8"
            page = block_table[s, at // size]
            out[page, at % size] = packed_row(row) if is_packed else row
    return {"kv_cache": out}

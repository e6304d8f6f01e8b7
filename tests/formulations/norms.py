"""RMSNorm, row by row and block by block."""

from __future__ import annotations

import math

import numpy as np

from formulations.float4 import E2M1, e2m1, tree_sum
from formulations.float4 import scale_of as nvfp4_scale_of
from formulations.float8 import e4m3
from kernelcat import dtypes
from kernelcat.catalog.spec import Problem


def normalized(problem: Problem, h, weight):
    """A row h (N,) divided by the root of its mean square, times the weight (N,)."""
    if len(h) == 0:
        return h
    mean = tree_sum(h * h) / np.float32(len(h)) + np.float32(problem["eps"])
    return h * (np.float32(1) / np.sqrt(mean)) * weight


def to_float8(y):
    """``(q, scale)`` of a row y (N,): values of float8, and one scale for each 128 elements."""
    q, scale = np.empty(len(y), "float32"), np.empty(math.ceil(len(y) / 128), "float32")
    for j in range(len(scale)):
        block = slice(128 * j, 128 * (j + 1))
        amax = np.float32(max(np.abs(y[block]).max(), 1e-10))
        scale[j] = amax / np.float32(448)
        codes = [e4m3(float(value)) for value in y[block] * (np.float32(448) / amax)]
        q[block] = dtypes.decode(np.array(codes, "uint8"), "float8_e4m3fn")
    return q, scale


def to_nvfp4(y, global_scale):
    """``(codes, scale)`` of a row y (N,): values of the codes, and one scale for 16 elements."""
    problem = Problem.of("nvfp4_quantize", format="nvfp4")
    values, scale = np.empty(len(y), "float32"), np.empty(len(y) // 16, "float32")
    for j in range(len(scale)):
        block = slice(16 * j, 16 * (j + 1))
        scale[j], inverse = nvfp4_scale_of(problem, np.abs(y[block]).max(), global_scale)
        codes = np.array([e2m1(float(value)) for value in y[block] * inverse])
        values[block] = np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7]
    return values, scale


def rms_norm(problem: Problem, x, weight, global_scale=None, residual=None):
    """Row by row."""
    m, n = x.shape
    h = x
    if residual is not None:
        h = dtypes.decode(dtypes.encode(x + residual, problem["dtype"]), problem["dtype"])
    y = np.array([normalized(problem, row, weight) for row in h], "float32").reshape(m, n)
    outputs = {} if residual is None else {"residual": h}
    if problem["out_format"] == "same":
        return {**outputs, "y": y}
    if problem["out_format"] == "fp8":
        rows = [to_float8(row) for row in y]
        q = np.array([row[0] for row in rows], "float32").reshape(m, n)
        scale = np.array([row[1] for row in rows], "float32").reshape(m, -(-n // 128))
        return {**outputs, "q": q, "scale": scale.T}
    rows = [to_nvfp4(row, global_scale) for row in y]
    codes = np.array([row[0] for row in rows], "float32").reshape(m, n)
    scale = np.array([row[1] for row in rows], "float32").reshape(m, n // 16)
    return {**outputs, "codes": codes, "block_scale": scale}

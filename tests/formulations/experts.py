"""Products of rows grouped by expert, one row at a time in float64."""

from __future__ import annotations

import numpy as np

from formulations.float4 import decoded_weights
from formulations.float8 import FP8
from formulations.products import sigmoid
from kernelcat import dtypes
from kernelcat.catalog.spec import Problem

SCALES = {"fp8": "float32", "mxfp4": "float8_e8m0fnu", "nvfp4": FP8}
"""Format of weights -> element type of their scales."""


def expert_weights(axes, n: int, k: int, w, w_scale=None, global_scale=None):
    """Weights (n, k) of one expert in float64, from its arrays as they are stored.

    ``axes`` has the values of format, packing, dtype and act_dtype.
    """
    if axes["format"] not in SCALES:
        return dtypes.decode(w, axes["format"]).astype("float64")
    scales = dtypes.decode(w_scale, SCALES[axes["format"]])
    if axes["format"] == "fp8":
        row, col = np.indices((n, k))
        return dtypes.decode(w, FP8).astype("float64") * scales[row // 128, col // 128]
    multiplied = "float32" if axes["act_dtype"] == FP8 else axes["dtype"]
    matrix = {**axes, "N": n, "K": k, "dtype": multiplied}
    codes = dtypes.decode(w, "float4_e2m1fn_x2")
    values = decoded_weights(matrix, codes, scales, False).astype("float64")
    return values if global_scale is None else values * float(global_scale)


def gated(activation: str, gate: float, up: float) -> float:
    """A gate and the value beside it, made one by either SwiGLU."""
    if activation == "swiglu":
        return gate * sigmoid(gate) * up
    gate, up = min(gate, 7.0), max(-7.0, min(up, 7.0))
    return gate * sigmoid(1.702 * gate) * (up + 1)


def activated(activation: str, z):
    """The activation of one row of the product."""
    if activation == "none":
        return z
    return np.array([gated(activation, z[j], z[j + 1]) for j in range(0, len(z), 2)])


def moe_gemm(
    problem: Problem, a, w, offsets, order, w_scale=None, w_global_scale=None, bias=None,
    a_scale=None, position=None, gates=None, residual=None,
):  # fmt: skip
    """Row by row: the row's expert, its row of A, products, bias and activation; then the sums."""
    n, k, top_k = problem["N"], problem["K"], problem["top_k"]
    cols = n if problem["activation"] == "none" else n // 2
    y = np.zeros((problem["tokens"] * top_k, cols))
    for expert in range(problem["experts"]):
        rows = range(int(offsets[expert]), int(offsets[expert + 1]))
        if not rows:
            continue
        stored = [array if array is None else array[expert] for array in (w_scale, w_global_scale)]
        weights = expert_weights(problem.values, n, k, w[expert], *stored)
        for row in rows:
            source = int(order[row]) // top_k if problem["gather"] else row
            x = a[source].astype("float64")
            if a_scale is not None:
                x *= [a_scale[col // 128, source] for col in range(k)]
            z = (weights * x).sum(axis=1)
            y[row] = activated(problem["activation"], z if bias is None else z + bias[expert])
    return {"d": weighted_sums(y, position, gates, residual) if problem["combine"] else y}


def weighted_sums(y, position, gates, residual=None):
    """For each token the sum of gates times rows (tokens * top_k, columns), plus the residual."""
    d = np.zeros((len(position), y.shape[1])) if residual is None else residual.astype("float64")
    for token, slot in np.ndindex(position.shape):
        if position[token, slot] >= 0:
            d[token] += gates[token, slot] * y[position[token, slot]]
    return d

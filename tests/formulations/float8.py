"""The entries in float8 with block scales, block by block and element by element."""

from __future__ import annotations

import math

import numpy as np

from formulations.products import product, swiglu
from kernelcat import dtypes
from kernelcat.catalog.spec import Problem

FP8 = "float8_e4m3fn"

E4M3 = np.array(
    [fraction / 8 * 2.0**-6 for fraction in range(8)]
    + [(1 + fraction / 8) * 2.0 ** (power - 7) for power in range(1, 16) for fraction in range(8)]
)[:-1]
"""Values of the codes 0x00 to 0x7E."""


def e4m3(value: float) -> int:
    """The code nearest to ``value``; the even one of two that are equally near."""
    size = min(abs(value), E4M3[-1])
    distance = np.abs(E4M3 - size)
    nearest = np.flatnonzero(distance == distance.min())
    code = next((c for c in nearest if c % 2 == 0), nearest[0])
    return int(code) | (0x80 if math.copysign(1, value) < 0 else 0)


def fp8_gemm(problem: Problem, a, a_scale, b, b_scale):
    """Every column of A and of B is multiplied by the scales of its blocks, in float64."""
    a, b = a.astype("float64"), b.astype("float64")
    for k in range(problem["K"]):
        a[:, k] *= a_scale[k // 128]
        b[:, k] *= [b_scale[row // 128, k // 128] for row in range(problem["N"])]
    return {"d": product(a, b)}


def fp8_quantize(problem: Problem, x):
    """Block by block, element by element."""
    m, k, rows = problem["M"], problem["K"], 1 if problem["block"] == "1x128" else 128
    q = np.empty((m, k), "uint8")
    scale = np.empty((math.ceil(m / rows), math.ceil(k / 128)), "float32")
    for i, j in np.ndindex(scale.shape):
        block = slice(rows * i, rows * (i + 1)), slice(128 * j, 128 * (j + 1))
        amax = np.float32(max(np.abs(x[block]).max(), 1e-10))
        scale[i, j] = amax / np.float32(448)
        scaled = x[block] * (np.float32(448) / amax)
        q[block] = np.reshape([e4m3(float(value)) for value in scaled.flat], scaled.shape)
    return {
        "q": dtypes.decode(q, FP8),
        "scale": scale.T if problem["block"] == "1x128" else scale,
    }


def fp8_swiglu(problem: Problem, x):
    """Block by block, in float64."""
    y = swiglu(x.astype("float64"))
    q = np.empty(y.shape, "uint8")
    scale = np.empty((math.ceil(y.shape[1] / 128), problem["M"]))
    for j, row in np.ndindex(scale.shape):
        block = row, slice(128 * j, 128 * (j + 1))
        amax = max(np.abs(y[block]).max(), 1e-10)
        scale[j, row] = amax / 448
        q[block] = [e4m3(value) for value in y[block] * 448 / amax]
    return {"q": dtypes.decode(q, FP8), "scale": scale}

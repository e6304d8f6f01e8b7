"""`gemm` and `multicast_gemm` as sums of outer products in float64."""

from __future__ import annotations

import math

import numpy as np

from kernelcat.catalog.spec import Problem


def product(a, b):
    """A @ B^T (M, N) in float64, as a sum of outer products over k; a (M, K), b (N, K)."""
    d = np.zeros((len(a), len(b)))
    for k in range(a.shape[1]):
        d += np.outer(a[:, k].astype("float64"), b[:, k].astype("float64"))
    return d


def sigmoid(x):
    """1 / (1 + exp(-x)) of x of any shape, without overflow."""
    return np.exp(-np.logaddexp(0, -x))


def gelu(x):
    """The exact form, of x of any shape."""
    return x * 0.5 * (1 + np.vectorize(math.erf, otypes=["float64"])(x / math.sqrt(2)))


def swiglu(z):
    """(M, N / 2) of z (M, N): even columns are gates, odd ones the values that they gate."""
    out = np.empty((z.shape[0], z.shape[1] // 2))
    for j in range(out.shape[1]):
        out[:, j] = z[:, 2 * j] * sigmoid(z[:, 2 * j]) * z[:, 2 * j + 1]
    return out


ACTIVATIONS = {
    "none": lambda z: z,
    "silu": lambda z: z * sigmoid(z),
    "gelu": gelu,
    "swiglu": swiglu,
}


def gemm(problem: Problem, a, b, bias=0.0, residual=0.0):
    """The sum of outer products, then bias, activation and residual."""
    z = product(a, b) + bias
    return {"d": ACTIVATIONS[problem["activation"]](z) + residual}


def multicast_gemm(problem: Problem, a, b):
    """The sum of outer products."""
    return {"d": product(a, b)}

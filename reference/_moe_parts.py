"""`moe_mlp` as problems of `moe_route`, `moe_gemm` and `fp8_quantize`, and how names correspond.

The router's outputs and the products' operands have other names in `moe_mlp`: ``ids`` and ``gates``
of the router, ``h`` between the products, and ``out``, where the second product sums its rows. With
float8 activations ``x_fp8`` and ``h_fp8`` are multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import ceil

from kernelcat import dtypes
from kernelcat.catalog.spec import Problem
from kernelcat.reference import moe_gemm
from kernelcat.reference._experts import FP8
from kernelcat.reference._fp8 import BLOCK
from kernelcat.reference.moe_route import routed

ROUTER_AXES = (
    "score", "renormalize", "groups", "top_groups", "correction", "scaling", "skew",
)  # fmt: skip
PRODUCT_AXES = ("dtype", "format", "act_dtype", "packing", "bias", "skew")
ROUTER_NAMES = {"expert_ids": "ids", "weights": "gates"}
"""Name in `moe_route` -> name in `moe_mlp`."""


def num_assignments(problem: Problem) -> int:
    """Rows of h: experts of all tokens."""
    return int(problem["tokens"] * problem["top_k"])


def is_empty(problem: Problem) -> bool:
    """Whether the output has no elements."""
    return problem["tokens"] * problem["hidden"] == 0


@lru_cache(64)  # limits, estimates and programs ask for the parts of one problem
def router(problem: Problem) -> Problem:
    """The selection of experts."""
    axes = {axis: problem[axis] for axis in ROUTER_AXES}
    sizes = (problem[axis] for axis in ("tokens", "experts", "top_k"))
    return routed(*sizes, dtype=problem["logit_dtype"], **axes)


@lru_cache(64)
def products(problem: Problem) -> tuple[Problem, Problem]:
    """Both products; the second one sums its rows into tokens."""
    tokens, top_k, experts, hidden, inter = (
        problem[axis] for axis in ("tokens", "top_k", "experts", "hidden", "inter")
    )
    axes = {axis: problem[axis] for axis in PRODUCT_AXES}
    first = moe_gemm.product(
        tokens, top_k, experts, 2 * inter, hidden, gather=True, activation=problem["activation"],
        **axes,
    )  # fmt: skip
    second = moe_gemm.product(
        tokens, top_k, experts, hidden, inter, combine=True, residual=problem["residual"], **axes
    )
    return first, second


@lru_cache(64)
def quantizations(problem: Problem) -> tuple[tuple[Problem, str], ...]:
    """Those of x and of h, each with its tensor's name; none for activations in 16 bits."""
    if problem["act_dtype"] != FP8:
        return ()
    sizes = {
        "x": (problem["tokens"], problem["hidden"]),
        "h": (num_assignments(problem), problem["inter"]),
    }
    return tuple(
        (Problem.of("fp8_quantize", M=m, K=k, block="1x128", dtype=problem["dtype"]), name)
        for name, (m, k) in sizes.items()
    )


def quantization_names(name: str) -> Mapping[str, str]:
    """Name in `fp8_quantize` -> name in `moe_mlp`, of the quantization of tensor ``name``."""
    return {"x": name, "q": f"{name}_fp8", "scale": f"{name}_scale"}


def product_names(problem: Problem, number: int) -> Mapping[str, str]:
    """Name in `moe_gemm` -> name in `moe_mlp`, of the product with this number, 1 or 2.

    ``a_prepared`` is a workspace in which some kernels put activations before they multiply them.
    """
    return _product_names(number, problem["act_dtype"] == FP8)


@lru_cache
def _product_names(number: int, is_fp8: bool) -> Mapping[str, str]:
    a, d = ("x", "h") if number == 1 else ("h", "out")
    multiplied = f"{a}_fp8" if is_fp8 else a
    weights = {name: f"{name[0]}{number}{name[1:]}" for name in ("w", "w_scale", "w_global_scale")}
    return {
        **weights, "bias": f"bias{number}", "a": multiplied, "a_scale": f"{a}_scale",
        "a_prepared": f"{a}_prepared", "d": d,
    }  # fmt: skip


def workspaces(problem: Problem) -> dict[str, int]:
    """Bytes of what the launches pass to each other.

    ``load`` is an output that nobody asked for.
    """
    rows, experts, inter = num_assignments(problem), problem["experts"], problem["inter"]
    size = int(dtypes.itemsize(problem["dtype"]))
    is_fp8, tokens, hidden = problem["act_dtype"] == FP8, problem["tokens"], problem["hidden"]
    return {
        "ids": 4 * rows, "gates": 4 * rows, "counts": 4 * experts, "offsets": 4 * (experts + 1),
        "order": 4 * rows, "position": 4 * rows, "load": 0,
        "h": rows * inter * size,
        "x_fp8": tokens * hidden * is_fp8,
        "x_scale": 4 * ceil(hidden / BLOCK) * tokens * is_fp8,
        "h_fp8": rows * inter * is_fp8,
        "h_scale": 4 * ceil(inter / BLOCK) * rows * is_fp8,
    }  # fmt: skip

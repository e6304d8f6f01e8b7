"""`moe_gemm`'s CuTe kernels on the host (``cute_host``): cases in, verdicts out, as JSON."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
from cute_host import Pointer, Tensor, here, on

from kernelcat import catalog, dtypes
from kernelcat.kernels.cute.moe_gemm import CONSTANTS, naive
from kernelcat.verify import gate

ENTRY = catalog.entry("moe_gemm")
HOST = SimpleNamespace(xp=np, synchronize=lambda: None)


def memory(problem: Any, arrays: Any, name: str, element: str = "") -> np.ndarray:
    """The memory of a tensor; 16-bit elements are decoded."""
    array = arrays.get(name, np.zeros(0, "float32"))
    return dtypes.decode(array, element) if element in ("bfloat16", "float16") else array


def run_naive(problem: Any, arrays: Any, d: np.ndarray) -> None:
    """Every element by its own thread."""
    tokens, top_k, experts, n, k = (
        problem[axis] for axis in ("tokens", "top_k", "experts", "N", "K")
    )
    constants = {axis: problem[axis] for axis in CONSTANTS}
    kernel = naive.Naive(**constants, in_tiles=problem["packing"] == "tiles")
    kernel.dtype = dtype = problem["dtype"]
    rows, blocks = tokens * top_k, -(-k // 128)
    a_rows = tokens if problem["gather"] else rows
    slots, matrix = ((tokens, top_k), (top_k, 1)), (d.shape, (d.shape[1], 1))

    def tensor(name: str, element: str, shape: Any = None, stride: Any = None) -> Tensor:
        array = memory(problem, arrays, name, element)
        return on(array, array.size if shape is None else shape, stride)

    tensors = (
        tensor("a", problem["act_dtype"], (a_rows, k), (k, 1)),
        tensor("a_scale", "float32", (a_rows, blocks), (1, a_rows)),
        tensor("w", problem["format"]),
        tensor("w_scale", "stored"),
        tensor("w_global_scale", "float32", experts),
        tensor("bias", dtype, (experts, n), (n, 1)),
        tensor("offsets", "int32", experts + 1),
        tensor("order", "int32", rows),
        tensor("position", "int32", *slots),
        tensor("gates", "float32", *slots),
        tensor("residual", dtype, *matrix),
        Tensor(Pointer(d.reshape(-1)), *matrix),
    )
    for row, col in np.ndindex(-(-d.shape[0] // 16) * 16, -(-d.shape[1] // 16) * 16):
        here.thread, here.block = (col % 16, row % 16, 0), (col // 16, row // 16, 0)
        kernel.kernel(*tensors, n)


def judge(axes: dict[str, Any]) -> list[Any]:
    problem = ENTRY.problem(**axes)
    assert ENTRY.constraint(problem) is None
    prepared = gate.prepare(ENTRY, problem, HOST, 3)
    d = np.full(prepared.arrays["d"].shape, np.nan, "float32")
    run_naive(problem, prepared.arrays, d)

    def write(arrays: Any) -> Any:
        return lambda: arrays["d"].__setitem__(..., dtypes.encode(d, problem["dtype"]))

    verdict = prepared.verify(write)
    return [verdict.passed, verdict.detail, verdict.max_error]


print(json.dumps({name: judge(axes) for name, axes in json.load(sys.stdin).items()}))

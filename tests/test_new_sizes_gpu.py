"""Host time of first calls of new sizes, whose kernels are loaded, on a GPU.

Arrays hold zeros: sequences are empty and experts serve nobody, so kernels end at once and no call
waits for the launch queue.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from sized_calls import LAYERS, problem_of

import kernelcat
from kernelcat import catalog
from kernelcat.call import registry
from kernelcat.call.torch_operators import keyword_axes
from kernelcat.catalog.axes import Axis
from kernelcat.catalog.spec import Problem
from kernelcat.runtime import code

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning"),
]

DEVICE = "cuda"
LIMIT_US, PROGRAM_LIMIT_US = 1500.0, 4000.0
"""Twice the medians of an H200's host, of a kernel and of a program of many: more means that a size
is searched or compiled anew. The aim is 100 us; docs/measured.md has the times."""
SIZES = range(65, 200)


def calls_of(layer: str) -> Callable[[int], tuple[Problem, tuple[Any, ...], dict[str, Any]]]:
    """From a batch size to a problem, arrays of zeros and keywords; weights are shared by sizes."""
    entry = catalog.entry(LAYERS[layer][0])
    weights: dict[str, Any] = {}
    two = problem_of(layer, 1), problem_of(layer, 2)

    def zeros(tensor: Any, problem: Problem) -> Any:
        element, shape = getattr(torch, tensor.dtype_of(problem)), tensor.shape_of(problem)
        num_bytes = math.prod(shape) * element.itemsize
        return torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE).view(element).view(shape)

    def array(tensor: Any, problem: Problem) -> Any:
        if not tensor.present(problem):
            return None
        if tensor.shape_of(two[0]) != tensor.shape_of(two[1]):
            return zeros(tensor, problem)
        if tensor.name not in weights:
            weights[tensor.name] = zeros(tensor, problem)
        return weights[tensor.name]

    def call(batch: int) -> tuple[Problem, tuple[Any, ...], dict[str, Any]]:
        problem = problem_of(layer, batch)
        named = {axis.name: problem[axis.name] for axis in keyword_axes(entry)}
        if entry.updated:
            outs = tuple(array(tensor, problem) for tensor in entry.outputs)
            named["out"] = outs if len(outs) > 1 else outs[0]
        return problem, tuple(array(tensor, problem) for tensor in entry.inputs), named

    return call


@pytest.mark.parametrize("layer", LAYERS)
def test_a_first_call_of_a_new_size_takes_little_host_time(layer: str) -> None:
    registry.reload()
    op, make = kernelcat.get(LAYERS[layer][0]), calls_of(layer)
    for batch in (*SIZES[7::8], *SIZES[6::8]):  # representatives, and a size before each
        _, inputs, named = make(batch)
        op(*inputs, **named)
    chosen = {Axis.round_up(batch) for batch in SIZES[7::8]}
    shared_us: list[float] = []
    for batch in SIZES:
        _, inputs, named = make(batch)
        loaded = len(code._of_sources)
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        op(*inputs, **named)
        us = (time.perf_counter_ns() - start) / 1000
        is_new = batch not in SIZES[7::8] and batch not in SIZES[6::8]
        if is_new and len(code._of_sources) == loaded and Axis.round_up(batch) in chosen:
            shared_us.append(us)
    torch.cuda.synchronize()
    assert len(shared_us) > 20
    lower, median, upper = statistics.quantiles(shared_us, n=4)
    print(f"\nfirst call of a new size: {layer:14} {lower:6.1f} {median:6.1f} {upper:6.1f} us "
          f"({len(shared_us)} sizes; quartiles)")  # fmt: skip
    assert median < (PROGRAM_LIMIT_US if layer == "moe_mlp" else LIMIT_US)
    registry.reload()

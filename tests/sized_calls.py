"""Calls of one layer with ever new batch sizes, on a machine whose H200 does nothing.

CPU tensors are described as tensors on ``cuda:0`` and hold no data; drivers record nothing; a
compiler is replaced by a counter, and everything between a call and the driver is the real code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from host_machine import HostTorch

from kernelcat import catalog
from kernelcat.bounded import Bounded
from kernelcat.call import arrays, evidence, fast_path, operator, registry
from kernelcat.call.torch_operators import keyword_axes
from kernelcat.catalog.spec import Problem
from kernelcat.jit import Artifact, cache, cute
from kernelcat.jit.cuda import CudaSource
from kernelcat.jit.cute import CuteSource
from kernelcat.runtime import code, driver, gpu


def with_pages(problem: Problem, batch: int) -> dict[str, Any]:
    """Axes of attention over ``batch`` sequences, each of as many pages as in ``problem``."""
    queries = problem["tokens"] // max(problem["batch"], 1)
    pages = max(1, problem["pages"] * batch // max(problem["batch"], 1))
    return {"batch": batch, "tokens": batch * queries, "pages": pages}


LAYERS: dict[str, tuple[str, str, Callable[[Problem, int], dict[str, Any]]]] = {
    "gemm": ("gemm", "64x5120x2880", lambda p, n: {"M": n}),
    "fp8_gemm": ("fp8_gemm", "64x7168x16384", lambda p, n: {"M": n}),
    "nvfp4_matmul": ("nvfp4_matmul", "64x5760x2880", lambda p, n: {"M": n}),
    "paged_attn": ("paged_attn", "decode-64x1024-64/8x64-p16", with_pages),
    "flashmla": ("flashmla", "64x1-128-1024", with_pages),
    "moe_mlp": ("moe_mlp", "gptoss-64-mxfp4", lambda p, n: {"tokens": n}),
    "moe_gemm": ("moe_gemm", "gptoss-up-64-mxfp4", lambda p, n: {"tokens": n}),
    "moe_route": ("moe_route", "gpt-oss-20b-64", lambda p, n: {"tokens": n}),
    "qkv_rope_write": ("qkv_rope_write", "gptoss-64", with_pages),
    "out_router": ("out_router", "gptoss-64", lambda p, n: {"tokens": n}),
    "rms_norm": ("rms_norm", "gpt-oss-64", lambda p, n: {"M": n}),
    "lm_head": ("lm_head", "64x201088x2880", lambda p, n: {"tokens": n}),
    "sample": ("sample", "filtered-64x201088", lambda p, n: {"rows": n}),
}
"""Name -> entry, named problem, and the axes that another batch size changes."""


def problem_of(layer: str, batch: int) -> Problem:
    """The problem of a layer at this batch size."""
    name, base, change = LAYERS[layer]
    entry = catalog.entry(name)
    problem = entry.named(base)
    return entry.problem(**{**problem.values, **change(problem, batch)})


def arguments(problem: Problem) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call with ``problem``: arrays without data, and keywords."""
    entry = catalog.entry(problem.entry)

    def array(tensor: Any) -> Any:
        if not tensor.present(problem):
            return None
        element = getattr(torch, tensor.dtype_of(problem))
        return torch.empty(tensor.span_of(problem), dtype=element).as_strided(
            tensor.shape_of(problem), tensor.strides_of(problem)
        )

    named = {axis.name: problem[axis.name] for axis in keyword_axes(entry)}
    if entry.updated:
        outs = tuple(map(array, entry.outputs))
        named["out"] = outs if len(outs) > 1 else outs[0]
    return tuple(map(array, entry.inputs)), named


class Driver:
    """Stands in for libcuda: every function succeeds and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0


class CuteRuntime:
    """Stands in for the CuTe DSL's C runtime: every function succeeds and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0


@dataclass
class Machine:
    """What has been compiled, and which launches were prepared."""

    compiled: list[tuple[str, str]] = field(default_factory=list)


def artifact(source: Any, arch: str) -> Artifact:
    """An artifact of ``source`` whose code is no code, with what the launcher reads of it."""
    code = source.digest().encode()
    metadata: dict[str, Any] = {"params": getattr(source, "params", ())}
    if source.language == "triton":
        metadata |= {"num_warps": 4, "shared_bytes": 0, "hidden_params": ["null", "null"]}
    return Artifact(source.language, arch, "kernel", code, code, metadata)


@contextmanager
def machine(patch: pytest.MonkeyPatch, folder: Any) -> Iterator[Machine]:
    """torch on a machine with an H200 that does nothing; compiled kernels go to ``folder``."""
    from kernelcat.jit.triton import TritonSource

    found = Machine()

    def compile(source: Any, arch: str) -> Artifact:
        found.compiled.append((source.place(), source.digest()))
        return artifact(source, arch)

    for kind in (CudaSource, TritonSource, CuteSource):
        patch.setattr(kind, "compile", compile)
    tensors, opened = HostTorch(), driver.Driver(Driver())
    patch.setenv("KERNELCAT_CACHE", str(folder))
    patch.setattr(cache, "_memory", Bounded(256))
    patch.setattr(arrays, "torch", lambda: tensors)
    patch.setattr(HostTorch, "allocator", arrays_without_data)
    patch.setattr(driver, "opened", lambda: opened)
    patch.setattr(cute, "_runtime", CuteRuntime)
    patch.setattr(code, "_functions", Bounded(1024))
    patch.setattr(code, "_of_sources", Bounded(1024))
    patch.setattr(code, "_host_functions", Bounded(64))
    patch.setattr(operator, "_gpu", lambda index: gpu.SKUS["h200"])
    patch.setattr(registry, "_ops", {})
    patch.setattr(operator, "_scans", {})
    patch.setattr(fast_path, "_missed", Bounded(4096))
    evidence.snapshot.cache_clear()
    yield found
    evidence.snapshot.cache_clear()


def arrays_without_data(self: Any, shape: tuple[int, ...], dtype: str, device: int) -> Any:
    element = getattr(torch, dtype)
    return lambda: torch.empty(shape, dtype=element)

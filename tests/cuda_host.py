"""The source of CUDA kernels runs on the host, compiled by g++: a device for the gate.

`tests/host_include` has the parts of CUDA and the headers of `kernels/cuda/include/kernelcat` that
are made of inline PTX, written for the host. They cover what `moe_route` uses. A wrong index, a
wrong count or a barrier that not all threads reach fails here; a race does not. This replaces no
receipt.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import host_build
import numpy as np

from kernelcat.catalog import source
from kernelcat.catalog.implementation import (
    Config,
    Float32,
    Implementation,
    Int32,
    Int64,
    Param,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.runtime import gpu

INCLUDE = Path(__file__).parent / "host_include"
OPTIONS = (*host_build.OPTIONS, "-pthread", "-ffp-contract=off")
REPLACEMENTS = (
    (r"extern __shared__ (\w+) (\w+)\[\];",
     r"\1* \2 = reinterpret_cast<\1*>(host::dynamic_shared);"),
    (r'asm\("ex2\.approx\.ftz\.f32 %0, %1;" : "=f"\(result\) : "f"\(x\)\);', "result = exp2f(x);"),
    (r'asm\("lg2\.approx\.ftz\.f32 %0, %1;" : "=f"\(result\) : "f"\(x\)\);', "result = log2f(x);"),
)  # fmt: skip
"""What is not C++, as a pattern and what takes its place."""
MAIN = """#include "cuda_host.h"
#include "{file}"
extern "C" void run(void** args, int x, int y, int z, int threads, int shared_bytes, int cluster) {{
  host::launch(&{kernel}, args, x, y, z, threads, shared_bytes, cluster);
}}
"""
VALUES: dict[type, Callable[[Any], Any]] = {
    Int32: ctypes.c_int32,
    Int64: ctypes.c_int64,
    Float32: ctypes.c_float,
}


class HostCuda:
    """A device as the gate takes it."""

    xp = np

    def __init__(self) -> None:
        self.gpu = gpu.find("h200")
        self._build = cache(library)

    def synchronize(self) -> None:
        """Launches have ended when they return."""

    def load(self, implementation: Implementation, problem: Problem, config: Config) -> Any:
        """``bind(arrays) -> run``; each bind has workspaces of its own, which runs share."""
        program = implementation.program(problem, config, self.gpu)
        kernels = [self._build(step.source).run for step in program.steps]

        def bind(arrays: Mapping[str, Any]) -> Callable[[], None]:
            memory = {**_workspaces(program), **arrays}

            def run() -> None:
                for step, kernel in zip(program.steps, kernels, strict=True):
                    _launch(kernel, step, memory)

            return run

        return bind


def library(kernel: CudaSource) -> ctypes.CDLL:
    """A library made from one instance of a kernel; its function ``run`` launches it."""
    folder = host_build.folder("cuda_host", Path(__file__), INCLUDE)
    header = host_build.precompiled(INCLUDE / "cuda_host.h", folder, OPTIONS)
    path = host_build.once(
        folder / f"{kernel.digest()}.so", lambda path: _build(kernel, header.parent, path)
    )
    return ctypes.CDLL(str(path))


def _build(kernel: CudaSource, headers: Path, library: Path) -> None:
    root = library.parent
    for path in kernel.files():
        copy = root / path.relative_to(source.cuda_root())
        text = path.read_text()
        for pattern, replacement in REPLACEMENTS:
            text = re.sub(pattern, replacement, text)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)
    main = root / "main.cpp"
    main.write_text(MAIN.format(file=kernel.path, kernel=kernel.kernel))
    folders = (headers, INCLUDE, root, root / "include")  # the host's headers come first
    includes = [f"-I{folder}" for folder in folders]
    host_build.compile([*OPTIONS, *includes, str(main), "-o", str(library)])


def _workspaces(program: Program) -> dict[str, Any]:
    """Zeros, or None for a workspace of 0 bytes."""
    return {n: np.zeros(size, "uint8") if size else None for n, size in program.workspaces.items()}


def _launch(kernel: Any, step: Step, memory: Mapping[str, Any]) -> None:
    values = [_value(param, memory) for param in step.params]
    addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    if math.prod(step.grid):
        kernel(addresses, *step.grid, step.block, step.shared_bytes, step.cluster[0])


def _value(param: Param, memory: Mapping[str, Any]) -> Any:
    """A parameter as C passes it; the address of a tensor or workspace, null for an absent one."""
    if isinstance(param, Pointer):
        array = memory.get(param.tensor)
        return ctypes.c_void_p(None if array is None else array.ctypes.data)
    return VALUES[type(param)](param.value)

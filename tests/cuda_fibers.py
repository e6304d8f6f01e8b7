"""CUDA C++ kernels on the CPU: the source of a kernel, compiled by g++ with stand-ins for CUDA.

The headers in tests/cuda_fibers_include replace those that hold PTX. The threads of the thread
blocks of a cluster are fibers; clusters run one after the other, but for those of `AT_ONCE`, so
other kernels whose clusters wait for each other cannot run. What is tested: indices, roles of
warps, counts and phases of barriers, and the order of loads, products and releases. What is not:
proxies, memory order, and instructions themselves.
"""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import host_build
import numpy as np
import pytest

from kernelcat import dtypes
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
    TensorMap,
)
from kernelcat.catalog.spec import Arrays, Problem
from kernelcat.jit.cuda import CudaSource, header_folders
from kernelcat.runtime import gpu

STAND_INS = Path(__file__).parent / "cuda_fibers_include"
COMPILER = host_build.COMPILER
OPTIONS = (*host_build.OPTIONS, "-fno-strict-aliasing")


@cache
def _folder() -> Path:
    versions = (folder / "cuda_runtime_api.h" for folder in header_folders())
    return host_build.folder("cuda_fibers", Path(__file__), STAND_INS, *versions)


@cache
def _host_header() -> Path:
    """host.h, compiled, as each kernel needs it."""
    folders = [f"-I{folder}" for folder in header_folders()]
    return host_build.precompiled(STAND_INS / "host.h", _folder(), [*OPTIONS, *folders])


def library(kernel: CudaSource) -> ctypes.CDLL:
    """The kernel as a library with one function, ``run``, which returns an error or no text."""
    path = host_build.once(_folder() / f"{kernel.digest()}.so", lambda path: _build(kernel, path))
    run_kernel = ctypes.CDLL(str(path))
    run_kernel.run.restype = ctypes.c_char_p
    return run_kernel


def _build(kernel: CudaSource, path: Path) -> None:
    text = f"""#include "{kernel.file}"
extern "C" const char* run(void** params, const unsigned* grid, unsigned threads, unsigned seed,
                           unsigned cluster) {{
  gridDim = dim3(grid[0], grid[1], grid[2]);
  blockDim = dim3(threads, 1, 1);
  host::random_state = seed;
  return host::run_kernel(&{kernel.kernel}, params, cluster);
}}
"""
    path.with_suffix(".cpp").write_text(text)
    files = [str(path.with_suffix(".cpp")), "-o", str(path)]
    host_build.compile([*_options(kernel.file.parent), *files])


def _options(folder: Path) -> list[str]:
    """Options of the compiler for a kernel in ``folder``."""
    folders = (STAND_INS, source.cuda_root() / "include", folder, *header_folders())
    includes = [f"-I{folder}" for folder in folders]
    return [*OPTIONS, "-include", str(_host_header()), *includes]


def check_syntax(text: str, folder: Path) -> None:
    """Raises what the compiler says of ``text``, which includes files of kernels/cuda."""
    path = folder / "text.cpp"
    path.write_text(text)
    host_build.compile([*_options(source.cuda_root()), "-fsyntax-only", str(path)])


MARGIN_BYTES = 1 << 24
"""Before and after a workspace: a planted fault that writes outside must not end the process."""

AT_ONCE = "kernelcat::moe_dispatch<"
"""How the name of a kernel begins whose thread blocks all wait for each other."""


def plant(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, before: str, after: str
) -> None:
    """Have kernels compiled from a copy of kernels/cuda in ``folder``.

    In its file ``name`` the text ``before`` is replaced by ``after``.
    """
    shutil.copytree(source.cuda_root(), folder / "cuda")
    path = folder / "cuda" / name
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    monkeypatch.setattr(source, "cuda_root", lambda: folder / "cuda")


def run(program: Program, arrays: Arrays, max_blocks: int, seed: int) -> Arrays:
    """Run ``program`` on storage arrays by tensor name, in place. Workspaces start as zeros.

    Grids of persistent kernels (as large as the GPU) are cut down to ``max_blocks``, in whole
    clusters. Returns the workspaces as the program leaves them.
    """
    memory: dict[str, np.ndarray[Any, Any]] = dict(arrays)
    for name, size in program.workspaces.items():
        memory[name] = np.zeros(size + 2 * MARGIN_BYTES, "uint8")[MARGIN_BYTES:][: size + 1024]
    for step in program.steps:
        assert isinstance(step.source, CudaSource)
        params = [_param(param, memory) for param in step.params]
        pointers = (ctypes.c_void_p * len(params))(*map(ctypes.addressof, params))
        grid = (ctypes.c_uint * 3)(*_grid(step, max_blocks))
        at_once = step.source.kernel.startswith(AT_ONCE)
        cluster = step.grid[0] if at_once else step.cluster[0]
        error = library(step.source).run(pointers, grid, step.block, seed, cluster).decode()
        assert not error, f"{error}: {step.source.kernel}"
    return {name: memory[name] for name in program.workspaces}


def _grid(step: Step, max_blocks: int) -> tuple[int, int, int]:
    is_persistent = step.shared_bytes > 0
    whole = ceil(max_blocks / step.cluster[0]) * step.cluster[0]
    return (min(step.grid[0], whole), 1, 1) if is_persistent else step.grid


def _param(param: Param, memory: Arrays) -> Any:
    """The parameter as it is passed, in memory."""
    if isinstance(param, Pointer):
        return ctypes.c_void_p(_address(memory.get(param.tensor)))
    if isinstance(param, Int32):
        return ctypes.c_int32(param.value)
    if isinstance(param, Float32):
        return ctypes.c_float(param.value)
    if isinstance(param, Int64):
        return ctypes.c_int64(param.value)
    assert isinstance(param, TensorMap)
    size = dtypes.itemsize(param.dtype)
    fields = (*param.shape, *param.strides, *param.box, size, param.swizzle)
    return (ctypes.c_int64 * 8)(_address(memory[param.tensor]), *fields)


def _address(array: Any) -> int | None:
    return None if array is None else int(array.__array_interface__["data"][0])


class Host:
    """A device of the gate (`kernelcat.verify.gate`) that runs CUDA C++ on the CPU.

    With ``sms``, programs are made for an H200 with so few SMs. ``workspaces`` are those of the
    last launch.
    """

    def __init__(self, max_blocks: int = 3, seed: int = 1, sms: int | None = None) -> None:
        self.xp: Any = np
        h200 = gpu.find("h200")
        self.gpu = replace(h200, sms=sms or h200.sms)
        self.max_blocks, self.seed = max_blocks, seed
        self.workspaces: Arrays = {}  # of the last launch

    def load(self, implementation: Implementation, problem: Problem, config: Config) -> Any:
        program = implementation.program(problem, config, self.gpu)

        def launch(arrays: Arrays) -> None:
            self.workspaces = run(program, arrays, self.max_blocks, self.seed)

        return lambda arrays: lambda: launch(arrays)

    def synchronize(self) -> None:
        pass

"""CUDA C++ kernels on the CPU: the source of a kernel, compiled by g++ with stand-ins for CUDA.

The headers in tests/cuda_fibers_include replace those that hold PTX. The threads of a thread block
are fibers; thread blocks run one after the other, so kernels whose thread blocks wait for each
other cannot run. What is tested: indices, roles of warps, counts and phases of barriers, and the
order of loads, products and releases. What is not: proxies, memory order, and instructions
themselves.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

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
COMPILER = shutil.which("g++")
OPTIONS = ("-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-fno-strict-aliasing",
           "-fno-gnu-unique")  # fmt: skip  # libraries of one process share no variables


@cache
def _folder() -> Path:
    """Where libraries stay between runs of pytest, until the compiler or this device changes."""
    version = subprocess.run([str(COMPILER), "--version"], capture_output=True, check=True).stdout
    files = [Path(__file__), *sorted(path for path in STAND_INS.rglob("*") if path.is_file())]
    parts = [version, str(header_folders()).encode(), *(path.read_bytes() for path in files)]
    name = hashlib.sha256(b"".join(parts)).hexdigest()[:16]
    folder = Path(__file__).parents[1] / ".pytest_cache" / "cuda_fibers" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _once(target: Path, make: Callable[[Path], object]) -> Path:
    """``target``; where it is missing, ``make(path)`` writes it at a temporary path.

    Processes that make one file at the same time do not disturb each other.
    """
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            temporary = Path(folder) / target.name
            make(temporary)
            temporary.replace(target)
    return target


@cache
def _host_header() -> Path:
    """A copy of host.h, beside which g++ finds the header compiled, as each kernel needs it."""
    header = _once(_folder() / "host.h", lambda path: shutil.copy(STAND_INS / "host.h", path))
    folders = [f"-I{folder}" for folder in header_folders()]
    options = [option for option in OPTIONS if option != "-shared"]
    command = [*options, "-x", "c++-header", *folders, str(header), "-o"]
    _once(header.with_suffix(".h.gch"), lambda path: _compile([*command, str(path)]))
    return header


def _compile(arguments: Iterable[str]) -> None:
    built = subprocess.run([str(COMPILER), *arguments], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr


def library(kernel: CudaSource) -> ctypes.CDLL:
    """The kernel as a library with one function, ``run``, which returns an error or no text."""
    path = _once(_folder() / f"{kernel.digest()}.so", lambda path: _build(kernel, path))
    run_kernel = ctypes.CDLL(str(path))
    run_kernel.run.restype = ctypes.c_char_p
    return run_kernel


def _build(kernel: CudaSource, path: Path) -> None:
    text = f"""#include "{kernel.file}"
extern "C" const char* run(void** params, const unsigned* grid, unsigned threads, unsigned seed) {{
  gridDim = dim3(grid[0], grid[1], grid[2]);
  blockDim = dim3(threads, 1, 1);
  host::random_state = seed;
  return host::run_kernel(&{kernel.kernel}, params);
}}
"""
    path.with_suffix(".cpp").write_text(text)
    folders = (STAND_INS, source.cuda_root() / "include", kernel.file.parent, *header_folders())
    includes = [f"-I{folder}" for folder in folders]
    files = [str(path.with_suffix(".cpp")), "-o", str(path)]
    _compile([*OPTIONS, "-include", str(_host_header()), *includes, *files])


def run(program: Program, arrays: Arrays, max_blocks: int, seed: int) -> None:
    """Run ``program`` on storage arrays by tensor name, in place. Workspaces start as zeros.

    Grids of persistent kernels (as large as the GPU) are cut down to ``max_blocks``.
    """
    memory: dict[str, np.ndarray[Any, Any]] = dict(arrays)
    for name, size in program.workspaces.items():
        memory[name] = np.zeros(size + 1024, "uint8")
    for step in program.steps:
        assert isinstance(step.source, CudaSource)
        params = [_param(param, memory) for param in step.params]
        pointers = (ctypes.c_void_p * len(params))(*map(ctypes.addressof, params))
        grid = (ctypes.c_uint * 3)(*_grid(step, max_blocks))
        error = library(step.source).run(pointers, grid, step.block, seed).decode()
        assert not error, f"{error}: {step.source.kernel}"


def _grid(step: Step, max_blocks: int) -> tuple[int, int, int]:
    is_persistent = step.shared_bytes > 0
    return (min(step.grid[0], max_blocks), 1, 1) if is_persistent else step.grid


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

    With ``sms``, programs are made for an H200 with so few SMs.
    """

    def __init__(self, max_blocks: int = 3, seed: int = 1, sms: int | None = None) -> None:
        self.xp: Any = np
        h200 = gpu.find("h200")
        self.gpu = replace(h200, sms=sms or h200.sms)
        self.max_blocks, self.seed = max_blocks, seed

    def load(self, implementation: Implementation, problem: Problem, config: Config) -> Any:
        program = implementation.program(problem, config, self.gpu)
        return lambda arrays: lambda: run(program, arrays, self.max_blocks, self.seed)

    def synchronize(self) -> None:
        pass

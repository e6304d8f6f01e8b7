"""CUDA kernels of `sample` and `lm_head`, compiled for the CPU (tests/cuda_host).

The source of a kernel runs as it is: a thread of the host for each thread of a thread block. A
wrong index, a wrong order of passes or a missing barrier shows; TMA, clusters of several thread
blocks and the memory model do not run here. These tests replace no receipt.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kernelcat import catalog
from kernelcat.catalog.implementation import Config, Float32, Int32, Int64, Pointer, Step
from kernelcat.catalog.spec import Problem
from kernelcat.runtime import gpu
from kernelcat.verify import gate

ROOT = Path(__file__).parents[1]
STANDINS = ROOT / "tests" / "cuda_host"
HEADERS = ("cluster", "mma", "pdl", "prefetch", "softmax", "sync")
"""Headers that consist of inline PTX."""
HOST = SimpleNamespace(xp=np, gpu=replace(gpu.find("h200"), sms=1), synchronize=lambda: None)
"""The GPU has one SM, so that thread blocks take several tiles."""
DYNAMIC = "extern __shared__ uint4 dynamic_shared[];"
HOST_DYNAMIC = "uint4* const dynamic_shared = reinterpret_cast<uint4*>(shared_memory);"
TYPES = {Pointer: "void*", Int32: "int", Int64: "long long", Float32: "float"}
VALUES = {Int32: ctypes.c_int, Int64: ctypes.c_longlong, Float32: ctypes.c_float}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


def build(step: Step, folder: Path):
    """The launch of ``step`` as a function of the values of its parameters."""
    include = folder / "include"
    (include / "kernelcat").mkdir(parents=True, exist_ok=True)
    for name in ("cuda_bf16.h", "cuda_fp16.h"):
        (include / name).write_text('#pragma once\n#include "intrinsics.h"\n')
    for name in HEADERS:
        (include / "kernelcat" / f"{name}.cuh").write_text('#pragma once\n#include "headers.h"\n')
    path = ROOT / "kernels" / "cuda" / step.source.path
    names = [f"p{i}" for i in range(len(step.params))]
    types = [TYPES[type(param)] for param in step.params]
    (folder / "host.cpp").write_text(
        path.read_text().replace(DYNAMIC, HOST_DYNAMIC)
        + f"""
struct Any {{  // converts to a pointer to any type
  void* pointer;
  template <typename T>
  operator T*() const {{ return static_cast<T*>(pointer); }}
}};
template <typename T>
auto passed(T value) {{
  if constexpr (std::is_pointer_v<T>) return Any{{value}}; else return value;
}}
extern "C" void run({", ".join(map(" ".join, zip(types, names, strict=True)))}) {{
  launch({{{step.grid[0]}, {step.grid[1]}, 1}}, {step.block},
         [=] {{ {step.source.kernel}({", ".join(f"passed({name})" for name in names)}); }});
}}
"""
    )
    folders = (include, STANDINS, ROOT / "kernels" / "cuda" / "include", path.parent)
    command = ["g++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-pthread", "-fpermissive",
               "-fno-gnu-unique"]  # fmt: skip  # libraries of one process share no variables
    command += [*(f"-I{f}" for f in folders), "-o", str(folder / "host.so"), "host.cpp"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "host.so")).run


def check(implementation, problem: Problem, config: Config, folder: Path) -> None:
    """Run the program twice, on poisoned outputs, and judge the results."""
    program = implementation.program(problem, config, HOST.gpu)
    spaces = {name: np.zeros(size, "uint8") for name, size in program.workspaces.items()}
    prepared = gate.prepare(catalog.entry(problem.entry), problem, HOST)

    def value(param):
        if not isinstance(param, Pointer):
            return VALUES[type(param)](param.value)
        array = spaces.get(param.tensor, prepared.arrays.get(param.tensor))
        return ctypes.c_void_p(None if array is None else array.ctypes.data)

    runs = []
    for number, step in enumerate(program.steps):
        (folder / str(number)).mkdir()
        runs.append((build(step, folder / str(number)), [value(p) for p in step.params]))

    def run() -> None:
        for function, values in runs:
            function(*values)

    for _ in range(2):
        verdict = prepared.verify_run(run)
        assert verdict.passed, verdict.detail
    for name in spaces.keys() & {"counter", "counters"}:
        assert not spaces[name].any()


@pytest.mark.parametrize(
    ("variant", "flags"),
    [
        ("naive", {"dtype": "float32", "has_temperature": True, "has_filters": True}),
        ("cluster", {"dtype": "float32"}),
        ("cluster", {"dtype": "bfloat16", "has_temperature": True, "has_logprobs": True}),
        ("cluster", {"dtype": "bfloat16", "has_temperature": True, "has_filters": True}),
        (
            "cluster",
            {
                "dtype": "float16",
                "has_temperature": True,
                "has_filters": True,
                "has_penalty": True,
            },
        ),
    ],
)
def test_sample(variant: str, flags: dict, tmp_path: Path) -> None:
    implementation = catalog.implementation("sample", "cuda", variant)
    rows = 1 if variant == "naive" else 5  # a thread block of naive is many threads of the host
    problem = catalog.entry("sample").problem(rows=rows, vocab=1203, **flags)
    config = Config(threads=128, cluster=1) if variant == "cluster" else Config()
    check(implementation, problem, config, tmp_path)


@pytest.mark.parametrize(
    ("tokens", "vocab", "hidden", "top_k"), [(1, 170, 40, 1), (5, 77, 72, 16), (17, 40, 32, 3)]
)
def test_lm_head(tokens: int, vocab: int, hidden: int, top_k: int, tmp_path: Path) -> None:
    implementation = catalog.implementation("lm_head", "cuda", "mma")
    problem = catalog.entry("lm_head").problem(
        tokens=tokens, vocab=vocab, hidden=hidden, top_k=top_k, dtype="bfloat16", has_logits=True
    )
    check(implementation, problem, Config(warps=4, unroll=2), tmp_path)

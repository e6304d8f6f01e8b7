"""CUDA C++ through NVRTC: artifacts, digests, headers and error messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernelcat.catalog import source as catalog_source
from kernelcat.errors import CompileError, MissingDependency
from kernelcat.jit import cuda
from kernelcat.jit.cuda import CudaSource

KERNEL = """
#include <cuda_bf16.h>
#include <cuda/std/cstdint>
#include "kernelcat/scale.cuh"
#include "own.cuh"

namespace kernelcat {
template <int kThreads, typename T>
__global__ void __launch_bounds__(kThreads) scaled(T* out, const T* in) {
  __shared__ T tile[kThreads];
  tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[kThreads - 1 - threadIdx.x] * static_cast<T>(kScale + kOwn + EXTRA);
}
}  // namespace kernelcat
"""
EXPRESSION = "kernelcat::scaled<128, __nv_bfloat16>"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary ``kernels/cuda`` folder with one kernel and three headers."""
    (tmp_path / "include/kernelcat").mkdir(parents=True)
    (tmp_path / "scaled").mkdir()
    (tmp_path / "include/kernelcat/scale.cuh").write_text('#include "kernelcat/one.cuh"\n')
    (tmp_path / "include/kernelcat/one.cuh").write_text("constexpr int kScale = 1;\n")
    (tmp_path / "scaled/own.cuh").write_text("constexpr int kOwn = 1;\n")
    (tmp_path / "scaled/kernel.cu").write_text(KERNEL)
    monkeypatch.setattr(catalog_source, "cuda_root", lambda: tmp_path)
    return tmp_path


def source(extra: int = 0, kernel: str = EXPRESSION) -> CudaSource:
    return CudaSource("scaled/kernel.cu", kernel, (("EXTRA", extra),))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a"])
def test_a_template_is_compiled_to_machine_code_without_a_gpu(root: Path, arch: str) -> None:
    artifact = source().compile(arch)
    assert artifact.code[:4] == b"\x7fELF" and artifact.cubin is artifact.code
    assert artifact.kernel.encode() in artifact.code
    assert (artifact.language, artifact.arch) == ("cuda", arch)
    assert artifact.metadata["registers"] > 0
    assert artifact.metadata["spill_bytes"] == 0
    assert artifact.metadata["static_shared_bytes"] >= 256


def test_the_metadata_has_registers_and_spills_of_the_requested_kernel(root: Path) -> None:
    (root / "scaled/kernel.cu").write_text(
        """
        extern "C" __global__ void small(int* out) { *out = 1; }
        extern "C" __global__ void __launch_bounds__(1024, 2) greedy(volatile float* out) {
          float value[96];
          #pragma unroll
          for (int i = 0; i < 96; i++) value[i] = out[i];
          #pragma unroll
          for (int i = 0; i < 96; i++) out[95 - i] = value[i];
        }"""
    )
    small, greedy = (source(kernel=name).compile("sm_90a").metadata for name in ("small", "greedy"))
    assert small["registers"] < greedy["registers"] <= 32
    assert small["spill_bytes"] == 0 < greedy["spill_bytes"]


def test_what_ptxas_ignores_becomes_a_warning_in_the_metadata(root: Path) -> None:
    (root / "scaled/kernel.cu").write_text(
        'extern "C" __global__ void k() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }'
    )
    (warning, *_) = source(kernel="k").compile("sm_90a").metadata["warnings"]
    assert "setmaxnreg" in warning


def test_an_error_names_file_line_and_reason(root: Path) -> None:
    path = root / "include/kernelcat/one.cuh"
    path.write_text("\nconstexpr int kScale = missing_name;\n")
    with pytest.raises(CompileError) as caught:
        source().compile("sm_90a")
    line = 'include/kernelcat/one.cuh(2): error: identifier "missing_name" is undefined'
    assert str(caught.value) == line
    assert "constexpr int kScale" in caught.value.log


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#error only for Hopper\n", "kernel.cu(1): error: #error directive: only for Hopper"),
        ('#include "gone.cuh"\n', 'kernel.cu(1): error: cannot open source file "gone.cuh"'),
        ('extern "C" __global__ void k() { asm("wgmma.fence.sync.aligned;"); }', "wgmma"),
    ],
)
def test_every_kind_of_error_takes_one_line(root: Path, text: str, message: str) -> None:
    (root / "scaled/kernel.cu").write_text(text)
    with pytest.raises(CompileError) as caught:
        source(kernel="k").compile("sm_80")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("scaled/kernel.cu")


def test_the_error_of_a_wrong_name_expression_quotes_the_expression(root: Path) -> None:
    with pytest.raises(CompileError, match="error in 'kernelcat::scaled<128, half4>'") as caught:
        source(kernel="kernelcat::scaled<128, half4>").compile("sm_90a")
    assert "scaled/kernel.cu" in str(caught.value)


def test_a_missing_file_is_a_one_line_error(root: Path) -> None:
    with pytest.raises(CompileError, match=r"there is no CUDA source nothing\.cu"):
        CudaSource("nothing.cu", "k").compile("sm_90a")


def test_an_architecture_newer_than_nvrtc_says_what_to_upgrade(root: Path) -> None:
    with pytest.raises(MissingDependency, match=r"for sm_999a.*sm_90,.*--upgrade"):
        source().compile("sm_999a")


@pytest.mark.parametrize(
    "path", ["scaled/kernel.cu", "scaled/own.cuh", "include/kernelcat/scale.cuh",
             "include/kernelcat/one.cuh"]
)  # fmt: skip
def test_the_digest_depends_on_the_code_of_every_included_file_of_the_catalog(
    root: Path, path: str
) -> None:
    before = source().digest()
    (root / path).write_text((root / path).read_text() + "// another\n")
    assert source().digest() == before
    (root / path).write_text((root / path).read_text() + "struct Another {};\n")
    assert source().digest() != before


def test_the_digest_depends_on_instantiation_and_macros_but_not_on_other_files(root: Path) -> None:
    (root / "include/kernelcat/unused.cuh").write_text("int a;")
    before = source().digest()
    (root / "include/kernelcat/unused.cuh").write_text("int b;")
    assert source().digest() == before
    assert len({before, source(1).digest(), source(kernel="other").digest()}) == 3


def test_the_digest_does_not_depend_on_the_folder_of_the_catalog(
    root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = source().digest()
    moved = tmp_path_factory.mktemp("elsewhere") / "cuda"
    root.rename(moved)
    monkeypatch.setattr(catalog_source, "cuda_root", lambda: moved)
    assert source().digest() == before


def test_headers_that_include_each_other_are_digested_once(root: Path) -> None:
    (root / "include/kernelcat/one.cuh").write_text(
        '#pragma once\n#include "kernelcat/scale.cuh"\nconstexpr int kScale = 1;\n'
    )
    names = [path.name for path in source().files()]
    assert sorted(names) == ["kernel.cu", "one.cuh", "own.cuh", "scale.cuh"]


def test_the_toolchain_names_compiler_and_headers() -> None:
    from importlib.metadata import version

    toolchain = source().toolchain()
    assert f"nvrtc {version('nvidia-cuda-nvrtc')}" in toolchain
    assert f"cccl {version('nvidia-cuda-cccl')}" in toolchain


LAYOUTS = {
    "one folder": ("nvidia/cu13/include",) * 3,
    "cccl inside": ("nvidia/cu13/include",) * 2 + ("nvidia/cu13/include/cccl",),
    "a folder each": (
        "nvidia/cuda_runtime/include",
        "nvidia/cuda_nvcc/include",
        "nvidia/cuda_cccl/include",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_headers_are_found_in_every_layout_of_the_nvidia_wheels(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in LAYOUTS[layout]]
    for folder, name in zip(folders, ("cuda_bf16.h", "crt/mma.h", "cuda/std/cstdint"), strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert set(folders) <= set(cuda.header_folders.__wrapped__())


def test_headers_of_a_toolkit_are_taken_where_no_wheel_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cuda_bf16.h", "crt/mma.h", "cccl/cuda/std/cstdint"):
        (tmp_path / "include" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "include" / name).touch()
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    folders = cuda.header_folders.__wrapped__()
    assert folders == (tmp_path / "include", tmp_path / "include/cccl")


def test_the_error_of_missing_headers_names_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "_header_candidates", lambda: [[Path("/nowhere")]])
    with pytest.raises(MissingDependency, match=r"pip install .*nvidia-cuda-cccl"):
        cuda.header_folders.__wrapped__()


def test_the_error_of_a_missing_nvrtc_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(MissingDependency, match=r"pip install 'nvidia-cuda-nvrtc"):
        source().compile("sm_90a")


WARM = """
import sys, time, json, numpy, kernelcat.catalog
start = time.process_time()
from kernelcat.runtime import launcher
from kernelcat.jit import build
from kernelcat.jit.cuda import CudaSource
build(CudaSource(sys.argv[1], "k"), "sm_90a")
heavy = [name for name in ("cuda.bindings", "triton", "torch") if name in sys.modules]
print(json.dumps([time.process_time() - start, heavy]))
"""


def test_a_warm_start_takes_under_50_ms_and_imports_no_compiler(tmp_path: Path) -> None:
    file = tmp_path / "kernel.cu"
    file.write_text('extern "C" __global__ void k(int* out) { *out = 1; }')
    environment = os.environ | {"KERNELCAT_CACHE": str(tmp_path / "artifacts")}
    command = [sys.executable, "-c", WARM, str(file)]
    runs = [
        json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
        for _ in range(6)
    ]
    assert runs[0][1] == ["cuda.bindings"], "the first run compiles"
    assert all(heavy == [] for _, heavy in runs[1:])
    assert min(seconds for seconds, _ in runs[1:]) < 0.050

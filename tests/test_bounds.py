"""Loaded modules and artifacts in memory are bounded, and unloaded when nothing uses them."""

from __future__ import annotations

import ctypes
import functools
import gc
import resource
import sys
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from campaign import share

import kernelcat
from kernelcat.bounded import Bounded
from kernelcat.call import arrays, fast_path, operator, registry, sharing
from kernelcat.catalog.implementation import LeastEstimate
from kernelcat.jit import Artifact, cache, cute
from kernelcat.runtime import code, driver, gpu, launcher


def test_the_oldest_items_are_forgotten() -> None:
    memory = Bounded[int, int](3)
    for number in range(5):
        memory[number] = number
    assert list(memory) == [2, 3, 4]


def test_threads_share_a_bounded_dictionary() -> None:
    memory, errors = Bounded[int, int](5), []

    def fill(start: int) -> None:
        try:
            for number in range(start, start + 3000):
                memory[number] = number
                memory.get(number)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=fill, args=(10_000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(memory) == 5


def test_artifacts_and_functions_are_kept_in_bounded_dictionaries() -> None:
    assert cache._memory.limit <= 1024 and code._functions.limit <= 1024
    assert code._host_functions.limit <= 64 and fast_path._missed.limit <= 4096


class Library:
    """Stands in for libcuda: counts modules; every other function succeeds, and does nothing."""

    def __init__(self) -> None:
        self.loaded: set[int] = set()
        self.count = self.launches = 0

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        self.count += 1
        module._obj.value = self.count
        self.loaded.add(self.count)
        return 0

    def cuModuleUnload(self, module: ctypes.c_void_p) -> int:
        self.loaded.remove(module.value)
        return 0

    def cuLaunchKernelEx(self, *arguments: Any) -> int:
        self.launches += 1
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    opened = driver.Driver(library)
    monkeypatch.setattr(driver, "opened", lambda: opened)
    monkeypatch.setattr(code, "_functions", Bounded(4))
    monkeypatch.setattr(code, "_of_sources", Bounded(4))
    monkeypatch.setattr(code, "_host_functions", Bounded(4))
    return library


class Runtime:
    """Stands in for the CuTe DSL's C runtime: counts modules; a launch succeeds."""

    def __init__(self) -> None:
        self.loaded: set[int] = set()
        self.count = self.launches = 0

    def CuteDSLRT_Module_Create_From_Bytes(self, module: Any, *code: Any) -> int:
        self.count += 1
        module._obj.value = self.count
        self.loaded.add(self.count)
        return 0

    def CuteDSLRT_Module_Destroy(self, module: ctypes.c_void_p) -> None:
        self.loaded.remove(module.value)

    def CuteDSLRT_Module_Get_Function(self, function: Any, *name: Any) -> int:
        return 0

    def CuteDSLRT_Function_Run(self, *arguments: Any) -> int:
        self.launches += 1
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(cute, "_runtime", lambda: runtime)
    return runtime


def test_a_module_is_unloaded_with_the_last_launcher_that_uses_it(library: Library) -> None:
    used = code.function(b"used", "kernel", 0)
    for number in range(50):
        code.function(b"%d" % number, "kernel", 0)
    gc.collect()
    assert len(library.loaded) == 5, "the bound, and the one in use"
    assert code.function(b"49", "kernel", 0) is code.function(b"49", "kernel", 0)
    del used
    gc.collect()
    assert len(library.loaded) == 4


def host_artifact(code: bytes, *kinds: str) -> Artifact:
    """An object file of CuTe whose host function takes parameters of these kinds."""
    return Artifact("cute", "sm_90a", "kernel", code, b"", {"params": kinds})


def test_an_object_file_is_unloaded_with_the_last_launcher_that_uses_it(
    library: Library, runtime: Runtime
) -> None:
    used = code.host_function(host_artifact(b"used", "int32"), 0)
    for number in range(50):
        code.host_function(host_artifact(b"%d" % number, "int32"), 0)
    gc.collect()
    assert len(runtime.loaded) == 5, "the bound, and the one in use"
    del used
    gc.collect()
    assert len(runtime.loaded) == 4


def test_object_files_are_shared_by_code_parameters_and_gpu(
    library: Library, runtime: Runtime
) -> None:
    artifact = host_artifact(b"code", "int32")
    call = code.host_function(artifact, 0)
    assert code.host_function(replace(artifact), 0) is call
    others = [host_artifact(b"code", "int64"), host_artifact(b"edoc", "int32")]
    calls = {*(code.host_function(other, 0) for other in others)}
    assert len({call, code.host_function(artifact, 1), *calls}) == 4


# ---- calls of ever new sizes -------------------------------------------------------------------


def uncompiled(source: Any, arch: str) -> Artifact:
    """An artifact of ``source`` whose code is no code, with what the launcher reads of it."""
    code = source.digest().encode()
    metadata: dict[str, Any] = {"params": getattr(source, "params", ())}
    if source.language == "triton":
        metadata |= {"num_warps": 4, "shared_bytes": 0, "hidden_params": ["scratch"]}
    return Artifact(source.language, arch, "kernel", code, code, metadata)


@pytest.fixture
def machine(library: Library, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch on a machine whose H200 does nothing; operators remember 32 signatures, 2 choices."""
    torch = pytest.importorskip("torch")
    from host_machine import HostTorch

    tensors = HostTorch()
    monkeypatch.setattr(arrays, "torch", lambda: tensors)
    monkeypatch.setattr(code, "build", uncompiled)
    monkeypatch.setattr(operator, "_gpu", lambda index: gpu.SKUS["h200"])
    monkeypatch.setattr(operator, "MAX_REMEMBERED", 32)
    monkeypatch.setattr(LeastEstimate, "MAX_REMEMBERED", 1)
    monkeypatch.setattr(sharing.Choices, "MAX_REMEMBERED", 2)
    monkeypatch.setattr(registry, "_ops", {})
    monkeypatch.setattr(operator, "_scans", {})
    monkeypatch.setattr(fast_path, "_missed", Bounded(32))
    return torch


def call_with_rows(torch: Any, op: Any, first: int, count: int) -> None:
    """Two calls of gemm for each of ``count`` numbers of rows."""
    b = torch.zeros(512, 256, dtype=torch.bfloat16)
    for rows in range(first, first + count):
        a = torch.zeros(rows, 256, dtype=torch.bfloat16)
        op(a, b)
        op(a, b, out=torch.zeros(rows, 512, dtype=torch.bfloat16))


def clear_bounded_caches() -> None:
    """Clear what functions with a bounded cache remember, and collect garbage."""
    for each in gc.get_objects():
        if type(each) is functools._lru_cache_wrapper and each.cache_parameters()["maxsize"]:
            each.cache_clear()
    gc.collect()


def traced_bytes() -> int:
    """Bytes that Python has allocated, without what functions with a bounded cache remember."""
    clear_bounded_caches()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.filterwarnings("ignore:there is no tuning database")
@pytest.mark.parametrize("language", [None, "cuda", "triton", "cute"])
def test_memory_is_flat_over_calls_of_ever_new_sizes(
    machine: Any, language: str | None, runtime: Runtime, library: Library
) -> None:
    """Both measurements follow calls of the same sizes: a remembered launch of one kernel has three
    tensor maps, one of another kernel five, so that other sizes would take more or less memory."""
    op = kernelcat.get("gemm", language=language)
    tracemalloc.start()
    try:
        call_with_rows(machine, op, 300, 80)
        before = traced_bytes()
        call_with_rows(machine, op, 380, 120)
        call_with_rows(machine, op, 340, 40)
        grown = traced_bytes() - before
    finally:
        tracemalloc.stop()
    assert grown < 60_000, "bytes; to remember the problem alone of each size takes 150,000"
    for kind in (fast_path.FastCall, launcher.Launcher):
        assert sum(type(each) is kind for each in gc.get_objects()) <= 3 * 32
    assert len(runtime.loaded) + len(library.loaded) <= 12, "equal code is loaded once"
    assert library.launches + runtime.launches >= 400


@pytest.mark.filterwarnings("ignore:there is no tuning database")
@pytest.mark.campaign
def test_memory_is_flat_over_100_000_calls_of_10_000_sizes(
    machine: Any, runtime: Runtime, library: Library
) -> None:
    """``make test`` does a twentieth of the calls."""
    num_sizes = share(10_000)
    op, b = kernelcat.get("gemm"), machine.zeros(512, 256, dtype=machine.bfloat16)
    rows = machine.zeros(num_sizes + 1, 256, dtype=machine.bfloat16)
    out = machine.zeros(num_sizes + 1, 512, dtype=machine.bfloat16)
    marks = []
    for part in range(10):
        for size in range(1 + part * num_sizes // 10, 1 + (part + 1) * num_sizes // 10):
            for _ in range(10):
                op(rows[:size], b, out=out[:size])
        clear_bounded_caches()
        marks.append(sys.getallocatedblocks())
    assert library.launches + runtime.launches >= 10 * num_sizes
    # What choices rest on takes about 1,600 blocks, most of them below 300 rows.
    assert marks[-1] - marks[1] < 2000, f"{marks}: to remember the axes of a size takes 8 blocks"
    assert len(runtime.loaded) + len(library.loaded) <= 24


@pytest.mark.gpu
def test_memory_is_flat_over_100_000_calls_of_10_000_sizes_on_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    op, b = kernelcat.get("gemm"), torch.zeros(512, 256, dtype=torch.bfloat16, device="cuda")
    rows = torch.zeros(10_001, 256, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros(10_001, 512, dtype=torch.bfloat16, device="cuda")
    marks = []
    for part in range(10):
        for size in range(1 + 1000 * part, 1001 + 1000 * part):
            for _ in range(10):
                op(rows[:size], b, out=out[:size])
        torch.cuda.synchronize()
        marks.append((resident_bytes(), torch.cuda.mem_get_info()[0]))
    (host, free), (last_host, last_free) = marks[1], marks[-1]
    assert last_host - host < 50 << 20, marks
    assert free - last_free < 50 << 20, marks
    registry.reload()


@pytest.mark.gpu
@pytest.mark.parametrize("language", ["cuda", "triton", "cute"])
def test_host_memory_is_flat_over_3000_batch_sizes(language: str) -> None:
    torch = pytest.importorskip("torch")
    b = torch.zeros(512, 256, dtype=torch.bfloat16, device="cuda")
    rows = torch.zeros(3300, 256, dtype=torch.bfloat16, device="cuda")
    chosen = kernelcat.get("gemm", language=language).explain(rows[:300], b)
    variant = chosen.implementation.variant
    op = kernelcat.get("gemm", language=language, variant=variant, config=chosen.config)
    for count in range(300, 600):
        op(rows[:count], b)
    before = resident_bytes()
    for count in range(600, 3300):
        op(rows[:count], b)
    torch.cuda.synchronize()
    assert resident_bytes() - before < 200 << 20, "an object file a size takes 5 MB, as many GB"
    registry.reload()


def resident_bytes() -> int:
    """Host memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


SPIN = """
extern "C" __global__ void spin(int* out) {
  const long long start = clock64();
  while (clock64() - start < 1000000000LL) {}
  *out = 7;
}
"""


@pytest.mark.gpu
def test_unloading_a_module_waits_for_its_kernels(tmp_path) -> None:
    from kernelcat.jit.cuda import CudaSource
    from kernelcat.runtime import gpu

    cuda, source = driver.opened(), tmp_path / "spin.cu"
    source.write_text(SPIN)
    artifact = CudaSource(str(source), "spin").compile(gpu.detect().arch)
    function = cuda.function(artifact.code, artifact.kernel, 0)
    pointer = ctypes.c_uint64(cuda.allocate(4, 0))
    params = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
    config = driver.launch_config((1, 1, 1), 1, 0, 0, (1, 1, 1), False)
    with cuda.using(0):
        assert cuda.launch(ctypes.byref(config), function, params, None) == 0
    del function
    gc.collect()
    result = ctypes.c_int()
    with cuda.using(0):
        cuda.call("cuMemcpyDtoH_v2", ctypes.byref(result), pointer, ctypes.c_size_t(4))
    assert result.value == 7

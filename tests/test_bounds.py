"""Loaded modules and artifacts in memory are bounded, and unloaded when nothing uses them."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import Any

import pytest

from kernelcat.bounded import Bounded
from kernelcat.jit import cache
from kernelcat.runtime import driver, launcher


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
    assert cache._memory.limit <= 1024 and launcher._functions.limit <= 1024


class Library:
    """Stands in for libcuda: counts modules; every other function succeeds."""

    def __init__(self) -> None:
        self.loaded: set[int] = set()
        self.count = 0

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        self.count += 1
        module._obj.value = self.count
        self.loaded.add(self.count)
        return 0

    def cuModuleUnload(self, module: ctypes.c_void_p) -> int:
        self.loaded.remove(module.value)
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    opened = driver.Driver(library)
    monkeypatch.setattr(driver, "opened", lambda: opened)
    monkeypatch.setattr(launcher, "_functions", Bounded(4))
    return library


def test_a_module_is_unloaded_with_the_last_launcher_that_uses_it(library: Library) -> None:
    used = launcher._function(b"used", "kernel", 0)
    for number in range(50):
        launcher._function(b"%d" % number, "kernel", 0)
    gc.collect()
    assert len(library.loaded) == 5, "the bound, and the one in use"
    assert launcher._function(b"49", "kernel", 0) is launcher._function(b"49", "kernel", 0)
    del used
    gc.collect()
    assert len(library.loaded) == 4


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

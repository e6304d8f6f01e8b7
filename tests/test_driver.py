"""The driver library: the order of its calls, and the errors of failures."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from kernelcat.errors import LaunchError, MissingDependency
from kernelcat.runtime import driver


class Library:
    """A fake ``libcuda`` that records its calls; ``failing`` maps a function to its error code."""

    def __init__(self, **failing: int) -> None:
        self.failing, self.calls = failing, list[str]()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"out of memory"
            if name == "cuThreadExchangeStreamCaptureMode":
                self.calls.append(f"mode {arguments[0]._obj.value}")
                arguments[0]._obj.value = 0
            return self.failing.get(name, 0)

        return call


def test_memory_can_be_allocated_during_a_capture() -> None:
    library = Library()
    cuda = driver.Driver(library)
    cuda.allocate(64, 0)
    before = ["cuThreadExchangeStreamCaptureMode", "mode 2"]
    after = ["cuThreadExchangeStreamCaptureMode", "mode 0", "cuCtxPopCurrent_v2"]
    inside = ["cuMemAlloc_v2", "cuMemsetD8Async", "cuStreamSynchronize"]
    start = library.calls.index("cuCtxPushCurrent_v2") + 1
    assert library.calls[start:] == [*before, "cuStreamCreate", *inside, *after]
    library.calls.clear()
    cuda.allocate(64, 0)
    assert library.calls == ["cuCtxPushCurrent_v2", *before, *inside, *after], "one stream a GPU"


def test_reading_waits_for_the_stream_and_an_empty_array_is_not_read() -> None:
    library = Library()
    cuda = driver.Driver(library)
    assert cuda.read(0, 0, 0, 7) == b"" and not library.calls
    assert cuda.read(0x1000, 12, 0, 7) == bytes(12)
    copied = library.calls.index("cuMemcpyDtoHAsync_v2")
    assert library.calls[copied + 1] == "cuStreamSynchronize"
    assert library.calls[-1] == "cuCtxPopCurrent_v2"


def test_the_error_of_a_failed_call_names_it_and_the_context_is_restored() -> None:
    library = Library(cuMemAlloc_v2=2)
    text = r"cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY \(out of memory\)"
    with pytest.raises(LaunchError, match=text):
        driver.Driver(library).allocate(64, 0)
    assert library.calls[-3:] == [
        "cuThreadExchangeStreamCaptureMode",
        "mode 0",
        "cuCtxPopCurrent_v2",
    ]


def test_without_a_driver_opening_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(MissingDependency, match="no NVIDIA driver"):
        driver.opened.__wrapped__()


def test_without_a_gpu_opening_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(cuInit=100))
    with pytest.raises(MissingDependency, match="no usable NVIDIA GPU in this machine: CUDA_ERROR"):
        driver.opened.__wrapped__()


def test_structures_have_the_layout_of_the_driver_api() -> None:
    config = driver.LaunchConfig
    offsets = [config.shared_bytes.offset, config.stream.offset, config.attributes.offset]
    assert (offsets, ctypes.sizeof(config)) == ([24, 32, 40], 56)
    assert ctypes.sizeof(driver.LaunchAttribute) == 72

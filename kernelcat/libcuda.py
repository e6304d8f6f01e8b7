"""The driver calls of loading and launching, through ctypes.

``cuda.bindings`` makes the same calls and takes 100 ms to import; ctypes takes 5 ms, and a prepared
call of ``cuLaunchKernelEx`` costs a fifth less.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

from kernelcat.errors import LaunchError, MissingDependency

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14

INVALID_CONTEXT, INVALID_HANDLE = 201, 400

_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_CAPTURE_MODE_RELAXED = 2
_STREAM_NON_BLOCKING = 1


class LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute``."""

    _fields_ = (("id", c_uint), ("padding", c_uint), ("value", c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", c_uint),
    )


def launch_config(
    grid: Sequence[int],
    threads: int,
    shared_bytes: int,
    stream: int,
    cluster: Sequence[int] = (1, 1, 1),
    programmatic: bool = False,
) -> LaunchConfig:
    """A configuration for ``cuLaunchKernelEx``; it keeps its attributes alive."""
    attributes = []
    if tuple(cluster) != (1, 1, 1):
        attributes.append(_attribute(_CLUSTER_DIMENSION, *cluster))
    if programmatic:
        attributes.append(_attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 1))
    array = (LaunchAttribute * len(attributes))(*attributes)
    block = (c_uint * 3)(threads, 1, 1)
    return LaunchConfig((c_uint * 3)(*grid), block, shared_bytes, stream, array, len(attributes))


def _attribute(number: int, *value: int) -> LaunchAttribute:
    return LaunchAttribute(number, 0, (c_uint * 16)(*value))


class Driver:
    """``libcuda`` after ``cuInit``.

    ``launch(byref(config), function, params, None) -> status`` is ``cuLaunchKernelEx`` itself:
    nothing may stand between it and the hot path.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self.launch = library.cuLaunchKernelEx
        self._contexts: dict[int, c_void_p] = {}

    def call(self, name: str, *args: Any) -> None:
        """Call ``name``; raise ``LaunchError`` with the CUDA error's name and text."""
        status = getattr(self._library, name)(*args)
        if status:
            raise LaunchError(f"{name}: {self.describe(status)}")

    def describe(self, status: int) -> str:
        """``CUDA_ERROR_INVALID_VALUE (invalid argument)``."""
        texts = []
        for function in (self._library.cuGetErrorName, self._library.cuGetErrorString):
            text = ctypes.c_char_p()
            function(c_int(status), ctypes.byref(text))
            texts.append((text.value or b"unknown error").decode())
        return f"{texts[0]} ({texts[1]})"

    def context(self, device: int) -> c_void_p:
        """The primary context of ``device``: the one torch, CuPy and the CUDA runtime use."""
        if device not in self._contexts:
            handle, context = c_int(), c_void_p()
            self.call("cuDeviceGet", ctypes.byref(handle), c_int(device))
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
            self._contexts[device] = context
        return self._contexts[device]

    @contextmanager
    def using(self, device: int) -> Iterator[None]:
        """Make the primary context of ``device`` current.

        A stream capture under way in this thread stays valid: allocating and loading are allowed.
        """
        mode, popped = c_int(_CAPTURE_MODE_RELAXED), c_void_p()
        self.call("cuCtxPushCurrent_v2", self.context(device))
        try:
            self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            try:
                yield
            finally:
                self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(popped))

    def adopt(self, device: int) -> bool:
        """Whether this thread had no context; it has the primary one from now on (as in CUDA)."""
        current = c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(current))
        if current.value:
            return False
        self.call("cuCtxSetCurrent", self.context(device))
        return True

    def function(self, code: bytes, name: str, device: int) -> c_void_p:
        """Load a cubin into ``device`` (for the life of the process) and find a kernel in it."""
        module, function = c_void_p(), c_void_p()
        with self.using(device):
            self.call("cuModuleLoadData", ctypes.byref(module), code)
            self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def raise_limit(self, function: c_void_p, attribute: int, value: int, device: int) -> None:
        """Set an attribute of a function to at least ``value``; other launchers may share it."""
        current = c_int()
        with self.using(device):
            self.call("cuFuncGetAttribute", ctypes.byref(current), c_int(attribute), function)
            if current.value < value:
                self.call("cuFuncSetAttribute", function, c_int(attribute), c_int(value))

    def allocate(self, size: int, device: int) -> int:
        """Address of ``size`` zeroed bytes (multiple of 256 aligned), also while capturing."""
        pointer, stream = c_uint64(), c_void_p()
        with self.using(device):
            self.call("cuMemAlloc_v2", ctypes.byref(pointer), c_size_t(size))
            self.call("cuStreamCreate", ctypes.byref(stream), c_uint(_STREAM_NON_BLOCKING))
            self.call("cuMemsetD8Async", pointer, ctypes.c_ubyte(0), c_size_t(size), stream)
            self.call("cuStreamSynchronize", stream)
            self.call("cuStreamDestroy_v2", stream)
        return pointer.value

    def free(self, pointer: int, device: int) -> None:
        """Free what ``allocate`` gave; work that was launched before may still use it."""
        with self.using(device):
            self.call("cuMemFree_v2", c_uint64(pointer))

    def encode_tiled(
        self,
        descriptor: int,
        dtype: int,
        pointer: int,
        shape: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        swizzle: int,
        l2_promotion: int,
    ) -> None:
        """``cuTensorMapEncodeTiled`` into the 128 bytes at ``descriptor``: zeros out of bounds."""
        rank = len(shape)
        ones = (c_uint32 * rank)(*[1] * rank)
        dims, pitches = (c_uint64 * rank)(*shape), (c_uint64 * max(rank - 1, 1))(*strides)
        self.call(
            "cuTensorMapEncodeTiled", c_void_p(descriptor), c_int(dtype), c_uint32(rank),
            c_void_p(pointer), dims, pitches, (c_uint32 * rank)(*box), ones, c_int(0),
            c_int(swizzle), c_int(l2_promotion), c_int(0),
        )  # fmt: skip


@cache
def driver() -> Driver:
    """The driver of this machine.

    Raises
    ------
    MissingDependency
        Without a driver or a GPU; one line.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
        opened = Driver(library)
    except (OSError, AttributeError) as error:
        raise MissingDependency(
            f"no NVIDIA driver for CUDA 13 in this machine ({error}): install one to run kernels"
        ) from error
    status = library.cuInit(c_uint(0))
    if status:
        raise MissingDependency(f"no usable NVIDIA GPU in this machine: {opened.describe(status)}")
    return opened

"""The NVIDIA driver through ctypes: properties of this machine's GPUs, loading and launching.

``cuda.bindings`` makes the same calls but takes 100 ms to import; ctypes takes 5 ms, and a prepared
call of ``cuLaunchKernelEx`` costs a fifth less. Only the power limit comes from NVML's bindings.
"""

from __future__ import annotations

import ctypes
import re
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from typing import Any

from kernelcat.errors import LaunchError, MissingDependency

# CUfunction_attribute
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
PREFERRED_SHARED_MEMORY_CARVEOUT = 9  # percent
NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14

# CUresult
INVALID_CONTEXT, INVALID_HANDLE = 201, 400

# CUlaunchAttributeID, CUstreamCaptureMode, CUstream_flags
_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_CAPTURE_MODE_RELAXED = 2
_STREAM_NON_BLOCKING = 1


class LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute``."""

    _fields_ = (("id", c_uint), ("padding", c_uint), ("value", c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``; ``kept_alive`` is the memory of the attributes."""

    kept_alive: Any
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
    """A ``CUlaunchConfig``, which keeps the memory of its attributes alive.

    ``grid`` counts thread blocks, ``threads`` is the number of threads of a thread block.
    """
    attributes = _attributes(tuple(cluster), programmatic)
    config = LaunchConfig()
    config.kept_alive = attributes
    _pack_config(
        config, 0, *grid, threads, 1, 1, shared_bytes, stream, ctypes.addressof(attributes),
        len(attributes),
    )  # fmt: skip
    return config


_pack_config = struct.Struct("7I4xQQI4x").pack_into  # by far faster than the fields one by one


@lru_cache(maxsize=64)
def _attributes(cluster: tuple[int, ...], programmatic: bool) -> ctypes.Array[LaunchAttribute]:
    """The attributes of a launch, which nobody changes."""
    attributes = []
    if cluster != (1, 1, 1):
        attributes.append(_attribute(_CLUSTER_DIMENSION, *cluster))
    if programmatic:
        attributes.append(_attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 1))
    return (LaunchAttribute * len(attributes))(*attributes)


def _attribute(number: int, *value: int) -> LaunchAttribute:
    return LaunchAttribute(number, 0, (c_uint * 16)(*value))


_MAX_RANK = 5  # of a tensor map
_Sizes, _Extents = c_uint64 * _MAX_RANK, c_uint32 * _MAX_RANK
_ONES = _Extents(*[1] * _MAX_RANK)


class Function(c_void_p):
    """A loaded kernel: a ``CUfunction``."""


class CaptureQuery:
    """Whether a CUDA graph captures a stream, asked by one thread.

    The objects of ``ctypes`` are made once, and :attr:`ask` is no function of Python: both together
    take a third of the time of other calls.

    Attributes
    ----------
    stream : handle of the stream, 0 at first
    ask : asks the driver, and returns its error or 0
    status : afterwards, without an error, not 0 if the stream is captured
    """

    __slots__ = ("_handle", "ask", "status", "stream")

    def __init__(self, query: Callable[..., int]) -> None:
        self.stream, self._handle, self.status = 0, c_void_p(), c_int()
        self.ask = partial(query, self._handle, ctypes.byref(self.status))

    def turn_to(self, stream: int) -> None:
        """Ask about ``stream`` from now on."""
        self._handle.value = self.stream = stream


class Driver:
    """``libcuda`` after ``cuInit``. Methods raise ``LaunchError`` where the driver fails.

    ``launch(byref(config), function, params, None) -> status`` is ``cuLaunchKernelEx`` itself,
    without a Python wrapper, because it is on the fast path.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self.launch = library.cuLaunchKernelEx
        self._contexts: dict[int, c_void_p] = {}
        self._clearing: dict[int, c_void_p] = {}  # GPU -> the stream that clears new memory

    def call(self, name: str, *args: Any) -> None:
        """Call the function ``name``; an error becomes a ``LaunchError`` with its name and text."""
        status = getattr(self._library, name)(*args)
        if status:
            raise LaunchError(f"{name}: {self.describe(status)}")

    def describe(self, status: int) -> str:
        """Name and text of an error: ``CUDA_ERROR_INVALID_VALUE (invalid argument)``."""
        texts = []
        for function in (self._library.cuGetErrorName, self._library.cuGetErrorString):
            text = ctypes.c_char_p()
            function(c_int(status), ctypes.byref(text))
            texts.append((text.value or b"unknown error").decode())
        return f"{texts[0]} ({texts[1]})"

    def count(self) -> int:
        """Number of GPUs."""
        number = c_int()
        self.call("cuDeviceGetCount", ctypes.byref(number))
        return number.value

    def version(self) -> str:
        """The newest CUDA version that the driver supports (``13.0``)."""
        version = c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def attribute(self, number: int, device: int) -> int:
        """The value of a ``CU_DEVICE_ATTRIBUTE`` of a GPU."""
        value = c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), c_int(number), self._handle(device))
        return value.value

    def name(self, device: int) -> str:
        """The name of a GPU (``NVIDIA H200``)."""
        text = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", text, c_int(len(text)), self._handle(device))
        return text.value.decode()

    def memory_bytes(self, device: int) -> int:
        """Size of a GPU's memory in bytes."""
        size = c_size_t()
        self.call("cuDeviceTotalMem_v2", ctypes.byref(size), self._handle(device))
        return size.value

    def pci_bus_id(self, device: int) -> str:
        """The PCI bus id of a GPU (``0000:19:00.0``), by which NVML finds the GPU."""
        text = ctypes.create_string_buffer(32)
        self.call("cuDeviceGetPCIBusId", text, c_int(len(text)), self._handle(device))
        return text.value.decode()

    def _handle(self, device: int) -> c_int:
        handle = c_int()
        self.call("cuDeviceGet", ctypes.byref(handle), c_int(device))
        return handle

    def context(self, device: int) -> c_void_p:
        """The primary context of ``device``, which torch, CuPy and the CUDA runtime use."""
        if device not in self._contexts:
            context = c_void_p()
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._handle(device))
            self._contexts[device] = context
        return self._contexts[device]

    @contextmanager
    def using(self, device: int) -> Iterator[None]:
        """Make the primary context of ``device`` current for a ``with`` block.

        The block may allocate memory and load modules even while this thread captures a stream:
        the capture stays valid.
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
        """Make the primary context of ``device`` current in a thread that has no context.

        The CUDA runtime does the same. Returns whether the thread had no context.
        """
        current = c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(current))
        if current.value:
            return False
        self.call("cuCtxSetCurrent", self.context(device))
        return True

    def is_capturing(self, stream: int) -> bool:
        """Whether a CUDA graph captures the stream with the handle ``stream``.

        False where the driver cannot tell: for the default stream while another stream captures.
        """
        query = self.capture_query()
        query.turn_to(stream)
        return not query.ask() and query.status.value != 0

    def capture_query(self) -> CaptureQuery:
        """:meth:`is_capturing` for many calls of one thread."""
        return CaptureQuery(self._library.cuStreamIsCapturing)

    def function(self, code: bytes, name: str, device: int) -> c_void_p:
        """The kernel ``name`` in the cubin ``code``, unloaded with the last reference to it."""
        module, function = c_void_p(), Function()
        with self.using(device):
            self.call("cuModuleLoadData", ctypes.byref(module), code)
            self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        weakref.finalize(function, self.unload, module, device).atexit = False
        return function

    def unload(self, module: c_void_p, device: int) -> None:
        """Unload a module of :meth:`function`, after its kernels have ended."""
        with suppress(LaunchError), self.using(device):
            self.call("cuModuleUnload", module)

    def raise_limit(self, function: c_void_p, attribute: int, value: int, device: int) -> None:
        """Raise an attribute of a function to ``value``.

        A higher value stays: another launcher may share the function and need that value.
        """
        current = c_int()
        with self.using(device):
            self.call("cuFuncGetAttribute", ctypes.byref(current), c_int(attribute), function)
            if current.value < value:
                self.call("cuFuncSetAttribute", function, c_int(attribute), c_int(value))

    def allocate(self, size: int, device: int) -> int:
        """Address (a multiple of 256) of ``size`` new bytes of zeros; allowed in stream capture."""
        pointer = c_uint64()
        with self.using(device):
            stream = self._clearing.get(device)
            if stream is None:
                stream = c_void_p()
                self.call("cuStreamCreate", ctypes.byref(stream), c_uint(_STREAM_NON_BLOCKING))
                self._clearing[device] = stream
            self.call("cuMemAlloc_v2", ctypes.byref(pointer), c_size_t(size))
            self.call("cuMemsetD8Async", pointer, ctypes.c_ubyte(0), c_size_t(size), stream)
            self.call("cuStreamSynchronize", stream)
        return pointer.value

    def free(self, pointer: int, device: int) -> None:
        """Free memory of :meth:`allocate`; kernels launched before this call may still use it."""
        with self.using(device):
            self.call("cuMemFree_v2", c_uint64(pointer))

    def read(self, pointer: int, size: int, device: int, stream: int) -> bytearray:
        """``size`` bytes at the address ``pointer``, after all that ``stream`` has to do before."""
        memory = bytearray(size)
        if size:
            target = (ctypes.c_ubyte * size).from_buffer(memory)
            with self.using(device):
                self.call(
                    "cuMemcpyDtoHAsync_v2", target, c_uint64(pointer), c_size_t(size),
                    c_void_p(stream),
                )  # fmt: skip
                self.call("cuStreamSynchronize", c_void_p(stream))
        return memory

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
        """Call ``cuTensorMapEncodeTiled`` for the 128 bytes at the host address ``descriptor``.

        ``shape`` and ``box`` are in elements and ``strides`` in bytes, innermost first. Loads out
        of bounds give zeros.
        """
        status = self._encode(
            descriptor, dtype, len(shape), pointer, _Sizes(*shape), _Sizes(*strides),
            _Extents(*box), _ONES, 0, swizzle, l2_promotion, 0,
        )  # fmt: skip
        if status:
            raise LaunchError(f"cuTensorMapEncodeTiled: {self.describe(status)}")

    @cached_property
    def _encode(self) -> Any:
        function = self._library.cuTensorMapEncodeTiled
        function.argtypes = (
            c_void_p, c_int, c_uint32, c_void_p, _Sizes, _Sizes, _Extents, _Extents, c_int, c_int,
            c_int, c_int,
        )  # fmt: skip
        return function


@cache
def opened() -> Driver:
    """The driver of this machine, opened once.

    Raises
    ------
    MissingDependency
        There is no driver or no usable GPU, or the driver is too old; the message is one line.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
        driver = Driver(library)
    except OSError as error:
        raise MissingDependency(
            "no NVIDIA driver in this machine: install one, or name a GPU, as in "
            "kernelcat explain --gpu h200"
        ) from error
    except AttributeError as error:  # libcuda lacks a function
        raise MissingDependency(f"the NVIDIA driver is too old for CUDA 13: {error}") from error
    status = library.cuInit(c_uint(0))
    if status:
        raise MissingDependency(f"no usable NVIDIA GPU in this machine: {driver.describe(status)}")
    return driver


def count() -> int:
    """Number of GPUs in this machine; 0 without a driver."""
    try:
        return opened().count()
    except MissingDependency:
        return 0


@dataclass(frozen=True)
class Facts:
    """Properties of a GPU as the driver reports them. ``bandwidth`` is in bytes per second.

    ``mig`` is the profile of a MIG slice (``1g.10gb``), or None for a whole GPU. ``power_w`` is the
    enforced power limit in watts, or None where NVML does not report it.
    """

    name: str
    capability: tuple[int, int]
    sms: int
    shared_bytes: int
    l2_bytes: int
    memory_bytes: int
    bandwidth: float
    clock_hz: float
    mig: str | None = None
    power_w: int | None = None


_SMS, _CLOCK_RATE, _MEMORY_CLOCK_RATE, _BUS_WIDTH, _L2_BYTES = 16, 13, 36, 37, 38
_MAJOR, _MINOR, _SHARED_BYTES = 75, 76, 97
"""``CU_DEVICE_ATTRIBUTE`` numbers; clock rates are in kHz, the bus width is in bits."""


def facts(index: int = 0) -> Facts:
    """Properties of GPU ``index``; raises ``MissingDependency`` where there is no such GPU."""
    cuda = opened()
    available = cuda.count()
    if index >= available:
        raise MissingDependency(f"there is no GPU {index}: this machine has {available}")
    name, mig = split_mig(cuda.name(index))
    return Facts(
        name=name,
        capability=(cuda.attribute(_MAJOR, index), cuda.attribute(_MINOR, index)),
        sms=cuda.attribute(_SMS, index),
        shared_bytes=cuda.attribute(_SHARED_BYTES, index),
        l2_bytes=cuda.attribute(_L2_BYTES, index),
        memory_bytes=cuda.memory_bytes(index),
        bandwidth=2e3 * cuda.attribute(_MEMORY_CLOCK_RATE, index)
        * cuda.attribute(_BUS_WIDTH, index) / 8,
        clock_hz=1e3 * cuda.attribute(_CLOCK_RATE, index),
        mig=mig,
        power_w=_power_limit(cuda.pci_bus_id(index)),
    )  # fmt: skip


def split_mig(name: str) -> tuple[str, str | None]:
    """The driver's name for a GPU without the MIG profile, and the profile or None.

    ``("NVIDIA H100 80GB HBM3", "1g.10gb")`` for ``"NVIDIA H100 80GB HBM3 MIG 1g.10gb"``.
    """
    match = re.fullmatch(r"(?P<name>.*?)\s+MIG\s+(?P<mig>\S+)", name)
    return (match["name"], match["mig"]) if match else (name, None)


def _power_limit(pci_bus_id: str) -> int | None:
    """The enforced power limit in watts; None on a MIG slice and without NVML."""
    try:
        from cuda.bindings import nvml
    except ImportError:
        return None
    try:
        nvml.init_v2()
        handle = nvml.device_get_handle_by_pci_bus_id_v2(pci_bus_id)
        return round(nvml.device_get_enforced_power_limit(handle) / 1000)
    except (RuntimeError, AttributeError, nvml.NvmlError):
        return None

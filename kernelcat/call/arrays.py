"""Arrays of torch, CuPy and other libraries behind one interface.

torch and CuPy arrays are used as they are. Arrays of other DLPack producers (JAX) become CuPy views
for the call, and results return through the producer's own ``from_dlpack``. No array library is
imported before a call has an array of that library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from kernelcat.call import torch_guards
from kernelcat.errors import InvalidArgument, MissingDependency

ALIGNMENT = 16
"""Bytes. Kernels may assume that every array starts at a multiple of this (TMA, vector loads)."""

Key = tuple[Any, ...]
"""A hashable signature of arrays."""
Scan = Callable[[Iterable[Any]], tuple[Key, list[int]]]


@dataclass(frozen=True)
class ArrayInfo:
    """Description of an array.

    Attributes
    ----------
    pointer : address of the first element; 0 for an array without memory (empty, meta)
    strides : in elements
    dtype : element type by name (``bfloat16``)
    device : ``cuda:0``, ``cpu``, ``meta`` ...
    library : ``torch``, ``cupy``, ``numpy``, or the module of another DLPack producer
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    library: str

    @property
    def cuda_index(self) -> int | None:
        """Index of the array's GPU; None for an array that is on no GPU."""
        kind, _, index = self.device.partition(":")
        return int(index or 0) if kind == "cuda" else None

    @property
    def aligned(self) -> bool:
        """Whether the array starts at a multiple of :data:`ALIGNMENT`."""
        return self.pointer % ALIGNMENT == 0

    @property
    def contiguous(self) -> bool:
        """Whether the array is row-major without gaps; strides of axes of extent 1 do not count."""
        step = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != step and 0 not in self.shape:
                return False
            step *= extent
        return True


class Library(Protocol):
    """The operations of an array library that dispatch uses."""

    name: str

    def scan(self, arrays: Iterable[Any], /) -> tuple[Key, list[int]]:
        """One hashable key for all arrays, and the address of each (0 for None).

        For each array the key holds the key of the arrays before, and the array's type, shape,
        layout (True where contiguous, else strides), element type, device, whether it requires a
        gradient, and its address modulo :data:`ALIGNMENT`; None alone stands for an absent array.
        Nested pairs instead of one flat tuple make ``scan``, which is on the fast path, a sixth
        faster.
        ``scan`` may raise an exception of :data:`fast_path.EXPECTED_ERRORS` for arrays of another
        library; the slow path then makes the error message.
        """
        ...

    def matcher(self, arrays: Sequence[Any]) -> Callable[..., bool] | None:
        """``matches(*others)``: whether ``scan`` would return the same key as for ``arrays``.

        ``matches`` is faster than ``scan`` and ignores the alignment. None where the library has
        no such function.
        """
        ...

    def addresses(self, arrays: Iterable[Any], /) -> list[int]:
        """Addresses of arrays; raises ``InvalidArgument`` for an array that is not aligned."""
        ...

    def describe(self, array: Any) -> ArrayInfo:
        """Description of an array of this library."""
        ...

    def allocator(self, shape: tuple[int, ...], dtype: str, device: int) -> Callable[[], Any]:
        """A function that allocates an array of this shape and element type on GPU ``device``."""
        ...

    def stream(self) -> Callable[[int], int]:
        """A function ``current(device)``: the handle of the caller's current stream on that GPU."""
        ...

    def copy(self, array: Any) -> Any:
        """A contiguous, aligned copy, made on the current stream."""
        ...

    def assign(self, target: Any, source: Any) -> None:
        """Copy ``source`` into ``target``, on the current stream."""
        ...

    def address(self, array: Any) -> int: ...


def describe(array: Any) -> ArrayInfo:
    """Description of an array of torch, CuPy or NumPy, on any device.

    Raises
    ------
    InvalidArgument
        ``array`` is of another type. The message lacks the array's name, which the caller puts in
        front. Other DLPack arrays go through :func:`from_dlpack` first.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, numpy.ndarray):
        return _describe_numpy(array)
    return library_of(array).describe(array)


def library_of(array: Any) -> Library:
    """The library of ``array``, torch or CuPy; raises ``InvalidArgument`` like :func:`describe`."""
    for name, cls, library in (("torch", "Tensor", torch), ("cupy", "ndarray", cupy)):
        module = sys.modules.get(name)
        if module is not None and isinstance(array, getattr(module, cls)):
            return library()
    raise InvalidArgument(
        f"must be an array (torch, CuPy, or another with __dlpack__), not {type(array).__name__}"
    )


def is_foreign(array: Any) -> bool:
    """Whether ``array`` is a DLPack array, but of neither torch, CuPy nor NumPy (JAX)."""
    if not hasattr(type(array), "__dlpack__"):
        return False
    for name, cls in (("torch", "Tensor"), ("cupy", "ndarray"), ("numpy", "ndarray")):
        module = sys.modules.get(name)
        if module is not None and isinstance(array, getattr(module, cls)):
            return False
    return True


def is_wrapper(array: Any) -> bool:
    """Whether ``array`` is a tensor of a torch subclass without memory (fake, traced, DTensor)."""
    module = sys.modules.get("torch")
    return (
        module is not None
        and isinstance(array, module.Tensor)
        and type(array) not in (module.Tensor, module.nn.Parameter)
    )


def from_dlpack(array: Any) -> Any:
    """A CuPy view of a foreign array, ready on CuPy's current stream.

    Raises
    ------
    InvalidArgument
        The array is not on a CUDA device. The caller puts the array's name in front of the message.
    MissingDependency
        CuPy is not installed.
    """
    kind, _ = array.__dlpack_device__()
    if int(kind) not in (2, 13):  # kDLCUDA, kDLCUDAManaged
        raise InvalidArgument("is on the CPU; move it to a CUDA device")
    try:
        import cupy
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"arrays of {type(array).__module__} need CuPy: pip install 'kernelcat[cupy]'"
        ) from error
    return cupy.from_dlpack(array)


def to_producer(array: Any, like: Any) -> Any:
    """A CuPy array as an array of the library of ``like``, by that library's ``from_dlpack``."""
    if hasattr(like, "__array_namespace__"):
        return like.__array_namespace__().from_dlpack(array)
    producer = sys.modules[type(like).__module__.partition(".")[0]]
    if not hasattr(producer, "from_dlpack"):
        raise InvalidArgument(f"{producer.__name__} has no from_dlpack; pass CuPy or torch arrays")
    return producer.from_dlpack(array)


def synchronize(array: Any) -> None:
    """Wait until CuPy's current stream on the GPU of ``array`` has finished its work."""
    with array.device:
        cupy().cupy.cuda.get_current_stream().synchronize()


def fixed_stream(stream: Any) -> Callable[[int], int]:
    """A function ``current(device)`` that always returns the handle of ``stream``."""
    handle = stream_handle(stream)
    return lambda device: handle


def stream_handle(stream: Any) -> int:
    """The CUstream handle of a torch, CuPy or ``__cuda_stream__`` stream, or of an int.

    Raises
    ------
    InvalidArgument
        ``stream`` is of another type.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    for attribute in ("cuda_stream", "ptr"):
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    raise InvalidArgument(
        f"stream must be a torch, CuPy or cuda.core stream or a handle, not {type(stream).__name__}"
    )


def family(key: Key) -> tuple[Key, list[tuple[int, ...] | None]]:
    """What a key of ``scan`` says but sizes, hashable, and the shape of each array.

    None stands for an absent array. Raises ``InvalidArgument`` for an array that is not contiguous
    and aligned.
    """
    facts: list[Any] = []
    shapes: list[tuple[int, ...] | None] = []
    while key:
        if key[1] is None:
            key, _ = key
            facts.append(None)
            shapes.append(None)
            continue
        key, kind, shape, layout, dtype, device, needs_grad, offset = key
        if layout is not True or offset:
            raise InvalidArgument("is not aligned, or not contiguous")
        facts += (kind, dtype, device, needs_grad)
        shapes.append(shape)
    shapes.reverse()
    return tuple(facts), shapes


class Torch:
    """The library torch."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self._guards = torch_guards.find(torch)

    def matcher(self, arrays: Sequence[Any]) -> Callable[..., bool] | None:
        return torch_guards.make(self._guards, arrays) if self._guards is not None else None

    def addresses(self, arrays: Iterable[Any], /) -> list[int]:
        pointers = []
        for x in arrays:
            pointer = x.data_ptr()
            if pointer % ALIGNMENT:
                raise InvalidArgument("is not aligned")
            pointers.append(pointer)
        return pointers

    def scan(self, arrays: Iterable[Any], /) -> tuple[Key, list[int]]:
        key: Key = ()
        pointers: list[int] = []
        for x in arrays:
            if x is None:
                key = (key, None)
                pointers.append(0)
                continue
            pointer = x.data_ptr()
            pointers.append(pointer)
            layout = x.is_contiguous() or x.stride()
            key = (
                key, type(x), x.shape, layout, x.dtype, x.get_device(), x.requires_grad,
                pointer % ALIGNMENT,
            )  # fmt: skip
        return key, pointers

    def describe(self, array: Any) -> ArrayInfo:
        if array.layout is not self.torch.strided:
            raise InvalidArgument(f"is a {array.layout} tensor; pass one with .to_dense()")
        has_memory = not is_wrapper(array) and array.device.type != "meta"
        return ArrayInfo(
            array.data_ptr() if has_memory else 0,
            tuple(array.shape),
            tuple(array.stride()),
            str(array.dtype).removeprefix("torch."),
            str(array.device),
            self.name,
        )

    def allocator(self, shape: tuple[int, ...], dtype: str, device: int) -> Callable[[], Any]:
        torch = self.torch
        element, gpu = getattr(torch, dtype), torch.device("cuda", device)
        return lambda: torch.empty(shape, dtype=element, device=gpu)

    def stream(self) -> Callable[[int], int]:
        # This private function takes 0.1 us, torch.cuda.current_stream(device).cuda_stream 4 us.
        current: Callable[[int], int] = self.torch._C._cuda_getCurrentRawStream
        return current

    def copy(self, array: Any) -> Any:
        return array.clone(memory_format=self.torch.contiguous_format)

    def assign(self, target: Any, source: Any) -> None:
        target.copy_(source)

    def address(self, array: Any) -> int:
        return int(array.data_ptr())


class Cupy:
    """The library CuPy. CuPy's bfloat16 is ``ml_dtypes.bfloat16`` (since CuPy 14)."""

    name = "cupy"

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy

    def matcher(self, arrays: Sequence[Any]) -> None:
        return None

    def addresses(self, arrays: Iterable[Any], /) -> list[int]:
        pointers = [x.data.ptr for x in arrays]
        if any(pointer % ALIGNMENT for pointer in pointers):
            raise InvalidArgument("is not aligned")
        return pointers

    def scan(self, arrays: Iterable[Any], /) -> tuple[Key, list[int]]:
        key: Key = ()
        pointers: list[int] = []
        for x in arrays:
            if x is None:
                key = (key, None)
                pointers.append(0)
                continue
            data = x.data
            pointer = data.ptr
            pointers.append(pointer)
            layout = x.flags.c_contiguous or x.strides
            key = (
                key, type(x), x.shape, layout, x.dtype, data.device_id, False, pointer % ALIGNMENT,
            )  # fmt: skip
        return key, pointers

    def describe(self, array: Any) -> ArrayInfo:
        item = array.dtype.itemsize
        return ArrayInfo(
            array.data.ptr,
            array.shape,
            tuple(stride // item for stride in array.strides),
            array.dtype.name,
            f"cuda:{array.data.device_id}",
            self.name,
        )

    def allocator(self, shape: tuple[int, ...], dtype: str, device: int) -> Callable[[], Any]:
        cupy, element, gpu = self.cupy, numpy_dtype(dtype), self.cupy.cuda.Device(device)

        def allocate() -> Any:
            with gpu:
                return cupy.empty(shape, element)

        return allocate

    def stream(self) -> Callable[[int], int]:
        current = self.cupy.cuda.get_current_stream
        return lambda device: current(device).ptr

    def copy(self, array: Any) -> Any:
        with array.device:
            return array.copy(order="C")

    def assign(self, target: Any, source: Any) -> None:
        target[...] = source

    def address(self, array: Any) -> int:
        return int(array.data.ptr)


def _describe_numpy(array: Any) -> ArrayInfo:
    item = max(array.dtype.itemsize, 1)
    strides = tuple(stride // item for stride in array.strides)
    pointer = int(array.__array_interface__["data"][0])
    return ArrayInfo(pointer, array.shape, strides, array.dtype.name, "cpu", "numpy")


def numpy_dtype(name: str) -> Any:
    """The dtype called ``name`` in NumPy, or in ml_dtypes where NumPy has none."""
    import numpy

    if hasattr(numpy, name):
        return numpy.dtype(name)
    import ml_dtypes

    return numpy.dtype(getattr(ml_dtypes, name))


@cache
def torch() -> Torch:
    """The library torch; imports torch."""
    return Torch()


@cache
def cupy() -> Cupy:
    """The library CuPy; imports CuPy."""
    return Cupy()

"""Triton's interpreter: runs programs of Triton steps on NumPy arrays, without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kernelcat import dtypes
from kernelcat.catalog.implementation import Pointer, Program, Step, TensorMap
from kernelcat.catalog.spec import Arrays
from kernelcat.errors import Unsupported
from kernelcat.jit.triton import NAMES, TritonSource, parse_descriptor


def interpret(program: Program, arrays: Arrays) -> None:
    """Run ``program`` on storage arrays by tensor name, in place. Workspaces start as zeros.

    The process must have been started with ``TRITON_INTERPRET=1``.

    Raises
    ------
    Unsupported
        A step is not written in Triton.
    """
    memory = dict(arrays)
    for name, size in program.workspaces.items():
        memory[name] = np.zeros(size, np.uint8)
    with true_floats(), patched_once(), described_once(), launched_in_order():
        for step in program.steps:
            source = step.source
            if not isinstance(source, TritonSource):
                raise Unsupported(f"only Triton steps can be interpreted, not {source.language}")
            x, y, z = step.grid
            kernel = source.function()[x // step.cluster[0], y, z]
            kernel(**_bind(step, source, memory), **source.constants)


def _bind(step: Step, source: TritonSource, memory: Mapping[str, Any]) -> dict[str, Any]:
    """Argument name -> value for the interpreter, from the step's flat list of parameters."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    source.verify_order()
    params: Iterator[Any] = iter(step.params)
    bound: dict[str, Any] = {}
    for name, type_name in source.signature.items():
        param = next(params)
        if isinstance(param, Pointer):
            bound[name] = _typed(memory.get(param.tensor), NAMES[type_name.removeprefix("*")])
        elif isinstance(param, TensorMap):
            dtype, block = parse_descriptor(type_name)
            rows, cols, row_stride, col_stride = (next(params).value for _ in range(4))
            base = _typed(memory[param.tensor], dtype)
            bound[name] = TensorDescriptor(
                base, [rows, cols], [row_stride, col_stride], list(block)
            )
        else:
            bound[name] = param.value
    return bound


def _typed(array: Any, dtype: str) -> HostTensor | None:
    """``array`` with element type ``dtype``; None (a null pointer) for None."""
    return None if array is None else HostTensor(array, ElementName(dtype))


class ElementName(str):
    """The name of an element type, in place of torch's ``dtype``."""

    @property
    def itemsize(self) -> int:
        return dtypes.itemsize(self)


class HostTensor:
    """The memory of a NumPy array with the methods of torch's tensors that the interpreter calls.

    The interpreter copies tensors from a GPU and back. Memory of the host stays where it is.
    """

    def __init__(self, array: Any, dtype: ElementName) -> None:
        self.array, self.dtype = array, dtype

    def data_ptr(self) -> int:
        return int(self.array.__array_interface__["data"][0])

    def untyped_storage(self) -> HostTensor:
        return self

    def cpu(self) -> HostTensor:
        return self

    def new_empty(self, size: int, device: str) -> HostTensor:
        return self

    def set_(self, storage: HostTensor, *place: Any) -> None:
        assert storage.data_ptr() == self.data_ptr()

    def storage_offset(self) -> int:
        return 0

    def size(self) -> Any:
        return self.array.shape

    def stride(self) -> Any:
        return self.array.strides

    def copy_(self, storage: HostTensor) -> None:
        assert storage.data_ptr() == self.data_ptr()


@contextlib.contextmanager
def patched_once() -> Iterator[None]:
    """Spare the interpreter work that it repeats in every call of a device function.

    A kernel's launch replaces the functions of ``triton.language`` by interpreted ones. Each call
    of a device function searches the modules again, for functions that are replaced already.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch_modules = interpreter._patch_lang
    patched: set[int] = set()

    def patch(function: Any) -> Any:
        modules = {id(m) for m in function.__globals__.values() if m is tl or m is tl.core}
        if modules and modules <= patched:
            return None  # a device function; only the scope of a launch is used
        is_launch = not patched
        scope = patch_modules(function)
        patched.update(modules)
        if is_launch and scope is not None:
            scope.restore = _then(scope.restore, patched.clear)
        return scope

    interpreter._patch_lang = patch
    try:
        yield
    finally:
        interpreter._patch_lang = patch_modules


@contextlib.contextmanager
def described_once() -> Iterator[None]:
    """Make the interpreter check and describe each type once, not in every operation.

    An operation makes a tensor and the type of its block anew, and looks NumPy's type up in a
    table that it makes anew too. That takes a third of the interpreter's time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    find_dtype = interpreter._get_np_dtype
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}
    found: dict[str, Any] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        attributes = types.get((element_ty.name, sizes))
        if attributes is None:
            make_type(self, element_ty, shape)
            self.sizes = sizes
            types[element_ty.name, sizes] = dict(vars(self))
        else:
            vars(self).update(attributes)
            self.element_ty = element_ty

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = vars(type).get("sizes") if type.is_block() else ()
        described = shapes.get(sizes)
        if described is None:
            make_tensor(self, handle, type)
            if sizes is not None:  # else the type was made by make_type
                shapes[sizes] = self.numel, self.shape
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = described

    def np_dtype(type: Any) -> Any:
        if type.name not in found:
            found[type.name] = find_dtype(type)
        return found[type.name]

    tl.block_type.__init__, tl.tensor.__init__ = init_type, init_tensor
    interpreter._get_np_dtype = np_dtype
    try:
        yield
    finally:
        tl.block_type.__init__, tl.tensor.__init__ = make_type, make_tensor
        interpreter._get_np_dtype = find_dtype


def _then(first: Any, second: Any) -> Any:
    """A function that calls ``first`` and ``second``."""

    def both() -> None:
        first()
        second()

    return both


NARROW = {"bf16": "bfloat16", "fp8e4nv": "float8_e4m3fn"}
"""Triton's name -> kernelcat's name, of float types that the interpreter stores as integers."""

_NAN: dict[str, Any] = {"bfloat16": np.uint16(0x7FC0), "float8_e4m3fn": np.uint8(0x7F)}
"""Bits of the NaN that a GPU's conversions give."""


@contextlib.contextmanager
def true_floats() -> Iterator[None]:
    """Make the interpreter compute with narrow float types as a GPU does, for a ``with`` block.

    In Triton up to 3.9 the interpreter's ``tl.dot`` and ``*`` multiply the integers that hold
    bfloat16 values, its conversions from float32 truncate, and its ``tl.dot_scaled`` takes every
    scale for a power of two.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    scale_to_f32: Any = getattr(interpreter, "_dot_scaled_scale_to_f32", None)  # since 3.9
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot
    multiply = interpreter.InterpreterBuilder.create_fmul

    def exact_convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.name in NARROW:
            data, source = _decode(data, NARROW[source.name]), tl.float32
        if source == target:
            return data
        if source == tl.float32 and target.name in NARROW:
            return _encode(data.view(np.float32), NARROW[target.name])
        return convert(data, source, target, rounding)

    def widened_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return dot(self, _widen(a, tl), _widen(b, tl), *more)

    def widened_multiply(self: Any, a: Any, b: Any) -> Any:
        name = a.dtype.scalar.name
        product = multiply(self, _widen(a, tl), _widen(b, tl))
        return product if name not in NARROW else _narrowed(product, a.dtype, NARROW[name])

    def scale_values(handle: Any, compute_type: Any) -> Any:
        if handle.dtype.scalar.name in NARROW:
            return _decode(handle.data, NARROW[handle.dtype.scalar.name])
        return scale_to_f32(handle, compute_type)

    if scale_to_f32 is not None:
        interpreter._dot_scaled_scale_to_f32 = scale_values
    interpreter._convert_float = exact_convert
    interpreter.InterpreterBuilder.create_dot = widened_dot
    interpreter.InterpreterBuilder.create_fmul = widened_multiply
    try:
        yield
    finally:
        if scale_to_f32 is not None:
            interpreter._dot_scaled_scale_to_f32 = scale_to_f32
        interpreter._convert_float = convert
        interpreter.InterpreterBuilder.create_dot = dot
        interpreter.InterpreterBuilder.create_fmul = multiply


@contextlib.contextmanager
def launched_in_order() -> Iterator[None]:
    """Let a kernel's waits for the kernels before it pass: the interpreter runs one at a time."""
    from triton.language.extra import cuda

    names = ("gdc_wait", "gdc_launch_dependents")
    originals = {name: getattr(cuda, name) for name in names}
    for name in names:
        setattr(cuda, name, lambda: None)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(cuda, name, original)


def _widen(handle: Any, tl: Any) -> Any:
    """A tensor of a narrow float type as float32; any other tensor unchanged."""
    from triton.runtime.interpreter import TensorHandle

    name = handle.dtype.scalar.name
    if name not in NARROW:
        return handle
    return TensorHandle(_decode(handle.data, NARROW[name]), tl.float32)


def _narrowed(handle: Any, dtype: Any, name: str) -> Any:
    """A float32 tensor rounded to the narrow float type ``name``, Triton's ``dtype``."""
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(_encode(handle.data, name), dtype)


def _decode(data: Any, dtype: str) -> Any:
    return dtypes.decode(data.view(dtypes.STORAGE[dtype]), dtype)


def _encode(values: Any, dtype: str) -> Any:
    missing = np.isnan(values)
    rounded = dtypes.encode(np.where(missing, np.float32(0), values), dtype)
    return np.where(missing, _NAN[dtype], rounded)

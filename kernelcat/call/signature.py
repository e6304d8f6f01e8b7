"""From the arguments of a call to a problem: names, ranks, shapes, strides and element types.

Every error message is one line that names the array, the property found and the property required.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kernelcat.call import arrays
from kernelcat.call.arrays import ArrayInfo
from kernelcat.catalog.spec import AxisValue, Derived, ElementType, Entry, Problem, Tensor
from kernelcat.dtypes import itemsize
from kernelcat.errors import InvalidArgument, nearest

Infos = Mapping[str, ArrayInfo]
"""Tensor name -> description of the array; absent tensors are left out."""


def arrange(
    entry: Entry, args: Sequence[Any], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, AxisValue]]:
    """Arguments in the order of ``entry.inputs`` (None where absent), and axis values.

    A keyword names an input, or an axis that no array determines (``causal=True``).

    Raises
    ------
    InvalidArgument
        Too many arrays, an unknown keyword, an argument given twice, or a missing array.
    """
    inputs = [tensor.name for tensor in entry.inputs]
    if len(args) > len(inputs):
        raise InvalidArgument(
            f"{entry.name} takes at most {len(inputs)} arrays ({', '.join(inputs)}), "
            f"not {len(args)}; pass the output as out="
        )
    placed = dict(zip(inputs, args, strict=False))
    axes: dict[str, AxisValue] = {}
    for name, value in named.items():
        if name in placed:
            raise InvalidArgument(f"{entry.name}: {name} is given twice, by position and by name")
        if name in inputs:
            placed[name] = value
        elif name in entry.axis_names:
            axes[name] = value
        else:
            known = list(dict.fromkeys((*inputs, *entry.axis_names, "out")))
            raise InvalidArgument(f"{entry.name} has no argument {name!r}{nearest(name, known)}")
    missing = [t.name for t in entry.inputs if t.flag is None and placed.get(t.name) is None]
    if missing:
        raise InvalidArgument(f"{entry.name} needs {' and '.join(missing)} (arrays)")
    if all(placed.get(name) is None for name in inputs):
        raise InvalidArgument(f"{entry.name} needs arrays, some of {', '.join(inputs)}")
    return tuple(placed.get(name) for name in inputs), axes


def outputs(entry: Entry, out: Any) -> tuple[Any, ...]:
    """``out=`` as a tuple with one array for each output; empty when the call allocates outputs.

    None stands for an optional output that is absent.

    Raises
    ------
    InvalidArgument
        The number of arrays is wrong, or an output that the entry always updates is not passed.
    """
    names = ", ".join(tensor.name for tensor in entry.outputs)
    required = [tensor for tensor in entry.updated if tensor.flag is None]
    if out is None and required:
        updated = " and ".join(label(entry, tensor) for tensor in required)
        raise InvalidArgument(f"{entry.name} updates {updated} in place: pass out=({names})")
    if out is None:
        return ()
    if len(entry.outputs) == 1:
        return (out,)
    if not isinstance(out, (tuple, list)) or len(out) != len(entry.outputs):
        raise InvalidArgument(f"{entry.name}: out must be a tuple of {names}")
    return tuple(out)


def label(entry: Entry, tensor: Tensor) -> str:
    """The name of a tensor in messages: ``out`` for the only output, as in the call."""
    return "out" if entry.outputs == (tensor,) else tensor.name


def describe(entry: Entry, inputs: Sequence[Any], outs: Sequence[Any]) -> dict[str, ArrayInfo]:
    """Tensor name -> description of its array; absent tensors are left out.

    Raises
    ------
    InvalidArgument
        An argument is no array of torch, CuPy or NumPy.
    """
    operands = {**dict(zip(entry.inputs, inputs, strict=True)), **dict(zip(entry.outputs, outs))}  # noqa: B905
    infos = {}
    for tensor, array in operands.items():
        if array is None:
            continue
        try:
            infos[tensor.name] = arrays.describe(array)
        except InvalidArgument as error:
            raise InvalidArgument(f"{entry.name}: {label(entry, tensor)} {error}") from None
    return infos


def device_of(entry: Entry, infos: Infos) -> int:
    """The index of the GPU that all arrays are on.

    Raises
    ------
    InvalidArgument
        An array is not on a GPU, or arrays are on different GPUs or of different libraries.
    """
    first: str | None = None
    for tensor in entry.tensors:
        if tensor.name not in infos:
            continue
        info, name = infos[tensor.name], label(entry, tensor)
        if info.device == "cpu":
            raise InvalidArgument(
                f"{entry.name}: {name} is on the CPU; move it to a CUDA device, or "
                f'call the oracle, kernelcat.reference("{entry.name}")'
            )
        if info.cuda_index is None:
            raise InvalidArgument(
                f"{entry.name}: {name} is on {info.device!r}; move it to a CUDA device"
            )
        if first is None:
            first, library, device = name, info.library, info.device
        if info.device != device:
            raise InvalidArgument(
                f"{entry.name}: {first} is on {device} but {name} is on {info.device}; "
                "move them to one device"
            )
        if info.library != library:
            raise InvalidArgument(
                f"{entry.name}: {first} is a {library} array but {name} is a {info.library} "
                "array; pass arrays of one library"
            )
    index = ArrayInfo(0, (), (), "", device, library).cuda_index
    assert index is not None
    return index


def infer(entry: Entry, infos: Infos, axes: Mapping[str, AxisValue]) -> Problem:
    """The problem that these arrays and keywords stand for.

    An axis that occurs only in an output's strides is read from ``out``; where the call allocates
    the output, the axis takes the stride of a contiguous array. The flag of an optional output that
    the entry updates is True where ``out`` has the output.

    Raises
    ------
    InvalidArgument
        Wrong rank, sizes or element types that disagree, an unsupported element type, strides
        that no implementation supports, or an axis that neither an array nor a keyword determines.
    """
    axis_values = _AxisValues(entry)
    for name, value in axes.items():
        axis_values.add(name, value, f"{name}=")
    for tensor in entry.inputs:
        present = tensor.name in infos
        if tensor.flag is not None and tensor.when is True:
            axis_values.add(tensor.flag, present, tensor.name)
        if present:
            _read(axis_values, tensor, infos[tensor.name])
    for tensor in entry.outputs:
        if tensor.updated and tensor.flag is not None and tensor.when is True:
            axis_values.add(tensor.flag, tensor.name in infos, tensor.name)
        if tensor.name in infos:
            _read(axis_values, tensor, infos[tensor.name])
        else:
            _allocate(axis_values, tensor)
    problem = entry.problem(**axis_values.values)
    for tensor in (*entry.inputs, *entry.updated):
        _check_presence(entry, tensor, tensor.name in infos, problem)
    for tensor in entry.tensors:
        if tensor.name in infos:
            _check_derived(entry, tensor, infos[tensor.name], problem)
            _check_dtype(entry, tensor, infos[tensor.name], problem)
    return problem


def _check_presence(entry: Entry, tensor: Tensor, is_passed: bool, problem: Problem) -> None:
    if tensor.flag is not None and is_passed != tensor.present(problem):
        verb, value = "takes no" if is_passed else "needs", problem[tensor.flag]
        raise InvalidArgument(f"{entry.name} {verb} {tensor.name} where {tensor.flag} is {value}")


def _check_derived(entry: Entry, tensor: Tensor, info: ArrayInfo, problem: Problem) -> None:
    expected = tensor.shape_of(problem)
    for position, size in enumerate(tensor.shape):
        if isinstance(size, Derived) and info.shape[position] != expected[position]:
            raise InvalidArgument(
                f"{entry.name}: {label(entry, tensor)}.shape[{position}] must be "
                f"{expected[position]} ({size}), not {info.shape[position]}"
            )


def _check_dtype(entry: Entry, tensor: Tensor, info: ArrayInfo, problem: Problem) -> None:
    expected = tensor.dtype_of(problem)
    if info.dtype != expected:
        name = label(entry, tensor)
        raise InvalidArgument(f"{entry.name}: {name} must be {expected} here, not {info.dtype}")


class _AxisValues:
    """Axis values read so far, and the argument that each value was read from."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.values: dict[str, AxisValue] = {}
        self._origins: dict[str, str] = {}

    def add(self, axis: str | int, value: AxisValue, origin: str) -> None:
        """Set ``axis`` to the ``value`` read from ``origin``, or check an axis that is set.

        ``axis`` may be a number: then ``value`` must equal that number.
        """
        if axis not in self.values and isinstance(axis, str) and axis in self.entry.axis_names:
            self.values[axis] = self.entry.axis(axis).take(value)
            self._origins[axis] = origin
        elif axis in self.values:
            earlier = self.values[axis]  # type: ignore[index]
            if earlier != value:
                raise InvalidArgument(
                    f"{self.entry.name}: {axis} differs: {self._origins[axis]} is {earlier}, "  # type: ignore[index]
                    f"but {origin} is {value}"
                )
        elif axis != value:
            raise InvalidArgument(f"{self.entry.name}: {origin} must be {axis}, not {value}")


def _read(axes: _AxisValues, tensor: Tensor, info: ArrayInfo) -> None:
    """Read axes from an array's element type, shape and strides."""
    entry, name = axes.entry, label(axes.entry, tensor)
    if len(info.shape) != len(tensor.shape):
        sizes = ", ".join(map(str, tensor.shape))
        raise InvalidArgument(
            f"{entry.name}: {name} must have {len(tensor.shape)} dimensions ({sizes}), "
            f"not {len(info.shape)} (its shape is {info.shape})"
        )
    _read_dtype(axes, tensor, info)
    for position, (axis, extent) in enumerate(zip(tensor.shape, info.shape, strict=True)):
        if not isinstance(axis, Derived):
            axes.add(axis, extent, f"{name}.shape[{position}]")
        elif axis.tells is not None:
            name_of_axis, invert = axis.tells
            origin = f"{name_of_axis} of {name} ({axis} = {extent})"
            axes.add(name_of_axis, invert(extent, axes.values), origin)
    if tensor.strides is None:
        if not info.contiguous:
            raise InvalidArgument(
                f"{entry.name}: {name} is not contiguous (shape {info.shape}, strides "
                f"{info.strides}); pass {_contiguous_call(name, info)}"
            )
        return
    for position, axis in enumerate(tensor.strides):
        stride = _stride(info, position)
        if isinstance(axis, int) and stride != axis:
            raise InvalidArgument(
                f"{entry.name}: {name} must have stride {axis} along axis {position}, "
                f"not {stride}; pass {_contiguous_call(name, info)}"
            )
        axes.add(axis, stride, f"{name}'s stride along axis {position}")


def _read_dtype(axes: _AxisValues, tensor: Tensor, info: ArrayInfo) -> None:
    entry, name = axes.entry, label(axes.entry, tensor)
    if isinstance(tensor.dtype, ElementType):
        value = tensor.dtype.value_of(info.dtype)
        if value is not None:
            axes.add(tensor.dtype.axis, value, f"{tensor.dtype.axis} of {name} ({info.dtype})")
        elif info.dtype not in dict(tensor.dtype.types).values():
            raise InvalidArgument(f"{entry.name}: {name} is {info.dtype}; use {tensor.dtype}")
    elif tensor.dtype in entry.axis_names:
        legal = entry.axis(tensor.dtype).values
        if info.dtype not in legal:
            raise InvalidArgument(
                f"{entry.name}: {name} is {info.dtype}; use one of: {', '.join(map(str, legal))}"
            )
        axes.add(tensor.dtype, info.dtype, name)
    elif info.dtype != tensor.dtype:
        raise InvalidArgument(f"{entry.name}: {name} must be {tensor.dtype}, not {info.dtype}")


def _allocate(axes: _AxisValues, tensor: Tensor) -> None:
    """Set axes that occur in the strides of an output to the strides of a contiguous output."""
    if tensor.strides is None:
        return
    values = {axis: axes.values.get(axis, 0) for axis in axes.entry.axis_names}
    info = _contiguous_info(tensor.extents(values))
    for position, axis in enumerate(tensor.strides):
        if isinstance(axis, str) and axis not in axes.values:
            axes.add(axis, info.strides[position], f"{tensor.name}'s stride")


def _contiguous_info(shape: tuple[int, ...]) -> ArrayInfo:
    """An array of this shape without gaps; only shape and strides have a meaning."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return ArrayInfo(0, shape, tuple(reversed(strides)), "", "", "")


def _stride(info: ArrayInfo, position: int) -> int:
    """A stride in elements; for an axis of extent 1 or 0, that of a contiguous array."""
    if info.shape[position] <= 1 or 0 in info.shape:
        return _contiguous_info(info.shape).strides[position]
    return info.strides[position]


def _contiguous_call(name: str, info: ArrayInfo) -> str:
    """The expression that makes an array contiguous, for messages."""
    if name == "out":
        return "a contiguous array"
    if info.library == "torch":
        return f"{name}.contiguous()"
    return f"{info.library}.ascontiguousarray({name})"


def overlap(first: ArrayInfo, second: ArrayInfo) -> bool:
    """Whether any byte belongs to both arrays. Exact: gaps between rows do not count."""
    import numpy

    if 0 in first.shape or 0 in second.shape:
        return False
    return bool(numpy.shares_memory(_layout(first), _layout(second)))


def _layout(info: ArrayInfo) -> Any:
    """A NumPy array at the addresses of ``info``, which may lie on a GPU; nobody reads it."""
    import numpy

    item = itemsize(info.dtype)
    interface = {
        "version": 3,
        "shape": info.shape,
        "typestr": f"|V{item}",
        "data": (info.pointer, False),
        "strides": tuple(stride * item for stride in info.strides),
    }
    return numpy.asarray(type("Layout", (), {"__array_interface__": interface})())

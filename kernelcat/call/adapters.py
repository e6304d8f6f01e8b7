"""Calls that cannot run on their arrays as they are: they run on copies, or on views of them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol

from kernelcat.call import arrays
from kernelcat.call.fast_path import refuse_overlap
from kernelcat.catalog.spec import AxisValue, Entry
from kernelcat.errors import InvalidArgument

Arrays = tuple[Any, ...]
Axes = Mapping[str, AxisValue]


class Operator(Protocol):
    """What serves the call once its arrays are such as kernels take."""

    entry: Entry

    def __call__(self, *args: Any, out: Any = None, **named: Any) -> Any: ...


_warned: set[str] = set()


def with_copies(
    op: Operator, library: arrays.Library, inputs: Arrays, outs: Arrays, axes: Axes
) -> Any:
    """Run on aligned copies. Copying once is faster than any kernel on unaligned data."""
    warn_once(
        f"{op.entry.name}: an array starts at an address that is not a multiple of "
        f"{arrays.ALIGNMENT} bytes and is copied at every call"
    )
    if outs:
        refuse_overlap(op.entry, (*inputs, *outs))

    def aligned(array: Any) -> Any:
        return array if array is None or arrays.describe(array).aligned else library.copy(array)

    if not outs:
        return op(*map(aligned, inputs), **axes)
    places = tuple(map(aligned, outs))  # with what they hold: they may be updated
    op(*map(aligned, inputs), out=_packed(places), **axes)
    for target, source in zip(outs, places, strict=True):
        if source is not target:
            library.assign(target, source)
    return _packed(outs)


def _packed(outs: Arrays) -> Any:
    return outs[0] if len(outs) == 1 else outs


def through_dlpack(op: Operator, inputs: Arrays, outs: Arrays, axes: Axes) -> Any:
    """Run on CuPy views of a foreign library's arrays; its own arrays go out.

    Waits for the kernel: the library cannot know that its memory is still being read.
    """
    name = op.entry.name
    if outs:
        raise InvalidArgument(
            f"{name}: out must be a torch or CuPy array, and so must the inputs then; "
            "other DLPack arrays may be read-only"
        )
    views = []
    for tensor, array in zip(op.entry.inputs, inputs, strict=True):
        try:
            views.append(arrays.from_dlpack(array) if arrays.is_foreign(array) else array)
        except InvalidArgument as error:
            raise InvalidArgument(f"{name}: {tensor.name} {error}") from None
    like = next(array for array in inputs if arrays.is_foreign(array))
    result = op(*views, **axes)
    arrays.synchronize(views[0])
    if len(op.entry.outputs) == 1:
        return arrays.to_producer(result, like)
    return tuple(arrays.to_producer(array, like) for array in result)


def warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=2)

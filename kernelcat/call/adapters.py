"""Calls whose arrays kernels cannot take: such calls run on aligned copies or on CuPy views."""

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
    """The operator that is called again, with arrays that kernels can take."""

    entry: Entry

    def __call__(self, *args: Any, out: Any = None, **named: Any) -> Any: ...


_warned: set[str] = set()


def call_with_copies(
    op: Operator, library: arrays.Library, inputs: Arrays, outs: Arrays, axes: Axes
) -> Any:
    """Call ``op`` on aligned copies of unaligned arrays; returns what ``op`` returns.

    Copying once is faster than any kernel would be on unaligned data.
    """
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
    aligned_outs = tuple(map(aligned, outs))  # copies hold the values too: outputs may be updated
    op(*map(aligned, inputs), out=_packed(aligned_outs), **axes)
    for target, source in zip(outs, aligned_outs, strict=True):
        if source is not target:
            library.assign(target, source)
    return _packed(outs)


def _packed(outs: Arrays) -> Any:
    """Outputs in the form of a call's ``out=``: one array, or a tuple of several."""
    return outs[0] if len(outs) == 1 else outs


def call_through_dlpack(op: Operator, inputs: Arrays, outs: Arrays, axes: Axes) -> Any:
    """Call ``op`` on CuPy views of a foreign library's arrays; returns arrays of that library.

    Waits until the kernel has finished: the library cannot know that a kernel reads its memory.

    Raises
    ------
    InvalidArgument
        Outputs are passed in (arrays of other libraries may be read-only), or an input is not on
        a CUDA device.
    """
    name = op.entry.name
    if outs:
        raise InvalidArgument(
            f"{name}: out must be a torch or CuPy array, and all inputs of the call as well; "
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
    arrays.synchronize(next(view for view in views if view is not None))
    if len(op.entry.outputs) == 1:
        return arrays.to_producer(result, like)
    return tuple(a if a is None else arrays.to_producer(a, like) for a in result)


def warn_once(message: str) -> None:
    """Warn, unless this process has given the same warning before."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=2)

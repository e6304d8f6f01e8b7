"""Every entry as a torch custom operator, ``torch.ops.kernelcat.<entry>``, made from its spec.

``torch.ops.kernelcat.gemm(a, b, bias=None)`` returns the output; ``gemm_out(..., out=d)`` writes
it. What updates an output in place has the second form alone. Fake implementations follow from the
symbolic shapes, so ``torch.compile(fullgraph=True)`` and ``torch.export`` keep them with dynamic
sizes. An operator is registered by the first ``kernelcat.get`` or call after torch was imported.
There is no backward pass.

Imported only where torch has been imported already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from kernelcat import catalog
from kernelcat.call import signature
from kernelcat.catalog.spec import Axis, Derived, ElementType, Entry, Tensor

is_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""True while Dynamo traces; a constant to Dynamo, and 40 ns in eager mode."""

_LIBRARY = torch.library.Library("kernelcat", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


Find = Callable[[str, str], Callable[..., Any]]
"""From an entry's name and the text of a pin to the operator that serves a call."""


def register(entry: Entry, pin: str, find: Find) -> Callable[..., Any]:
    """The operator of ``entry``, registered once: ``traced(*inputs, out=None, **axes)``.

    ``pin`` is the text of what the caller of ``get`` insists on; it travels in the graph, and
    ``find`` gets back from it to the operator when the graph runs.
    """
    fresh, into = _define(entry.name, find)

    def traced(*inputs: Any, out: Any = None, **more: Any) -> Any:
        if out is None:
            return fresh(*inputs, **more, pin=pin)
        into(*inputs, **more, **_named_outputs(entry, out), pin=pin)
        return out

    return traced


def schema(entry: Entry, *, mutating: bool = False) -> str:
    """The operator's signature in torch's schema language, without its name.

    >>> schema(gemm)
    '(Tensor a, Tensor b, Tensor? bias=None, *, str pin="") -> Tensor'
    """
    arguments = [
        f"Tensor? {tensor.name}=None" if tensor.flag else f"Tensor {tensor.name}"
        for tensor in entry.inputs
    ]
    arguments.append("*")
    arguments += map(_keyword, told_axes(entry))
    if mutating:
        names = [_out_name(entry, tensor) for tensor in entry.outputs]
        arguments += [f"Tensor({chr(97 + i)}!) {name}" for i, name in enumerate(names)]
    arguments.append('str pin=""')
    kinds = ["Tensor"] * len(entry.outputs)
    result = "()" if mutating else kinds[0] if len(kinds) == 1 else f"({', '.join(kinds)})"
    return f"({', '.join(arguments)}) -> {result}"


def told_axes(entry: Entry) -> list[Axis]:
    """Axes that no array of every call tells and no output's strides mean: keywords of the call."""
    read: set[Any] = set()
    for tensor in entry.drawn:
        sizes = [s.tells[0] if isinstance(s, Derived) and s.tells else s for s in tensor.shape]
        read |= {*sizes, *(tensor.strides or ()), _choice_told(tensor)}
        if tensor.when is True:
            read.add(tensor.flag)
    for tensor in entry.outputs:
        read |= set(tensor.strides or ())
    return [axis for axis in entry.axes if axis.name not in read]


def _choice_told(tensor: Tensor) -> str | None:
    """The axis that an array's element type tells."""
    if isinstance(tensor.dtype, ElementType):
        return tensor.dtype.axis if tensor.dtype.tells else None
    return tensor.dtype


@cache
def _define(name: str, find: Find) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Register both forms of an entry's operator, once; returns them.

    Where an output is updated in place, the first one only refuses.
    """
    entry, into, namespace = catalog.entry(name), f"{name}_out", torch.ops.kernelcat
    _LIBRARY.define(into + schema(entry, mutating=True), tags=_TAGS)
    _LIBRARY.impl(into, lambda *given, **named: _run_into(entry, find, given, named), "CUDA")
    torch.library.register_fake(
        f"kernelcat::{into}", lambda *inputs, pin="", **named: None, lib=_LIBRARY
    )
    writes = getattr(namespace, into).default
    if entry.updated:
        return lambda *inputs, **named: signature.outputs(entry, None), writes
    _LIBRARY.define(name + schema(entry), tags=_TAGS)
    _LIBRARY.impl(name, lambda *given, **named: _run(entry, find, given, named), "CUDA")
    torch.library.register_fake(
        f"kernelcat::{name}",
        lambda *inputs, pin="", **axes: _fake(entry, inputs, axes),
        lib=_LIBRARY,
    )
    return getattr(namespace, name).default, writes


def _run(entry: Entry, find: Find, inputs: Sequence[Any], named: dict[str, Any]) -> Any:
    op = find(entry.name, named.pop("pin", ""))
    return op(*map(_plain, inputs), **_by_name(named))


def _run_into(entry: Entry, find: Find, inputs: Sequence[Any], named: dict[str, Any]) -> None:
    outs = tuple(named.pop(_out_name(entry, tensor)) for tensor in entry.outputs)
    named["out"] = _plain(outs[0]) if len(outs) == 1 else tuple(map(_plain, outs))
    _run(entry, find, inputs, named)


def _by_name(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in named.items()}


def _plain(value: Any) -> Any:
    """A subclass without behaviour of its own as the tensor it is."""
    if isinstance(value, torch.Tensor) and type(value) is not torch.Tensor:
        return value.as_subclass(torch.Tensor)
    return value


def _fake(entry: Entry, inputs: Sequence[Any], told: Mapping[str, Any]) -> Any:
    """Outputs without data, from symbolic sizes; sizes that must agree are checked to."""
    axes: dict[str, Any] = {**entry.defaults, **told}
    given = [
        (tensor, array)
        for tensor, array in zip(entry.inputs, inputs, strict=False)
        if array is not None
    ]
    for tensor, array in given:
        _bind_axes(entry, tensor, array, axes)
    for tensor, array in given:
        _check_derived(entry, tensor, array, axes)
    like = inputs[0]
    made = tuple(
        like.new_empty(tensor.extents(axes), dtype=_element(tensor.element_type(axes)))
        for tensor in entry.outputs
    )
    return made[0] if len(made) == 1 else made


def _bind_axes(entry: Entry, tensor: Tensor, array: Any, axes: dict[str, Any]) -> None:
    name = f"{entry.name}: {tensor.name}"
    rank = len(tensor.shape)
    torch._check(array.dim() == rank, lambda: f"{name} must have {rank} dimensions")
    dtype = str(array.dtype).removeprefix("torch.")
    if isinstance(tensor.dtype, ElementType):
        if tensor.dtype.tells and tensor.dtype.told_by(dtype) is not None:
            axes[tensor.dtype.axis] = tensor.dtype.told_by(dtype)
    elif tensor.dtype in entry.axis_names:
        axes.setdefault(tensor.dtype, dtype)
    element = _element(tensor.element_type(axes))
    torch._check(array.dtype == element, lambda: f"{name} is {array.dtype}; it must be {element}")
    for position, axis in enumerate(tensor.shape):
        extent = array.shape[position]
        if isinstance(axis, Derived):
            if axis.tells is None:
                continue
            axis, size_of = axis.tells
            extent = size_of(extent, axes)
        expected = axes.setdefault(axis, extent) if isinstance(axis, str) else axis
        torch._check(
            extent == expected,
            lambda axis=axis, extent=extent, expected=expected: (  # type: ignore[misc]
                f"{name}: {axis} is {extent}, but {expected} elsewhere"
            ),
        )


def _check_derived(entry: Entry, tensor: Tensor, array: Any, axes: Mapping[str, Any]) -> None:
    for position, size in enumerate(tensor.shape):
        if isinstance(size, Derived):
            torch._check(
                array.shape[position] == size.of(axes),
                lambda position=position, size=size: (  # type: ignore[misc]
                    f"{entry.name}: {tensor.name}.shape[{position}] must be {size}"
                ),
            )


def _element(dtype: str) -> Any:
    return getattr(torch, dtype)


def _keyword(axis: Axis) -> str:
    """A size is an int that may be symbolic, a flag a bool, a number a float, a choice a string."""
    if not axis.values:
        return f"SymInt {axis.name}" + ("" if axis.default is None else f"={axis.default}")
    if axis.is_number or isinstance(axis.values[0], bool):
        return f"{'float' if axis.is_number else 'bool'} {axis.name}={axis.default}"
    default = "" if axis.default is None else f'="{axis.default}"'
    return f"str {axis.name}{default}"


def _out_name(entry: Entry, tensor: Tensor) -> str:
    return "out" if len(entry.outputs) == 1 else tensor.name


def _named_outputs(entry: Entry, out: Any) -> dict[str, Any]:
    if len(entry.outputs) == 1:
        return {"out": out}
    return {tensor.name: array for tensor, array in zip(entry.outputs, out, strict=True)}

"""Entries as torch custom operators ``torch.ops.kernelcat.<entry>``, made from specifications.

``torch.ops.kernelcat.gemm(a, b, bias=None)`` returns the output; ``gemm_out(..., out=d)`` writes
into ``d``. Where outputs depend on a choice (``rms_norm(x, w, out_format="fp8")``) the first form
returns a list of those that there are. An entry that always updates an output in place has the
second form only; optional outputs that are updated are arguments of the second form only. Fake
implementations follow from symbolic shapes, so ``torch.compile(fullgraph=True)`` and
``torch.export`` keep the operators, with dynamic sizes too. The first ``kernelcat.get`` or call
after the import of torch registers an operator. There is no backward pass.

This module imports torch, so it is imported only where torch has been imported already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any

import torch

from kernelcat import catalog
from kernelcat.call import signature
from kernelcat.catalog.spec import Axis, AxisValue, Derived, ElementType, Entry, Tensor
from kernelcat.errors import InvalidArgument

is_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""Whether Dynamo is tracing. Dynamo takes the result for a constant; eager mode pays 40 ns."""

_LIBRARY = torch.library.Library("kernelcat", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

Find = Callable[[str, str], Callable[..., Any]]
"""From an entry's name and the key of a pin (:attr:`Pin.key`) to the operator for a call."""


def register(entry: Entry, pin: str, find: Find) -> Callable[..., Any]:
    """The torch operator of ``entry``, registered once: ``traced(*inputs, out=None, **axes)``.

    ``pin`` is the key of the language, variant and configuration that the caller of ``get`` asked
    for. The key is part of a traced graph; when the graph runs, ``find`` returns the operator for
    the key.
    """
    allocating, writing = _define(entry.name, find)
    has_all = _allocated(entry) == list(entry.outputs) and not _is_list(entry)

    def traced(*inputs: Any, out: Any = None, **more: Any) -> Any:
        if out is None:
            allocated = allocating(*inputs, **more, pin=pin)
            return allocated if has_all else _with_absent(entry, allocated, more)
        writing(*inputs, **more, **_named_outputs(entry, out), pin=pin)
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
    sometimes = _read_axes(entry)[1]
    arguments += [_keyword(axis, axis.name in sometimes) for axis in keyword_axes(entry)]
    if mutating:
        arguments += [_mutable(entry, tensor, i) for i, tensor in enumerate(entry.outputs)]
    arguments.append('str pin=""')
    kinds = ["Tensor[]"] if _is_list(entry) else ["Tensor"] * len(_allocated(entry))
    result = "()" if mutating else kinds[0] if len(kinds) == 1 else f"({', '.join(kinds)})"
    return f"({', '.join(arguments)}) -> {result}"


def keyword_axes(entry: Entry) -> list[Axis]:
    """Axes that are keywords of the operator, because arrays do not determine them in every call.

    Arrays determine an axis by a size, a stride or an element type, or by being present.
    """
    always, _ = _read_axes(entry)
    return [axis for axis in entry.axes if axis.name not in always]


def _read_axes(entry: Entry) -> tuple[set[Any], set[Any]]:
    """Axes that arrays determine in every call, and those that they determine in some calls.

    Optional arrays determine an axis in every call where one of them is present for every value of
    their flag: the logits of `moe_route`, or else x and the router.
    """
    always: set[Any] = set()
    sometimes: dict[tuple[str, Any], set[AxisValue]] = {}  # (flag, axis) -> values of the flag
    for tensor in entry.drawn:
        sizes = [s.tells[0] if isinstance(s, Derived) and s.tells else s for s in tensor.shape]
        read = {*sizes, *(tensor.strides or ()), _element_type_axis(tensor)}
        if tensor.flag is None:
            always |= read
            continue
        if tensor.when is True:
            always.add(tensor.flag)
        for axis in read:
            values = tensor.when if isinstance(tensor.when, tuple) else (tensor.when,)
            sometimes.setdefault((tensor.flag, axis), set()).update(values)
    for tensor in entry.outputs:
        always |= set(tensor.strides or ())
    for (flag, axis), flag_values in sometimes.items():
        if flag_values == set(entry.axis(flag).values):
            always.add(axis)
    return always, {axis for _, axis in sometimes} - always


def _element_type_axis(tensor: Tensor) -> str | None:
    """The axis that an array's element type determines, or None."""
    if isinstance(tensor.dtype, ElementType):
        return tensor.dtype.axis if tensor.dtype.is_invertible else None
    return tensor.dtype


@cache
def _define(name: str, find: Find) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Both forms of an entry's operator, registered once: (allocating outputs, writing to them).

    For an entry that updates an output in place, the first form only raises ``InvalidArgument``.
    """
    entry, out_name, namespace = catalog.entry(name), f"{name}_out", torch.ops.kernelcat
    _LIBRARY.define(out_name + schema(entry, mutating=True), tags=_TAGS)
    _LIBRARY.impl(out_name, _writing_kernel(entry, find), "CUDA")
    torch.library.register_fake(
        f"kernelcat::{out_name}", lambda *inputs, pin="", **named: None, lib=_LIBRARY
    )
    writing = getattr(namespace, out_name).default
    if any(tensor.updated for tensor in _allocated(entry)):
        return lambda *inputs, **named: signature.outputs(entry, None), writing
    _LIBRARY.define(name + schema(entry), tags=_TAGS)
    _LIBRARY.impl(name, _allocating_kernel(entry, find), "CUDA")
    torch.library.register_fake(
        f"kernelcat::{name}",
        lambda *inputs, pin="", **axes: _fake(entry, inputs, axes),
        lib=_LIBRARY,
    )
    return getattr(namespace, name).default, writing


def _allocating_kernel(entry: Entry, find: Find) -> Callable[..., Any]:
    """The CUDA kernel of the form that allocates outputs.

    The dispatcher leaves out arguments that have their default, so most calls have no keywords.
    """
    ops: dict[str, Callable[..., Any]] = {}  # by the key of the pin; operators live for ever
    num_allocated, is_list = len(_allocated(entry)), _is_list(entry)
    is_partial = len(entry.outputs) > num_allocated

    def kernel(*inputs: Any, pin: str = "", **named: Any) -> Any:
        op = ops.get(pin)
        if op is None:
            op = ops[pin] = find(entry.name, pin)
        for x in inputs:
            if type(x) not in _PLAIN:
                inputs = tuple(map(_plain, inputs))
                break
        if named:
            result = op(*inputs, **{n: value for n, value in named.items() if value is not None})
        else:
            result = op(*inputs)
        if is_list:
            return [array for array in result if array is not None]
        return result[:num_allocated] if is_partial else result

    return kernel


def _writing_kernel(entry: Entry, find: Find) -> Callable[..., None]:
    """The CUDA kernel of the form that writes into outputs."""
    ops: dict[str, Callable[..., Any]] = {}
    names = [_out_name(entry, tensor) for tensor in entry.outputs]

    def kernel(*inputs: Any, pin: str = "", **named: Any) -> None:
        op = ops.get(pin)
        if op is None:
            op = ops[pin] = find(entry.name, pin)
        outs = [_plain(named.pop(name, None)) for name in names]
        named = {n: value for n, value in named.items() if value is not None}
        op(*map(_plain, inputs), out=outs[0] if len(outs) == 1 else tuple(outs), **named)

    return kernel


_PLAIN = (torch.Tensor, type(None))


def _plain(value: Any) -> Any:
    """``value``, or a plain tensor of the same memory where ``value`` is of a tensor subclass."""
    if type(value) in _PLAIN:
        return value
    return value.as_subclass(torch.Tensor)


def _fake(entry: Entry, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Outputs without data, from symbolic sizes; checks that sizes agree.

    ``keywords`` maps axes that are keywords of the operator to their values.
    """
    read = set().union(*_read_axes(entry))
    axes = {name: value for name, value in entry.defaults.items() if name not in read}
    axes |= {name: value for name, value in keywords.items() if value is not None}
    for tensor, array in zip_longest(entry.inputs, inputs):
        if tensor.when is True and tensor.flag is not None:
            axes[tensor.flag] = array is not None
    present = [
        (tensor, array)
        for tensor, array in zip(entry.inputs, inputs, strict=False)
        if array is not None
    ]
    for tensor, array in present:  # before sizes: scales tell how many weights a byte holds
        _bind_type(entry, tensor, array, axes)
    for tensor, array in present:
        _bind_axes(entry, tensor, array, axes)
    axes = {**entry.defaults, **axes}
    for tensor, array in present:
        _check_derived(entry, tensor, array, axes)
    like = present[0][1]
    outputs = [
        like.new_empty(tensor.extents(axes), dtype=_element(tensor.element_type(axes)))
        for tensor in _allocated(entry)
        if tensor.present(axes)
    ]
    if _is_list(entry):
        return outputs
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _bind_type(entry: Entry, tensor: Tensor, array: Any, axes: dict[str, Any]) -> None:
    """Add the axis value that the element type of ``array`` determines to ``axes``."""
    dtype = str(array.dtype).removeprefix("torch.")
    if isinstance(tensor.dtype, ElementType):
        if (value := tensor.dtype.value_of(dtype)) is not None:
            axes.setdefault(tensor.dtype.axis, value)
    elif tensor.dtype in entry.axis_names:
        axes.setdefault(tensor.dtype, dtype)


def _bind_axes(entry: Entry, tensor: Tensor, array: Any, axes: dict[str, Any]) -> None:
    """Add the axis values that the shape of ``array`` determines to ``axes``; check those there."""
    name = f"{entry.name}: {tensor.name}"
    rank = len(tensor.shape)
    torch._check(array.dim() == rank, lambda: f"{name} must have {rank} dimensions")
    if isinstance(tensor.dtype, ElementType) and tensor.dtype.axis not in axes:
        raise InvalidArgument(f"{entry.name} also needs {tensor.dtype.axis}=")
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


def _keyword(axis: Axis, is_optional: bool) -> str:
    """The declaration of an axis in a schema.

    A size becomes an int that may be symbolic, a flag a bool, a number a float, a choice an int or
    a string. An *optional* keyword is needed where no array that is passed determines the axis.
    """
    kind = "str"
    if not axis.values:
        kind = "SymInt"
    elif axis.is_number:
        kind = "float"
    elif isinstance(axis.values[0], bool):
        kind = "bool"
    elif isinstance(axis.values[0], int):
        kind = "int"
    if is_optional:
        return f"{kind}? {axis.name}=None"
    if axis.default is None:
        return f"{kind} {axis.name}"
    default = f'"{axis.default}"' if kind == "str" else axis.default
    return f"{kind} {axis.name}={default}"


def _allocated(entry: Entry) -> list[Tensor]:
    """The outputs of the form that allocates: all but optional ones that are updated in place."""
    return [tensor for tensor in entry.outputs if tensor.flag is None or not tensor.updated]


def _is_list(entry: Entry) -> bool:
    """Whether the form that allocates returns a list: a choice tells which outputs there are."""
    return any(tensor.flag is not None for tensor in _allocated(entry))


def _with_absent(
    entry: Entry, allocated: Sequence[Any], axes: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The outputs of a call with the keywords ``axes``: ``allocated``, and None for absent ones."""
    made, known = iter(allocated), {**entry.defaults, **axes}
    return tuple(
        next(made) if tensor in _allocated(entry) and tensor.present(known) else None
        for tensor in entry.outputs
    )


def _mutable(entry: Entry, tensor: Tensor, index: int) -> str:
    """The declaration of an output that the operator writes to."""
    mark, default = ("?", "=None") if tensor.flag else ("", "")
    return f"Tensor({chr(97 + index)}!){mark} {_out_name(entry, tensor)}{default}"


def _out_name(entry: Entry, tensor: Tensor) -> str:
    return "out" if len(entry.outputs) == 1 else tensor.name


def _named_outputs(entry: Entry, out: Any) -> dict[str, Any]:
    if len(entry.outputs) == 1:
        return {"out": out}
    return {tensor.name: array for tensor, array in zip(entry.outputs, out, strict=True)}

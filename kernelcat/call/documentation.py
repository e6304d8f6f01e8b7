"""Signature and docstring of each operator, made from the specification; and stubs for editors.

``python -m kernelcat.call.documentation`` prints the stubs, which stand in ``call/typed.pyi``.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, Literal

from kernelcat import catalog
from kernelcat.call.signature import label
from kernelcat.catalog.axes import Axis
from kernelcat.catalog.spec import Derived, ElementType, Entry, Tensor

WIDTH = 96

HEAD = '''\
# ruff: noqa
# fmt: off
# Made by `make readme` from the specifications in reference/: change those files, not this one.
"""What editors and type checkers know of ``kernelcat.get``: the call of each entry, by name."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol, overload

from kernelcat.call.fast_path import Bound
from kernelcat.call.operator import Op

class Array(Protocol):
    """An array of torch, CuPy or any library that speaks DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

'''


class OfEntry:
    """An attribute of operators that is made from the entry; the class has ``of_class`` instead.

    Without ``of_class`` the class has no such attribute.
    """

    def __init__(self, make: Callable[[Entry], Any], of_class: Any = None) -> None:
        self._make, self._of_class = make, of_class

    def __get__(self, op: Any, cls: type) -> Any:
        if op is not None:
            return self._make(op.entry)
        if self._of_class is None:
            raise AttributeError("only operators of an entry have this attribute")
        return self._of_class


def signature(entry: Entry) -> inspect.Signature:
    """The parameters of a call: arrays in order, then keywords, then ``out``."""
    kinds, parameters = inspect.Parameter, []
    for tensor in entry.inputs:
        default: Any = kinds.empty if tensor.flag is None else None
        parameters.append(
            kinds(tensor.name, kinds.POSITIONAL_OR_KEYWORD, default=default, annotation=Any)
        )
    for axis in keywords(entry):
        default = axis.default
        if default is None:
            default = ... if _is_told_by_optional(entry, axis) else kinds.empty
        parameters.append(
            kinds(axis.name, kinds.KEYWORD_ONLY, default=default, annotation=_type(axis))
        )
    default = kinds.empty if _needs_out(entry) else None
    parameters.append(kinds("out", kinds.KEYWORD_ONLY, default=default, annotation=Any))
    return inspect.Signature(parameters)


def docstring(entry: Entry) -> str:
    """The call, shapes, element types, keywords and errors of an entry, as NumPy writes them."""
    arguments = ", ".join(_shown(parameter) for parameter in signature(entry).parameters.values())
    results = ", ".join(label(entry, tensor) for tensor in entry.outputs)
    parts = [
        textwrap.fill(f"{entry.name}({arguments}) -> {results}", WIDTH, subsequent_indent="    "),
        textwrap.fill(entry.summary, WIDTH),
        _section("Parameters", (*map(_of_tensor, entry.inputs), *_of_keywords(entry), _out(entry))),
        _section("Returns", map(_of_tensor, entry.outputs)),
        _section("Raises", _errors(entry)),
        f"The definition: reference/{entry.name}.py and kernelcat.reference({entry.name!r}).",
    ]
    return "\n\n".join(parts)


def keywords(entry: Entry) -> list[Axis]:
    """The axes that a call may give by name: no array that every call has tells them."""
    told = {name for tensor in entry.drawn if tensor.flag is None for name in _told_by(tensor)} | {
        name for tensor in entry.outputs for name in tensor.strides or ()
    }
    flags = {tensor.flag for tensor in entry.drawn if tensor.when is True}
    return [axis for axis in entry.axes if axis.name not in told | flags and not axis.drawn]


def _told_by(tensor: Tensor) -> Iterable[Any]:
    """Names of the axes that an array tells by its shape, strides and element type."""
    for size in (*tensor.shape, *(tensor.strides or ())):
        yield size if not isinstance(size, Derived) else size.tells and size.tells[0]
    if not isinstance(tensor.dtype, ElementType):
        yield tensor.dtype
    elif tensor.dtype.is_invertible:
        yield tensor.dtype.axis


def _is_told_by_optional(entry: Entry, axis: Axis) -> bool:
    return any(axis.name in _told_by(tensor) for tensor in entry.drawn if tensor.flag is not None)


def _needs_out(entry: Entry) -> bool:
    return any(tensor.flag is None for tensor in entry.updated)


def _type(axis: Axis) -> Any:
    if axis.is_number:
        return float
    if not axis.values:
        return int
    return bool if isinstance(axis.values[0], bool) else Literal[axis.values + axis.extra]


def _shown(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return parameter.name
    default = "..." if parameter.default is ... else repr(parameter.default)
    return f"{parameter.name}={default}"


# ---- the docstring ------------------------------------------------------------------------------


def _section(title: str, items: Iterable[tuple[str, str]]) -> str:
    lines = [title, "-" * len(title)]
    for head, doc in items:
        lines += textwrap.wrap(head, WIDTH, subsequent_indent="  ")
        lines += textwrap.wrap(doc, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def _of_tensor(tensor: Tensor) -> tuple[str, str]:
    """Shape and element type of an array, and what it is."""
    sizes = ", ".join(map(str, tensor.shape)) + ("," if len(tensor.shape) == 1 else "")
    head = f"{tensor.name} : ({sizes}) {tensor.dtype}"
    if tensor.strides is not None:
        head += f", strides ({', '.join(map(str, tensor.strides))})"
    if tensor.flag is not None:
        when = tensor.when if isinstance(tensor.when, tuple) else (tensor.when,)
        is_free = tensor.when is True
        head += ", optional" if is_free else f", for {tensor.flag} {' or '.join(map(str, when))}"
    return head, tensor.doc


def _of_keywords(entry: Entry) -> Iterable[tuple[str, str]]:
    for axis in keywords(entry):
        kind = getattr(_type(axis), "__name__", "")
        if not isinstance(_type(axis), type):
            kind = "one of " + ", ".join(map(repr, axis.values + axis.extra))
        default = "" if axis.default is None else f", {axis.default!r} by default"
        if axis.default is None and _is_told_by_optional(entry, axis):
            default = ", needed where no optional array tells it"
        yield f"{axis.name} : {kind}{default}", axis.doc


def _out(entry: Entry) -> tuple[str, str]:
    many = len(entry.outputs) > 1
    what = f"tuple of arrays ({', '.join(t.name for t in entry.outputs)})" if many else "array"
    if _needs_out(entry):
        names = " and ".join(label(entry, tensor) for tensor in entry.updated)
        return f"out : {what}", f"where results go; {names} must hold values, and is updated"
    return f"out : {what}, optional", "where results go; allocated if left out"


def _errors(entry: Entry) -> Iterable[tuple[str, str]]:
    axes = sorted({axis.name for axis in entry.axes if axis.values and not axis.is_number})
    choices = [
        f"{axis.name}: {', '.join(map(str, axis.values + axis.extra))}"
        for axis in entry.axes
        if axis.name in axes and not axis.drawn
    ]
    legal = f" Legal are {'; '.join(choices)}." if choices else ""
    yield (
        "InvalidArgument",
        "A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap."
        + legal,
    )
    yield "Unsupported", "No kernel serves this problem on this GPU."
    yield "MissingDependency", "There is no GPU driver, or a needed compiler is not installed."
    if entry.preconditions:
        arrays = ", ".join(dict.fromkeys(rule.tensor for rule in entry.preconditions))
        yield "Not checked", f"Values of {arrays}, but under kernelcat.debug()."


# ---- stubs --------------------------------------------------------------------------------------


def stub() -> str:
    """The content of ``call/typed.pyi``: a class for each entry, and the overloads of ``get``."""
    entries = [catalog.entry(name) for name in catalog.names()]
    return "\n".join((HEAD + "\n".join(map(_class, entries)), *map(_overload, entries), _ANY))


_PIN = """\
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
"""
_ANY = f"@overload\ndef get(\n    name: str,\n{_PIN}) -> Op: ..."


def _overload(entry: Entry) -> str:
    return (
        f'@overload\ndef get(\n    name: Literal["{entry.name}"],\n{_PIN}) -> {_title(entry)}: ...'
    )


def _title(entry: Entry) -> str:
    return "".join(word.capitalize() for word in entry.name.split("_"))


def _class(entry: Entry) -> str:
    parameters = signature(entry).parameters.values()
    call = _stubbed(entry, parameters, "")
    bind = _stubbed(entry, [p for p in parameters if p.name != "out"],
                    "        out: Any = None, stream: Any = None,\n")  # fmt: skip
    text = textwrap.indent(docstring(entry), "        ", lambda line: bool(line.strip())).lstrip()
    result = (
        "Any" if len(entry.outputs) == 1 else f"tuple[{', '.join(['Any'] * len(entry.outputs))}]"
    )
    return (
        f"class {_title(entry)}(Op):\n"
        f"    def __call__(  # type: ignore[override]\n{call}    ) -> {result}:\n"
        f'        r"""{text}\n        """\n'
        f"    def bind(  # type: ignore[override]\n{bind}    ) -> Bound: ...\n"
    )


def _stubbed(entry: Entry, parameters: Iterable[inspect.Parameter], more: str) -> str:
    """The parameters of a method, a line each."""
    lines, has_star = ["        self,\n"], False
    axes = {axis.name: axis for axis in entry.axes}
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            lines, has_star = [*lines, "        *,\n"], True
        if parameter.name == "out":
            many = len(entry.outputs) > 1
            kind = "tuple[Array | None, ...]" if many else "Array"
        elif parameter.kind is parameter.KEYWORD_ONLY:
            kind = _type_text(axes[parameter.name])
        else:
            kind = "Array"
        is_optional = parameter.default is not parameter.empty
        none = " | None" if parameter.default is None else ""
        lines.append(f"        {parameter.name}: {kind}{none}{' = ...' if is_optional else ''},\n")
    star = "        *,\n" if more and not has_star else ""
    return "".join(lines) + star + more


def _type_text(axis: Axis) -> str:
    """The type of a keyword; element types may also be those of a library."""
    kind = _type(axis)
    if isinstance(kind, type):
        return kind.__name__
    text = f"Literal[{', '.join(map(repr, axis.values + axis.extra))}]"
    return f"{text} | Any" if "dtype" in axis.name else text


if __name__ == "__main__":
    print(stub())

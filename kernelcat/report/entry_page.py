"""A page for each entry, from its specification: the call, shapes, units, limits and errors."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod

from kernelcat import catalog, paths
from kernelcat.call import signature
from kernelcat.call.arrays import ArrayInfo
from kernelcat.catalog.axes import Axis
from kernelcat.catalog.implementation import Implementation
from kernelcat.catalog.spec import EXACT, AxisValue, Derived, ElementType, Entry, Tensor
from kernelcat.errors import InvalidArgument

MADE = "<!-- Made by make readme from reference/{name}.py: change that file, not this one. -->"


def markdown(name: str) -> str:
    """The page of an entry as Markdown.

    Raises
    ------
    MissingDependency
        A language is not installed.
    """
    entry = catalog.entry(name)
    return "\n\n".join(
        (
            f"# {name}",
            MADE.format(name=name),
            *_status(entry),
            _definition(entry),
            "## Call",
            _call(entry),
            "## Arguments",
            _tensors(entry.inputs),
            "## Outputs",
            _tensors(entry.outputs),
            _tolerance(entry),
            "## Axes",
            _axes(entry),
            *_preconditions(entry),
            "## Errors",
            _errors(entry),
            "## Implementations",
            _implementations(entry),
            f"Peers in races: {', '.join(peer.name for peer in entry.peers) or 'none'}.\n",
        )
    )


def index() -> str:
    """All entries as a Markdown table with links to their pages."""
    lines = ["| entry | what it computes | state |", "| --- | --- | --- |"]
    for name in catalog.names():
        entry = catalog.entry(name)
        state = "work in progress" if entry.work_in_progress else f"[results](../results/{name}.md)"
        lines.append(f"| [`{name}`]({name}.md) | {_cell(entry.summary)} | {state} |")
    return "\n".join((*lines, ""))


def _status(entry: Entry) -> list[str]:
    if entry.work_in_progress:
        return ["**Work in progress**: incomplete, may change, and has no published results."]
    return [f"[Results](../results/{entry.name}.md)"]


def _definition(entry: Entry) -> str:
    """The docstring of the specification, with links to the modules that it names."""
    folder = paths.data("reference")
    source = (folder / f"{entry.name}.py").read_text(encoding="utf-8")
    text = re.sub(r"``(.+?)``", r"`\1`", ast.get_docstring(ast.parse(source)) or entry.summary)

    def link(name: re.Match[str]) -> str:
        is_module = (folder / f"{name[1]}.py").exists()
        return f"[{name[0]}](../../reference/{name[1]}.py)" if is_module else name[0]

    lines = text.splitlines()
    formula = " " * 4
    return "\n".join(
        line if line.startswith(formula) else re.sub(r"`(_\w+)`", link, line) for line in lines
    )


def _preconditions(entry: Entry) -> list[str]:
    """What values of arrays must satisfy, with what is wrong where they do not."""
    if not entry.preconditions:
        return []
    rows = ["| array | message |", "| --- | --- |"]
    for precondition in entry.preconditions:
        why = re.sub(r"{(\w+)}", r"`\1`", precondition.why)
        rows.append(f"| `{precondition.tensor}` | {_cell(why)} |")
    return [
        "## Values",
        "A call does not look at values; [`kernelcat.debug`](../calling-from-your-code.md"
        "#values-in-arrays) does. Elements that no kernel reads may hold anything.",
        "\n".join(rows),
    ]


def _call(entry: Entry) -> str:
    note = "Arguments after the required ones are optional." if _has_options(entry) else ""
    if entry.ranks:
        note = (
            "Several ranks compute this entry, each with its part of the arrays: a call by one "
            "process raises `Unsupported`, and `kernelcat.ranks.group.Group` loads it on each rank."
        )
    return f"```python\n{example(entry)}\n```\n\n{note}".strip()


def example(entry: Entry, width: int = 96) -> str:
    """Two statements that fetch the operator and call it, in lines of ``width`` columns."""
    arguments = [t.name if t.flag is None else f"{t.name}={t.name}" for t in entry.inputs]
    arguments += [f"{axis.name}={_literal(axis)}" for axis in _keywords(entry)]
    outputs = ", ".join(tensor.name for tensor in entry.outputs)
    many = len(entry.outputs) > 1
    if any(tensor.flag is None for tensor in entry.updated):
        arguments.append(f"out=({outputs})" if many else f"out={outputs}")
    call = f"op({', '.join(arguments)})"
    result = textwrap.fill(
        call if entry.updated else f"{outputs} = {call}", width, subsequent_indent="    "
    )
    return f'op = kernelcat.get("{entry.name}")\n{result}'


def _has_options(entry: Entry) -> bool:
    optional = any(tensor.flag is not None for tensor in entry.inputs)
    return optional or any(axis.default is not None for axis in _keywords(entry))


def _literal(axis: Axis) -> str:
    """A value in Python: the default, else the first choice, else the least size."""
    value = axis.default
    if value is None:
        value = axis.values[0] if axis.values else max(axis.low, 1)
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _keywords(entry: Entry) -> list[Axis]:
    """The axes that a caller gives by name: no array determines their values."""
    told = _told(entry)
    return [axis for axis in entry.axes if axis.name not in told and not axis.drawn]


def _told(entry: Entry) -> set[str]:
    """Names of the axes that arrays determine."""
    told: set[str] = set()
    for tensor in entry.tensors:
        if tensor in entry.outputs and not tensor.updated and tensor.strides is None:
            continue
        told.update(_told_by(tensor))
    return told


def _told_by(tensor: Tensor) -> Iterable[str]:
    for size in (*tensor.shape, *(tensor.strides or ())):
        if isinstance(size, Derived):
            yield from (size.tells[0],) if size.tells else ()
        elif isinstance(size, str):
            yield size
    if isinstance(tensor.dtype, ElementType):
        yield from (tensor.dtype.axis,) if tensor.dtype.is_invertible else ()
    else:
        yield tensor.dtype
    if tensor.flag is not None and (tensor.when is True or tensor.updated):
        yield tensor.flag


def _tensors(tensors: Sequence[Tensor]) -> str:
    lines = ["| array | shape | element type | meaning |", "| --- | --- | --- | --- |"]
    for tensor in tensors:
        shape = ", ".join(map(str, tensor.shape)) + ("," if len(tensor.shape) == 1 else "")
        cells = (f"`{tensor.name}`", f"({shape})", f"{tensor.dtype}", _meaning(tensor))
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines)


def _meaning(tensor: Tensor) -> str:
    parts = [tensor.doc] if tensor.doc else []
    if tensor.flag is not None:
        values = tensor.when if isinstance(tensor.when, tuple) else (tensor.when,)
        where = f"only where {tensor.flag} is {' or '.join(map(str, values))}"
        parts.append("optional" if tensor.when is True else where)
    if tensor.strides is not None:
        parts.append(f"strides ({', '.join(map(str, tensor.strides))}) in elements")
    if tensor.updated:
        parts.append("updated in place: pass it in out")
    return "; ".join(parts)


def _tolerance(entry: Entry) -> str:
    if set(entry.tolerance.values()) == {EXACT}:
        return "Outputs equal the definition bit for bit."
    each = [
        f"{name}: {t.absolute:g} + {t.relative:g} · \\|expected\\|"
        for name, t in entry.tolerance.items()
    ]
    return f"Largest difference from the definition in float32, by {entry.tolerance_axis}: " + (
        "; ".join(each) + "."
    )


def _axes(entry: Entry) -> str:
    lines = ["| axis | given by | values | default | meaning |", "| --- | --- | --- | --- | --- |"]
    told = _told(entry)
    for axis in entry.axes:
        given = "arrays" if axis.name in told else "keyword"
        given = "drawn inputs only" if axis.drawn else given
        default = "" if axis.default is None or given == "arrays" else f"{axis.default}"
        cells = (f"`{axis.name}`", given, _values(axis), default, axis.doc)
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines)


def _values(axis: Axis) -> str:
    if axis.is_number:
        return "any finite number"
    if axis.values:
        return ", ".join(map(str, axis.values))
    limit = f"below 2^{axis.limit.bit_length() - 1}"
    return limit + (f", a multiple of {axis.step}" if axis.step > 1 else "")


def _errors(entry: Entry) -> str:
    messages: dict[str, str] = {}
    for message in (*_array_messages(entry), *_axis_messages(entry)):
        messages.setdefault(re.sub(r"\d+", "0", message), message)  # one message of a kind
    listed = "\n".join(f"- `{message}`" for message in messages.values())
    return (
        "`InvalidArgument`, before anything is launched. These are the messages for the first "
        f"named problem with one thing wrong at a time:\n\n{listed}"
    )


def _array_messages(entry: Entry) -> Iterator[str]:
    """What calls of the first named problem with one wrong array are answered."""
    problem = next(iter(entry.problems.values()))
    axes = {axis.name: problem[axis.name] for axis in _keywords(entry)}
    infos = {
        tensor.name: ArrayInfo(0, tensor.shape_of(problem), tensor.strides_of(problem),
                               tensor.dtype_of(problem), "cuda:0", "torch")
        for tensor in entry.present(problem)
        if tensor in entry.drawn
    }  # fmt: skip
    first = entry.inputs[0].name
    info = infos[first]
    yield from _refusal(lambda: signature.arrange(entry, (), {}))
    yield from _refusal(lambda: signature.outputs(entry, None))
    on_cpu = infos | {first: replace(info, device="cpu")}
    yield from _refusal(lambda: signature.device_of(entry, on_cpu))
    wrong = [
        {first: replace(info, dtype="complex64")},
        {first: replace(info, shape=(1, *info.shape), strides=(1, *info.strides))},
        {first: replace(info, strides=tuple(2 * stride for stride in info.strides))},
        *({name: _longer(infos[name])} for name in infos if name != first),
    ]
    for changed in wrong:
        yield from _refusal(partial(signature.infer, entry, infos | changed, axes))


def _longer(info: ArrayInfo) -> ArrayInfo:
    """The array with one more element along its last axis, contiguous."""
    shape = (*info.shape[:-1], info.shape[-1] + 1)
    strides = [prod(shape[position + 1 :]) for position in range(len(shape))]
    return replace(info, shape=shape, strides=tuple(strides))


def _axis_messages(entry: Entry) -> Iterator[str]:
    """What values, and combinations near named problems, that are refused are answered."""
    keywords = _keywords(entry)
    for axis in entry.axes:
        if axis.step > 1:
            yield from _refusal(partial(axis.check, axis.step + 1))
        if axis in keywords and axis.values and not axis.is_number:
            yield from _refusal(partial(axis.check, "unknown"))
    for problem in entry.problems.values():
        for axis in entry.axes:
            for value in _nearby(axis, problem[axis.name]):
                axes = {**problem.values, axis.name: value}
                yield from _refusal(partial(entry.problem, **axes))


def _nearby(axis: Axis, value: int) -> Sequence[AxisValue]:
    """Other values of an axis: all choices, or sizes around ``value``."""
    if axis.is_number:
        return ()
    return axis.values or (0, max(value - axis.step, 0), value + axis.step, 3 * value)


def _refusal(check: Callable[[], object]) -> list[str]:
    """The message of the ``InvalidArgument`` that ``check`` raises, if it raises one."""
    try:
        check()
    except InvalidArgument as error:
        return [str(error).replace("`", "'")]
    return []


def _implementations(entry: Entry) -> str:
    lines = [
        "| variant | architectures | what it is | proven by |",
        "| --- | --- | --- | --- |",
    ]
    for each in (i for lang in catalog.languages(entry.name) for i in _ranked(entry, lang)):
        proofs = ", ".join(f"{name} `{code}`" for name, code in each.techniques.items())
        cells = (f"{each.language}/{each.variant}", ", ".join(each.archs), each.summary, proofs)
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines)


def _ranked(entry: Entry, language: str) -> Sequence[Implementation]:
    return sorted(catalog.in_language(entry.name, language), key=lambda each: each.rank)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

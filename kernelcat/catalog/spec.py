"""What an entry is: axes, tensors, problems, tolerances and an oracle. Plain data.

Imports neither torch, nor a compiler, nor NumPy, so that listing the catalog stays fast.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kernelcat.catalog.axes import Axis as Axis
from kernelcat.catalog.axes import AxisValue as AxisValue
from kernelcat.catalog.axes import exact as exact
from kernelcat.catalog.axes import power_of_two as power_of_two
from kernelcat.errors import InvalidArgument, UnknownName, nearest


@dataclass(frozen=True)
class Problem:
    """Axis values of one call: canonical, hashable, JSON-able. ``problem["M"]`` reads a value."""

    entry: str
    axes: tuple[tuple[str, AxisValue], ...]

    @staticmethod
    def of(entry: str, /, **axes: AxisValue) -> Problem:
        return Problem(entry, tuple(sorted(axes.items())))

    @cached_property
    def values(self) -> dict[str, AxisValue]:
        return dict(self.axes)

    @cached_property
    def key(self) -> str:
        """Canonical JSON of the axes: the text the store compares by."""
        return json.dumps(self.values, sort_keys=True, separators=(",", ":"))

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self.axes)


@dataclass(frozen=True)
class Derived:
    """A size that follows from axes: ``Derived("K/128", lambda axes: -(-axes["K"] // 128))``.

    ``of`` maps axis values to the size, by arithmetic that symbolic integers can do too; ``text``
    is how messages call it. ``tells`` is an axis and how it follows from the size, where an array
    of this size tells that axis: of the size and the axes known so far, the array's element type
    among them.
    """

    text: str
    of: Callable[[Mapping[str, Any]], Any]
    tells: tuple[str, Callable[[Any, Mapping[str, Any]], Any]] | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ElementType:
    """An element type that follows from a choice: ``ElementType.of("format", nvfp4="uint8")``."""

    axis: str
    types: tuple[tuple[AxisValue, str], ...]

    @staticmethod
    def of(axis: str, **types: str) -> ElementType:
        return ElementType(axis, tuple(types.items()))

    def where(self, axes: Mapping[str, Any]) -> str:
        return dict(self.types)[axes[self.axis]]

    def told_by(self, dtype: str) -> AxisValue | None:
        """The choice an array of ``dtype`` tells: the only one that has this type, or None."""
        values = [value for value, name in self.types if name == dtype]
        return values[0] if len(values) == 1 else None

    @property
    def tells(self) -> bool:
        """Whether every array of such elements tells the choice."""
        return all(self.told_by(dtype) == value for value, dtype in self.types)

    def __str__(self) -> str:
        return " or ".join(f"{dtype} ({value})" for value, dtype in self.types)


@dataclass(frozen=True)
class Tolerance:
    """``|out - oracle| <= absolute + relative * |oracle|`` for every element."""

    absolute: float
    relative: float


EXACT = Tolerance(0.0, 0.0)
"""Outputs equal the oracle's bit by bit; the oracle is given storage arrays, not float32 values."""


@dataclass(frozen=True)
class Tensor:
    """An array argument. ``shape`` holds axes, numbers or sizes :class:`Derived` from axes;
    ``dtype`` names an axis or an element type, or is an :class:`ElementType`.

    ``flag`` names the axis that says whether an optional tensor is there: it is where that is
    ``when``. ``strides`` (in elements) names axes too; None means contiguous. ``tolerance`` is an
    output's own, where the entry's would not do, or the axis that picks one of the entry's. An
    ``optional_for_peers`` output need not be written by peers. An ``updated`` output holds values
    before the call, and keeps them where the entry says nothing else: the caller must pass it.
    """

    name: str
    shape: tuple[str | int | Derived, ...]
    dtype: str | ElementType
    doc: str = ""
    flag: str | None = None
    when: AxisValue = True
    strides: tuple[str | int, ...] | None = None
    tolerance: Tolerance | str | None = None
    optional_for_peers: bool = False
    updated: bool = False

    def shape_of(self, problem: Problem) -> tuple[int, ...]:
        return tuple(map(int, self.extents(problem.values)))

    def extents(self, axes: Mapping[str, Any]) -> tuple[Any, ...]:
        """The shape, from axis values that may be symbolic."""

        def extent(size: str | int | Derived) -> Any:
            if isinstance(size, Derived):
                return size.of(axes)
            return axes[size] if isinstance(size, str) else size

        return tuple(map(extent, self.shape))

    def strides_of(self, problem: Problem) -> tuple[int, ...]:
        """Strides in elements."""
        if self.strides is not None:
            return tuple(s if isinstance(s, int) else int(problem[s]) for s in self.strides)
        strides, step = [], 1
        for extent in reversed(self.shape_of(problem)):
            strides.append(step)
            step *= max(extent, 1)
        return tuple(reversed(strides))

    def dtype_of(self, problem: Problem) -> str:
        return self.element_type(problem.values)

    def element_type(self, axes: Mapping[str, Any]) -> str:
        if isinstance(self.dtype, ElementType):
            return self.dtype.where(axes)
        return str(axes.get(self.dtype, self.dtype))

    def span_of(self, problem: Problem) -> int:
        """Elements from the first to the last one, gaps included; 0 for an empty tensor."""
        shape = self.shape_of(problem)
        if 0 in shape:
            return 0
        return 1 + sum((d - 1) * s for d, s in zip(shape, self.strides_of(problem), strict=True))

    def present(self, problem: Problem) -> bool:
        return self.flag is None or problem[self.flag] == self.when


@dataclass(frozen=True)
class Peer:
    """Somebody else's implementation of an entry, raced beside ours.

    ``load()`` imports it and returns ``make(problem, arrays) -> run()``, where ``arrays`` are the
    entry's tensors (outputs included) as torch tensors on the GPU and ``run`` launches on torch's
    current stream. ``load`` raises ``MissingDependency`` where the library is not installed, and
    ``make`` raises ``Unsupported`` for a problem the library cannot do.
    """

    name: str
    load: Callable[[], Callable[[Problem, Mapping[str, Any]], Callable[[], Any]]]


Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Signal:
    """How much of the unquantized result an output keeps, beside the tolerance of its elements.

    ``exact(problem, drawn)`` is what the entry's outputs would be of unquantized inputs, float32
    by name; ``drawn`` is all that ``make_inputs`` returned, originals under names of no tensor
    among it. ``least(problem)`` is the signal to quantization noise that must be left,
    ``10 log10(sum exact^2 / sum (out - exact)^2)`` in dB, or None where there are too few elements
    for a ratio of sums to mean anything.
    """

    exact: Callable[[Problem, Arrays], dict[str, Any]]
    least: Callable[[Problem], float | None]


@dataclass(frozen=True)
class Entry:
    """The specification of one technique: what it computes, and how to tell that it was right.

    Attributes
    ----------
    oracle : ``oracle(problem, arrays) -> {output: array}``
        NumPy or CuPy arrays in (float32 values, or storage where the tolerance is ``EXACT``),
        float32 (or storage) out. Only operators and methods both libraries share. Of an updated
        output it is given what it holds before, and tells all that it holds after: an element
        that stays as it was must stay so bit for bit.
    make_inputs : ``make_inputs(problem, normal) -> {input or updated output: array}``
        ``normal(shape)`` draws float32 standard normal values on the device in use. Names that
        begin with ``_`` are no tensors, and are there for ``signal``.
    flops, bytes_moved : ``problem -> int``
        The least work that any implementation must do; they give the roofline.
    constraint : ``problem -> reason or None``
        Which combinations of axis values make sense at all (``src_stride >= cols``).
    problems : named problems; ``peers`` : who is raced.
    signal : what is left of an unquantized result, where inputs are quantized values
    work_in_progress : not for others yet: one language and one variant suffice
    """

    name: str
    summary: str
    axes: tuple[Axis, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    oracle: Callable[[Problem, Arrays], dict[str, Any]]
    make_inputs: Callable[[Problem, Callable[[tuple[int, ...]], Any]], dict[str, Any]]
    tolerance: Mapping[str, Tolerance]
    flops: Callable[[Problem], int]
    bytes_moved: Callable[[Problem], int]
    problems: Mapping[str, Problem] = field(default_factory=dict)
    peers: tuple[Peer, ...] = ()
    constraint: Callable[[Problem], str | None] = lambda problem: None
    tolerance_axis: str = "dtype"
    signal: Signal | None = None
    work_in_progress: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.inputs + self.outputs

    @property
    def updated(self) -> tuple[Tensor, ...]:
        """Outputs that hold something before a call."""
        return tuple(tensor for tensor in self.outputs if tensor.updated)

    @property
    def drawn(self) -> tuple[Tensor, ...]:
        """Tensors that hold something before a call: what ``make_inputs`` makes."""
        return self.inputs + self.updated

    def axis(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise UnknownName(f"{self.name} has no axis {name!r}{nearest(name, self.axis_names)}")

    @property
    def axis_names(self) -> list[str]:
        return [axis.name for axis in self.axes]

    @property
    def defaults(self) -> dict[str, AxisValue]:
        """What a problem has along axes that it does not say."""
        return {a.name: a.default for a in self.axes if a.default is not None}

    def problem(self, **axes: AxisValue) -> Problem:
        """A checked problem: every axis given once or defaulted, every value legal."""
        for name in axes:
            self.axis(name)
        axes = {**self.defaults, **axes}
        missing = [name for name in self.axis_names if name not in axes]
        if missing:
            raise InvalidArgument(f"{self.name} also needs {', '.join(missing)}")
        for axis in self.axes:
            axis.check(axes[axis.name])
        problem = Problem.of(self.name, **axes)
        reason = self.constraint(problem)
        if reason:
            raise InvalidArgument(f"{self.name}: {reason}")
        return problem

    def named(self, name: str) -> Problem:
        if name not in self.problems:
            known = list(self.problems)
            raise UnknownName(f"{self.name} has no problem {name!r}{nearest(name, known)}")
        return self.problems[name]

    def problem_name(self, problem: Problem) -> str | None:
        return next((name for name, known in self.problems.items() if known == problem), None)

    def bucket(self, problem: Problem) -> Problem:
        """The problem with sizes rounded by their axes' rules, and minor choices left out."""
        sized = {a.name: a.bucket(problem[a.name]) for a in self.axes if not a.values}
        return Problem.of(self.name, **sized, **self.major_choices(problem))

    def major_choices(self, problem: Problem) -> dict[str, AxisValue]:
        """The choices that matter to which configuration is best."""
        return {a.name: problem[a.name] for a in self.axes if a.values and not a.minor}

    def tolerance_of(self, problem: Problem, output: Tensor | None = None) -> Tolerance:
        """The entry's tolerance, or that of an output that may have one of its own."""
        own = output.tolerance if output else None
        if isinstance(own, Tolerance):
            return own
        return self.tolerance[str(problem[own or self.tolerance_axis])]

    def present(self, problem: Problem) -> Iterator[Tensor]:
        """The tensors this problem has: all but optional ones that are absent."""
        return (tensor for tensor in self.tensors if tensor.present(problem))

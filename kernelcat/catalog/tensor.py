"""Tensors of an entry: shapes and element types that follow from axes, and tolerances of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kernelcat.catalog.axes import AxisValue
from kernelcat.catalog.problem import Problem


@dataclass(frozen=True)
class Derived:
    """A size that follows from axes: ``Derived("K/128", lambda axes: -(-axes["K"] // 128))``.

    ``text`` stands for the size in messages. ``of(axes)`` computes the size from axis values, by
    arithmetic that symbolic integers support too. ``tells`` inverts the size where that is
    possible: an axis, and a function of the size and of the axes read so far (the array's element
    type among them) that returns the value of that axis.
    """

    text: str
    of: Callable[[Mapping[str, Any]], Any]
    tells: tuple[str, Callable[[Any, Mapping[str, Any]], Any]] | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ElementType:
    """An element type that follows from a choice: ``ElementType.of("format", nvfp4="uint8")``.

    ``types`` are pairs of a value of the axis and the element type that goes with the value.
    """

    axis: str
    types: tuple[tuple[AxisValue, str], ...]

    @staticmethod
    def of(axis: str, **types: str) -> ElementType:
        """An element type from value=type pairs, for an axis whose values are identifiers."""
        return ElementType(axis, tuple(types.items()))

    def where(self, axes: Mapping[str, Any]) -> str:
        """The element type for these axis values."""
        return self._by_value[axes[self.axis]]

    @cached_property
    def _by_value(self) -> dict[AxisValue, str]:
        return dict(self.types)

    def value_of(self, dtype: str) -> AxisValue | None:
        """The only axis value that goes with element type ``dtype``; None for no or many values."""
        values = [value for value, name in self.types if name == dtype]
        return values[0] if len(values) == 1 else None

    @property
    def is_invertible(self) -> bool:
        """Whether every element type goes with one axis value, so that arrays determine it."""
        return all(self.value_of(dtype) == value for value, dtype in self.types)

    def __str__(self) -> str:
        return " or ".join(f"{dtype} ({value})" for value, dtype in self.types)


@dataclass(frozen=True)
class Tolerance:
    """``|out - oracle| <= absolute + relative * |oracle|`` for every element."""

    absolute: float
    relative: float


EXACT = Tolerance(0.0, 0.0)
"""Outputs equal the oracle's bit for bit; the oracle gets storage arrays, not float32 values."""


@dataclass(frozen=True)
class Tensor:
    """An array argument of an entry.

    Attributes
    ----------
    shape : names of axes, numbers, or sizes :class:`Derived` from axes
    dtype : name of an axis, name of an element type, or an :class:`ElementType`
    flag, when
        An optional tensor is present where the axis ``flag`` has the value ``when``, or one of the
        values where ``when`` is a tuple.
    strides : in elements: names of axes, or numbers; None for a contiguous tensor
    tolerance
        For an output: a tolerance that replaces the entry's, or the name of the axis whose value
        selects one of the entry's tolerances.
    optional_for_peers
        Peers need not write this output.
    updated
        This output holds values before the call, which the caller must therefore pass; elements
        that the entry does not write keep their values. Where such an output is optional, whether
        the caller passes it decides its flag; it comes after all outputs that are not optional.
    accumulated
        An updated output whose new values depend on its old ones: a second run on the same memory
        gives another result.
    mapped
        Other ranks write to this tensor of an entry of several ranks: it lies in memory that all
        ranks map (``kernelcat.ranks.group.Group.share``).
    as_stored
        ``make_inputs`` draws, and the oracle takes, this tensor's storage array instead of float32
        values: for weights that would not fit into memory as float32.
    """

    name: str
    shape: tuple[str | int | Derived, ...]
    dtype: str | ElementType
    doc: str = ""
    flag: str | None = None
    when: AxisValue | tuple[AxisValue, ...] = True
    strides: tuple[str | int, ...] | None = None
    tolerance: Tolerance | str | None = None
    optional_for_peers: bool = False
    updated: bool = False
    accumulated: bool = False
    as_stored: bool = False
    mapped: bool = False

    def shape_of(self, problem: Problem) -> tuple[int, ...]:
        """The shape for ``problem``."""
        return tuple(map(int, self.extents(problem.values)))

    def extents(self, axes: Mapping[str, Any]) -> tuple[Any, ...]:
        """The shape for axis values that may be symbolic integers."""
        return tuple([
            size.of(axes) if isinstance(size, Derived)
            else axes[size] if isinstance(size, str) else size
            for size in self.shape
        ])  # fmt: skip

    def strides_of(self, problem: Problem) -> tuple[int, ...]:
        """Strides for ``problem``, in elements."""
        if self.strides is not None:
            return tuple(s if isinstance(s, int) else int(problem[s]) for s in self.strides)
        strides, step = [], 1
        for extent in reversed(self.shape_of(problem)):
            strides.append(step)
            step *= max(extent, 1)
        return tuple(reversed(strides))

    def dtype_of(self, problem: Problem) -> str:
        """The element type for ``problem``."""
        return self.element_type(problem.values)

    def element_type(self, axes: Mapping[str, Any]) -> str:
        """The element type for axis values."""
        if isinstance(self.dtype, ElementType):
            return self.dtype.where(axes)
        return str(axes.get(self.dtype, self.dtype))

    def span_of(self, problem: Problem) -> int:
        """Number of elements from the first to the last, gaps included; 0 for an empty tensor."""
        shape = self.shape_of(problem)
        if 0 in shape:
            return 0
        return 1 + sum((d - 1) * s for d, s in zip(shape, self.strides_of(problem), strict=True))

    def present(self, problem: Problem | Mapping[str, Any]) -> bool:
        """Whether a problem, or the axis values ``problem``, have this tensor."""
        if self.flag is None:
            return True
        values = self.when if isinstance(self.when, tuple) else (self.when,)
        return problem[self.flag] in values

"""Problems of arrays that differ in sizes only from the arrays of an earlier call.

A call with a new signature is checked and described in full (:mod:`kernelcat.call.signature`),
which takes longer than everything else of a first call. Most such calls have the types, devices and
keywords of an earlier call, and other sizes. Their problem is read here: sizes are taken from the
positions where the earlier call had them, and then all shapes are compared with the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from kernelcat.bounded import Bounded
from kernelcat.call.arrays import Key, Library, family
from kernelcat.catalog.spec import AxisValue, Derived, Entry, Problem

Shapes = Sequence[tuple[int, ...] | None]
"""The shape of each input and output; None where absent."""


class Family:
    """The problems of calls that differ in sizes only; ``problem`` is that of the first call.

    ``shapes`` are those of the inputs and of the passed outputs. ``keywords`` are the axes that
    the caller gives. The calls have them in common but for sizes that vary.
    """

    def __init__(
        self, entry: Entry, problem: Problem, shapes: Shapes, keywords: Iterable[str] = ()
    ) -> None:
        self._entry = entry
        self._values = dict(problem.axes)
        self._ranks: list[tuple[int, int]] = []  # (position of a tensor, its rank)
        # (position of a tensor, from all values to its shape)
        self._shapes: list[tuple[int, Callable[[dict[str, Any]], Any]]] = []
        # (axis, its limit, its step, position of a tensor, dimension, None or Derived.tells'
        # function)
        self._reads: list[tuple[str, int, int, int, int, Any]] = []
        # (position of a tensor, dimension, expected size)
        self._checks: list[tuple[int, int, str | int | Derived]] = []
        self._varying = [(name, entry.axis(name)) for name in keywords if entry.axis(name).varies]
        known = set(keywords)
        for position, (tensor, shape) in enumerate(zip(entry.tensors, shapes, strict=False)):
            if shape is None:
                continue
            is_named = len(tensor.shape) > 1 and all(type(size) is str for size in tensor.shape)
            if is_named:  # a tuple of names: compared at once
                self._shapes.append((position, itemgetter(*tensor.shape)))
            else:
                self._ranks.append((position, len(tensor.shape)))
            for dimension, size in enumerate(tensor.shape):
                axis, invert = (
                    size.tells or (None, None) if isinstance(size, Derived) else (size, None)
                )
                if isinstance(axis, str) and axis not in known:
                    known.add(axis)
                    rule = entry.axis(axis)
                    self._reads.append((axis, rule.limit, rule.step, position, dimension, invert))
                    if invert is None:
                        continue
                if not is_named:
                    self._checks.append((position, dimension, size))

    def problem(self, shapes: Shapes, keywords: Mapping[str, Any]) -> Problem | None:
        """The problem of arrays with these shapes and of these keywords.

        None where :mod:`signature` must look closer. Raises ``InvalidArgument``, and ``IndexError``
        for an array of another rank.
        """
        for position, rank in self._ranks:
            if len(shapes[position]) != rank:  # type: ignore[arg-type]
                return None
        values = self._values.copy()
        for name, axis in self._varying:
            values[name] = axis.take(keywords[name])
        for name, limit, step, position, dimension, invert in self._reads:
            extent = shapes[position][dimension]  # type: ignore[index]
            values[name] = value = extent if invert is None else invert(extent, values)
            if not 0 <= value < limit or value % step:
                return None
        for position, shape_of in self._shapes:
            if shapes[position] != shape_of(values):
                return None
        for position, dimension, size in self._checks:
            kind = type(size)
            expected = (
                values[size] if kind is str  # type: ignore[index]
                else size if kind is int else size.of(values)  # type: ignore[union-attr]
            )  # fmt: skip
            if shapes[position][dimension] != expected:  # type: ignore[index]
                return None
        problem = Problem.with_values(self._entry.name, values)
        return None if self._entry.constraint(problem) else problem


class Resized(NamedTuple):
    """What a call shares with an earlier call, and its own problem."""

    problem: Problem
    device: int
    library: Library


class Families:
    """The families of an entry's calls, by everything that signatures have but sizes."""

    MAX_REMEMBERED = 64

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._varies = {axis.name: axis.varies for axis in entry.axes}
        # An entry with strides in its axes is read in full: shapes do not say everything.
        self._is_supported = all(tensor.strides is None for tensor in entry.tensors)
        self._known = Bounded[Any, tuple[Family, int, Library]](self.MAX_REMEMBERED)

    def add(
        self, key: Key, axes: Mapping[str, AxisValue], library: Library, problem: Problem,
        device: int,
    ) -> None:  # fmt: skip
        """Remember how problems of calls are read that differ from a call in sizes.

        ``key`` is that of ``scan``, ``axes`` are the call's keywords that are axes. Raises
        ``InvalidArgument`` for arrays that no family has.
        """
        if self._is_supported:
            facts, shapes = family(key)
            known = Family(self._entry, problem, shapes, axes)
            self._known[facts, self._fixed(axes.items())] = known, device, library

    def find(self, key: Key, axes: tuple[tuple[str, AxisValue], ...]) -> Resized | None:
        """The problem of a call whose family is known, or None.

        Raises ``InvalidArgument``, ``IndexError`` or ``KeyError`` where :mod:`signature` must look
        closer.
        """
        facts, shapes = family(key)
        known, device, library = self._known[facts, self._fixed(axes) if axes else ()]
        problem = known.problem(shapes, dict(axes))
        return None if problem is None else Resized(problem, device, library)

    def _fixed(self, axes: Iterable[tuple[str, AxisValue]]) -> tuple[Any, ...]:
        """What the keywords of a family's calls have in common."""
        return tuple([(name, None if self._varies[name] else value) for name, value in axes])

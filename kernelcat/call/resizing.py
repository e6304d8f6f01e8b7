"""Problems of arrays that differ in sizes only from the arrays of an earlier call.

A call with a new signature is checked and described in full (:mod:`kernelcat.call.signature`),
which takes longer than everything else of a first call. Most such calls have the types, devices and
keywords of an earlier call, and other sizes. Their problem is read here: sizes are taken from the
positions where the earlier call had them, and then all shapes are compared with the specification.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kernelcat.catalog.spec import Derived, Entry, Problem

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
        self._template = problem
        self._ranks: list[tuple[int, int]] = []  # (position of a tensor, its rank)
        # (axis, position of a tensor, dimension, None or Derived.tells' function)
        self._reads: list[tuple[str, int, int, Any]] = []
        # (position of a tensor, dimension, expected size)
        self._checks: list[tuple[int, int, str | int | Derived]] = []
        self._varying = [(name, entry.axis(name)) for name in keywords if entry.axis(name).varies]
        known = set(keywords)
        for position, (tensor, shape) in enumerate(zip(entry.tensors, shapes, strict=False)):
            if shape is None:
                continue
            self._ranks.append((position, len(tensor.shape)))
            for dimension, size in enumerate(tensor.shape):
                axis, invert = (
                    size.tells or (None, None) if isinstance(size, Derived) else (size, None)
                )
                if isinstance(axis, str) and axis not in known:
                    known.add(axis)
                    self._reads.append((axis, position, dimension, invert))
                    if invert is None:
                        continue
                self._checks.append((position, dimension, size))
        self._axes = [(name, entry.axis(name)) for name, *_ in self._reads]

    @staticmethod
    def supports(entry: Entry) -> bool:
        """Whether shapes say everything: an entry with strides in its axes is read in full."""
        return all(tensor.strides is None for tensor in entry.tensors)

    @staticmethod
    def key(entry: Entry, keywords: Mapping[str, Any]) -> tuple[Any, ...]:
        """What the keywords of a family's calls have in common."""
        return tuple(
            (name, None if entry.axis(name).varies else value) for name, value in keywords.items()
        )

    def problem(self, shapes: Shapes, keywords: Mapping[str, Any]) -> Problem | None:
        """The problem of arrays with these shapes and of these keywords.

        None where :mod:`signature` must look closer. Raises ``InvalidArgument``.
        """
        for position, rank in self._ranks:
            if len(shapes[position]) != rank:  # type: ignore[arg-type]
                return None
        values = dict(self._template.axes)
        for name, axis in self._varying:
            values[name] = axis.take(keywords[name])
        for name, position, dimension, invert in self._reads:
            extent = shapes[position][dimension]  # type: ignore[index]
            values[name] = extent if invert is None else invert(extent, values)
        for name, axis in self._axes:
            value = values[name]
            if not 0 <= value < axis.limit or value % axis.step:  # type: ignore[operator]
                return None
        for position, dimension, size in self._checks:
            expected = (
                values[size] if isinstance(size, str)
                else size.of(values) if isinstance(size, Derived) else size
            )  # fmt: skip
            if shapes[position][dimension] != expected:  # type: ignore[index]
                return None
        problem = Problem(self._entry.name, tuple(values.items()))
        return None if self._entry.constraint(problem) else problem

"""Problems: the axis values of one call, which tell its shapes and element types."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kernelcat.catalog.axes import PLAIN, AxisValue, plain
from kernelcat.errors import InvalidArgument, short


@dataclass(frozen=True)
class Problem:
    """Axis values of one call: canonical, hashable, JSON-able. ``problem["M"]`` reads a value."""

    entry: str
    axes: tuple[tuple[str, AxisValue], ...]

    @staticmethod
    def of(entry: str, /, **axes: AxisValue) -> Problem:
        """A problem that is not checked; :meth:`Entry.problem` checks, and adds defaults.

        ``InvalidArgument`` for a value that is no scalar, such as a list.
        """
        for name, value in axes.items():
            if type(value) not in PLAIN:
                axes[name] = value = plain(value)
                if getattr(value, "__hash__", None) is None:
                    raise InvalidArgument(f"{name}={short(value)} must be a number or a name")
        return Problem(entry, tuple(sorted(axes.items())))

    @staticmethod
    def with_values(entry: str, values: dict[str, AxisValue]) -> Problem:
        """The problem with these values, which belong to it from now on, in the canonical order."""
        problem = Problem(entry, tuple(values.items()))
        problem.__dict__["values"] = values
        return problem

    def __hash__(self) -> int:
        found: int | None = self.__dict__.get("_hash")
        if found is None:
            found = self.__dict__["_hash"] = hash((self.entry, self.axes))
        return found

    def __reduce__(self) -> tuple[type[Problem], tuple[str, tuple[tuple[str, AxisValue], ...]]]:
        return Problem, (self.entry, self.axes)  # not _hash: that of a str differs by process

    @cached_property
    def values(self) -> dict[str, AxisValue]:
        """Axis -> value."""
        return dict(self.axes)

    @cached_property
    def key(self) -> str:
        """Canonical JSON of the axes: the text the store compares by."""
        return json.dumps(self.values, sort_keys=True, separators=(",", ":"))

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self.axes)

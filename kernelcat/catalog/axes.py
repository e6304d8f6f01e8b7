"""Axes: along what problems of an entry differ, and how their sizes are bucketed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

from kernelcat.errors import InvalidArgument

AxisValue = int | float | str | bool
Bucket = Callable[[int], int]


def exact(size: int) -> int:
    """Bucketing rule: every size is its own bucket."""
    return size


def power_of_two(size: int) -> int:
    """Bucketing rule: the next power of two (0 and 1 stay themselves)."""
    return size if size < 2 else 1 << (size - 1).bit_length()


@dataclass(frozen=True)
class Axis:
    """One dimension along which problems of an entry differ.

    A *size* has ``low <= value <= high`` (the range fuzzing draws from; callers may go past
    ``high``), a bucketing rule and a ``step`` that divides it. A *choice* has ``values``; a flag is
    the choice of two booleans. A *number* is any finite float, and its ``values`` are examples.
    ``default`` is what a problem has that does not say; None means that it must say. A *minor*
    choice hardly changes which configuration is best, so that problems share a bucket across it;
    numbers are minor.
    """

    name: str
    doc: str
    values: tuple[AxisValue, ...] = ()
    low: int = 0
    high: int = 0
    bucket: Bucket = exact
    default: AxisValue | None = None
    minor: bool = False
    is_number: bool = False
    step: int = 1

    @staticmethod
    def size(
        name: str,
        doc: str,
        low: int,
        high: int,
        bucket: Bucket = power_of_two,
        default: int | None = None,
        step: int = 1,
    ) -> Axis:
        return Axis(name, doc, low=low, high=high, bucket=bucket, default=default, step=step)

    @staticmethod
    def choice(
        name: str,
        doc: str,
        *values: str | int,
        default: str | int | None = None,
        minor: bool = False,
    ) -> Axis:
        return Axis(name, doc, values=values, default=default, minor=minor)

    @staticmethod
    def flag(name: str, doc: str, minor: bool = False) -> Axis:
        return Axis(name, doc, values=(False, True), default=False, minor=minor)

    @staticmethod
    def number(name: str, doc: str, *examples: float, default: float | None = 0.0) -> Axis:
        return Axis(name, doc, values=examples, default=default, minor=True, is_number=True)

    def check(self, value: AxisValue) -> None:
        """Raise ``InvalidArgument`` unless ``value`` is one this axis can take."""
        if self.is_number:
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not isfinite(value)
            ):
                raise InvalidArgument(f"{self.name}={value!r} must be a finite number")
        elif self.values:
            if value not in self.values:
                names = ", ".join(str(v) for v in self.values)
                raise InvalidArgument(
                    f"{self.name}={value!r} is not supported; use one of: {names}"
                )
        elif isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidArgument(f"{self.name}={value!r} must be a whole number >= 0")
        elif value % self.step:
            raise InvalidArgument(f"{self.name}={value!r} must be a multiple of {self.step}")

"""Axes: the values by which problems of an entry differ, and the buckets that sizes fall into."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from kernelcat.errors import InvalidArgument, short

AxisValue = int | float | str | bool
Bucket = Callable[[int], int]


def exact(size: int) -> int:
    """Bucketing rule: every size is a bucket by itself."""
    return size


def power_of_two(size: int) -> int:
    """Bucketing rule: the next power of two (0 and 1 stay themselves)."""
    return size if size < 2 else 1 << (size - 1).bit_length()


def any_size(size: int) -> int:
    """Bucketing rule: all sizes are one bucket, because the size is that of a pool, not of work."""
    return 0


FINE_ABOVE = 256
"""Sizes of a fine axis up to which choices are shared as on any other axis: calls of few rows are
short, and programs meet most of these sizes."""

SIZE_LIMIT = 1 << 31
"""Sizes are less than this where an axis gives no other limit: kernels take them in 32 bits."""


PLAIN = frozenset((int, str, bool, float))
"""Types of the values of axes."""


def plain(value: Any) -> Any:
    """``value`` as a plain Python number, or the name of an element type.

    Takes scalars of NumPy and element types of torch, NumPy, CuPy and ml_dtypes
    (``torch.bfloat16`` becomes ``"bfloat16"``); any other value is returned as it is.
    """
    if type(value) in PLAIN:
        return value
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if torch is not None and isinstance(value, getattr(torch, "dtype", ())):
        return str(value).removeprefix("torch.")
    if numpy is None:
        return value
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, numpy.dtype):
        return value.name
    if isinstance(value, type) and issubclass(value, numpy.generic):
        return numpy.dtype(value).name
    return value


@dataclass(frozen=True)
class Axis:
    """One parameter by which problems of an entry differ: a size, a choice or a number.

    A *size* is an integer with a bucketing rule and a ``step`` that divides every value; fuzzing
    draws from ``low`` to ``high``. Callers may exceed ``high``, but a size is always less than
    ``limit``, a power of two. A *choice* is one of ``values``; a *flag* is the choice of two
    booleans. A *number* is any finite float, and ``values`` are examples. ``default`` is the value
    of a problem that does not give one; with None every problem must give one. A *minor* choice
    hardly changes which configuration is best, so problems that differ only in minor choices share
    a bucket; numbers are minor. A choice that is *drawn* describes inputs that are drawn: programs
    do not give it, so that calls have its default. It may have ``extra`` values, which the
    samples of digests do not take: a new one makes no measurement stale. Sizes that *vary* from
    call to call share choices (:meth:`shared`), those of a *fine* axis with fewer others.
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
    limit: int = SIZE_LIMIT
    drawn: bool = False
    extra: tuple[AxisValue, ...] = ()
    varies: bool = False
    fine: bool = False

    @staticmethod
    def size(
        name: str,
        doc: str,
        low: int,
        high: int,
        bucket: Bucket = power_of_two,
        default: int | None = None,
        step: int = 1,
        limit: int = SIZE_LIMIT,
        varies: bool = False,
        fine: bool = False,
    ) -> Axis:
        """An integer; its bucket is the next power of two unless another rule is given."""
        return Axis(
            name, doc, low=low, high=high, bucket=bucket, default=default, step=step,
            limit=limit, varies=varies, fine=fine,
        )  # fmt: skip

    @staticmethod
    def choice(
        name: str,
        doc: str,
        *values: str | int,
        default: str | int | None = None,
        minor: bool = False,
        drawn: bool = False,
        extra: tuple[str | int, ...] = (),
    ) -> Axis:
        """One of ``values``, or of ``extra`` where the choice is drawn."""
        return Axis(
            name, doc, values=values, default=default, minor=minor, drawn=drawn, extra=extra
        )

    @staticmethod
    def flag(name: str, doc: str, minor: bool = False) -> Axis:
        """False (the default) or True."""
        return Axis(name, doc, values=(False, True), default=False, minor=minor)

    @staticmethod
    def number(name: str, doc: str, *examples: float, default: float | None = 0.0) -> Axis:
        """Any finite float; fuzzing and tests take ``examples``."""
        return Axis(name, doc, values=examples, default=default, minor=True, is_number=True)

    def shared(self, size: int) -> int:
        """The size whose choice serves ``size``.

        Rows of a matrix product are *fine* above FINE_ABOVE: its tiles are of many heights, and
        their number should be that of the rows in the call.
        """
        return Axis.round_up(size, 32 if self.fine and size > FINE_ABOVE else 8)

    @staticmethod
    def round_up(size: int, values: int = 8) -> int:
        """The next larger or equal size of 1 to 16, 18, 20 ... 32, 36 and so on.

        There are ``values``, a power of two, from one power of two to the next.
        """
        step = 1 << max((size - 1).bit_length() - values.bit_length(), 0)
        return -(-size // step) * step

    def parse(self, text: str) -> AxisValue:
        """The value that ``text`` stands for, which :meth:`check` has yet to check.

        Raises ``InvalidArgument`` for text that is no value of this axis' type.
        """
        try:
            if self.is_number:
                return float(text)
            if not self.values:
                return int(text)
        except ValueError as error:
            kind = "a number" if self.is_number else "an integer"
            raise InvalidArgument(f"{self.name}={short(text)} must be {kind}") from error
        return next((v for v in self.values + self.extra if str(v).lower() == text.lower()), text)

    def take(self, value: Any) -> AxisValue:
        """The value that a caller gives, in plain Python; ``InvalidArgument`` for no legal one.

        Callers may give scalars of NumPy and element types of array libraries (:func:`plain`).
        """
        value = plain(value)
        self.check(value)
        if not self.is_number and self.values:  # 1 stands for True
            return next(legal for legal in self.values + self.extra if legal == value)
        taken: AxisValue = value
        return taken

    def check(self, value: Any) -> None:
        """Raise ``InvalidArgument`` unless this axis can take ``value``."""
        if self.is_number:
            if not _is_finite(value):
                raise InvalidArgument(f"{self.name}={short(value)} must be a finite number")
        elif self.values:
            allowed = self.values + self.extra
            if not isinstance(value, (str, int, float)) or value not in allowed:
                names = ", ".join(map(str, allowed))
                raise InvalidArgument(
                    f"{self.name}={short(value)} is not supported; use one of: {names}"
                )
        elif isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidArgument(f"{self.name}={short(value)} must be a whole number >= 0")
        elif value >= self.limit:
            bits = self.limit.bit_length() - 1
            raise InvalidArgument(f"{self.name}={short(value)} must be less than 2**{bits}")
        elif value % self.step:
            raise InvalidArgument(f"{self.name}={value!r} must be a multiple of {self.step}")


def _is_finite(value: Any) -> bool:
    """Whether ``value`` is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return isfinite(value)
    except OverflowError:
        return False

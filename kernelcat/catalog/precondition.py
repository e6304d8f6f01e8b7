"""Preconditions: what the values of arrays must satisfy, beyond shapes and element types.

Values lie on the device, so that a call does not look at them; ``kernelcat.debug()`` does. A
precondition is part of an entry's specification and of no digest: it decides nothing that is
launched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Axes = Mapping[str, Any]
Values = Mapping[str, Any]
"""Tensor name -> NumPy array: int64 for integers, else float32 values."""


@dataclass(frozen=True)
class Precondition:
    """What elements of one array must satisfy.

    Attributes
    ----------
    tensor : name of the array
    why
        What is wrong with an element that does not satisfy it; axes in braces stand for their
        values: ``the cache has {pages} pages``.
    broken : ``broken(axes, values) -> mask`` of the tensor's shape: True for wrong elements
        Earlier preconditions of the entry hold: lengths are within the table where the table's
        rows are read. Elements that no kernel reads are never wrong.
    reads : names of further arrays that ``broken`` reads
    """

    tensor: str
    why: str
    broken: Callable[[Axes, Values], Any]
    reads: tuple[str, ...] = ()


def least(tensor: str, low: float, *, excluded: bool = False) -> Precondition:
    """Every element is ``low`` or more, or only more where ``low`` is ``excluded``; NaN is less."""
    if excluded:
        return Precondition(
            tensor, f"must be more than {low:g}", lambda axes, values: ~(values[tensor] > low)
        )
    return Precondition(
        tensor, f"must be at least {low:g}", lambda axes, values: ~(values[tensor] >= low)
    )


def below_infinity(tensor: str, *, minus_infinity: bool) -> Precondition:
    """No element is NaN or +inf; -inf is allowed where ``minus_infinity`` is True."""
    infinity = float("inf")
    if minus_infinity:
        return Precondition(
            tensor, "must be finite or -inf", lambda axes, values: ~(values[tensor] < infinity)
        )
    return Precondition(
        tensor, "must be finite", lambda axes, values: ~(abs(values[tensor]) < infinity)
    )


def rising(tensor: str) -> tuple[Precondition, ...]:
    """A vector begins with 0, and no element is less than the one before: it sums up lengths."""

    def is_wrong_start(axes: Axes, values: Values) -> Any:
        mask = values[tensor] != 0
        mask[1:] = False
        return mask

    def falls(axes: Axes, values: Values) -> Any:
        mask = values[tensor] < 0
        mask[1:] = values[tensor][1:] < values[tensor][:-1]
        return mask

    return (
        Precondition(tensor, "the first element must be 0", is_wrong_start),
        Precondition(tensor, "less than the element before", falls),
    )

"""Checks and conversions of a measurement's fields; each error names the field and the value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from itertools import pairwise
from typing import cast

from kernelcat.errors import InvalidArgument

MAX_QUANTILES = 32
"""Most values of ``quantiles_us``."""
MAX_TEXT, _DETAIL, _INTEGER, _MEMBERS = 128, 2000, 1 << 63, 64
"""Limits: characters of a text and of ``detail``, integers (exclusive), keys of an object."""
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}").fullmatch


def short_repr(value: object) -> str:
    """``repr(value)``, shortened to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@lru_cache(1024)
def _is_word(text: str) -> bool:
    return _WORD(text) is not None


def check_word(name: str, value: object) -> None:
    if not isinstance(value, str) or not _is_word(value):
        raise InvalidArgument(
            f"{name}={short_repr(value)} must be a word of letters, digits and _.+-"
        )


def check_text(name: str, value: object, limit: int) -> None:
    if not isinstance(value, str) or len(value) > limit or not value.isprintable():
        raise InvalidArgument(
            f"{name}={short_repr(value)} must be one printable line of up to {limit} characters"
        )


def one_line(detail: object) -> str | None:
    """``detail`` (any text of compilers and drivers) as one printable line."""
    if detail is None:
        return None
    if not isinstance(detail, str):
        raise InvalidArgument(f"detail={short_repr(detail)} must be a text or null")
    text = " ".join(detail[: 4 * _DETAIL].split())
    return "".join(c if c.isprintable() else "?" for c in text)[:_DETAIL].strip() or None


def check_one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidArgument(f"{name}={short_repr(value)} must be one of: {', '.join(known)}")


def check_integer(name: str, value: object) -> None:
    if type(value) is not int or not 0 <= value < _INTEGER:
        raise InvalidArgument(f"{name}={short_repr(value)} must be a whole number >= 0")


def to_float(name: str, value: object, low: float, high: float) -> float | None:
    """``value`` as a float; it must be null or a number from ``low`` to ``high``."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgument(f"{name}={short_repr(value)} must be a number or null")
    if not (low <= value <= high and abs(value) <= 1e300):  # NaN fails every comparison
        raise InvalidArgument(f"{name}={short_repr(value)} is out of range [{low:g}, {high:g}]")
    return float(value) + 0.0  # no negative zero: a database would not keep it


def to_interval(value: object) -> tuple[float, float] | None:
    """``ci_us`` as (low, high), in microseconds; it must be null or a list of two numbers."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or len(value) != 2 or None in value:
        raise InvalidArgument(f"ci_us={short_repr(value)} must be [low, high]")
    low, high = (cast(float, to_float("ci_us", end, 0, 1e12)) for end in value)
    return (low, high)


def to_quantiles(value: object) -> tuple[float, ...] | None:
    """``quantiles_us``, in microseconds; it must be null or a list of ascending numbers."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not 0 < len(value) <= MAX_QUANTILES or None in value:
        raise InvalidArgument(
            f"quantiles_us={short_repr(value)} must be 1 to {MAX_QUANTILES} ascending numbers"
        )
    times = tuple(cast(float, to_float("quantiles_us", time, 0, 1e12)) for time in value)
    if any(later < earlier for earlier, later in pairwise(times)):
        raise InvalidArgument(f"quantiles_us={short_repr(value)} must ascend")
    return times


def check_values(name: str, mapping: object) -> None:
    """Check the problem or the configuration (``name``): words -> texts, numbers or booleans."""
    if not isinstance(mapping, Mapping) or len(mapping) > _MEMBERS:
        raise InvalidArgument(f"{name} must be an object of up to {_MEMBERS} members")
    for key, value in mapping.items():
        if not isinstance(key, str) or not _is_word(key):
            raise InvalidArgument(f"{short_repr(key)} cannot be a key of {name}")
        if isinstance(value, str):
            check_text(name, value, MAX_TEXT)
        elif not isinstance(value, (int, float)) or not abs(value) < _INTEGER:
            raise InvalidArgument(
                f"{name}.{key}={short_repr(value)} must be a number, text or boolean"
            )


def to_utc(value: object) -> str:
    """``created_at`` in UTC with milliseconds; it must be an ISO 8601 time with a time zone."""
    try:
        moment = datetime.fromisoformat(cast(str, value))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"created_at={short_repr(value)} must be an ISO 8601 time") from error
    if moment.tzinfo is None:
        raise InvalidArgument(f"created_at={short_repr(value)} must name a time zone (end in Z)")
    try:
        utc = moment.astimezone(UTC)
    except OverflowError as error:
        raise InvalidArgument(f"created_at={short_repr(value)} is out of range") from error
    return utc.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"

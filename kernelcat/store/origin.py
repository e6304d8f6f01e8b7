"""Origins: who brought a row into this database. An origin is no part of the measurement."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernelcat.store.measurement import Measurement

LOCAL = "local"
"""The row was measured here."""
SHIPPED = "shipped"
"""The row came with the package."""
UNKNOWN = "unknown"
"""An older kernelcat stored the row, and did not record its origin."""
MAX_CHARS = 256
"""Characters of an origin. Any other origin is the file or the database that was imported."""
DOUBT = "_doubt"
"""Attribute in which a row keeps why it cannot be true; the reason depends on the origin."""


def is_imported(origin: str) -> bool:
    """Whether ``origin`` is a file or a database of somebody."""
    return origin not in (LOCAL, SHIPPED, UNKNOWN)


def of_file(name: object) -> str:
    """The origin of rows that come from the file or database ``name``."""
    text = "".join(c if c.isprintable() else "?" for c in str(name))
    return text if len(text) <= MAX_CHARS else f"...{text[3 - MAX_CHARS :]}"


def brought(row: Measurement, origin: str, is_altered: bool = False) -> Measurement:
    """A copy of ``row`` with its origin; ``dataclasses.replace`` does not keep the origin.

    ``is_altered`` is whether the content differs from the digest that a database stores beside it.
    """
    row = copy(row)
    vars(row).pop(DOUBT, None)
    object.__setattr__(row, "origin", origin)
    object.__setattr__(row, "is_altered", is_altered)
    return row

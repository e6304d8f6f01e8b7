"""64-bit ELF files, as far as cubins and exported objects need it: sections and attributes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

NOBITS = 8
"""Type of a section that takes memory and no bytes of the file."""

_WITH_PAYLOAD = 4
"""The only layout of an attribute in ``.nv.info`` whose payload follows it."""


class Section(NamedTuple):
    """One section. ``size`` is that in memory; ``info`` is the header's ``sh_info``."""

    name: str
    kind: int
    body: bytes
    size: int
    info: int


def sections(elf: bytes) -> Iterator[Section]:
    """Every section of a file, in its order."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    step, count, names = struct.unpack_from("<HHH", elf, 58)
    rows = [struct.unpack_from("<IIQQQQII", elf, table + step * i) for i in range(count)]
    strings = rows[names][4]
    for name, kind, _flags, _address, offset, size, _link, info in rows:
        end = elf.index(b"\0", strings + name)
        body = b"" if kind == NOBITS else elf[offset : offset + size]
        yield Section(elf[strings + name : end].decode(), kind, body, size, info)


def attributes(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and payload of each attribute in a section ``.nv.info``, as they stand there.

    The payload of one that has none is the two bytes of its value.
    """
    at = 0
    while at + 4 <= len(body):
        layout, number, size = struct.unpack_from("<BBH", body, at)
        at += 4
        if layout == _WITH_PAYLOAD:
            yield number, body[at : at + size]
            at += size
        else:
            yield number, struct.pack("<H", size)

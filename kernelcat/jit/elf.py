"""Readers of 64-bit ELF files: sections, and the attributes in ``.nv.info`` of a cubin."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

NOBITS = 8
"""Type of a section that takes memory but no bytes of the file."""

_WITH_PAYLOAD = 4
"""The only format of an attribute in ``.nv.info`` with a payload after the attribute's header."""


class Section(NamedTuple):
    """One section. ``size`` is the size in memory; ``info`` is ``sh_info`` of the header."""

    name: str
    kind: int
    body: bytes
    size: int
    info: int


def sections(elf: bytes) -> Iterator[Section]:
    """The sections of a file, in the order of the file."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    step, count, names = struct.unpack_from("<HHH", elf, 58)
    rows = [struct.unpack_from("<IIQQQQII", elf, table + step * i) for i in range(count)]
    strings = rows[names][4]
    for name, kind, _flags, _address, offset, size, _link, info in rows:
        end = elf.index(b"\0", strings + name)
        body = b"" if kind == NOBITS else elf[offset : offset + size]
        yield Section(elf[strings + name : end].decode(), kind, body, size, info)


def attributes(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and payload of each attribute in the ``body`` of a section ``.nv.info``, in order.

    For an attribute without a payload, the two bytes of its value are returned as the payload.
    """
    offset = 0
    while offset + 4 <= len(body):
        layout, number, size = struct.unpack_from("<BBH", body, offset)
        offset += 4
        if layout == _WITH_PAYLOAD:
            yield number, body[offset : offset + size]
            offset += size
        else:
            yield number, struct.pack("<H", size)

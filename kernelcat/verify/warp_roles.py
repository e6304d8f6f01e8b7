"""Triton's table of warp roles, and the proof in the machine code that reading it is no race.

A kernel with ``warp_specialize`` keeps a table in shared memory with one byte for each warp after
the first warpgroup: which part of the kernel the warp runs next. The first warpgroup writes the
table and waits at a barrier of the thread block. The other warps wait at the same barrier and then
read their byte. Now and then racecheck (compute-sanitizer 2025.3, with Triton 3.6) reports such a
read as a hazard.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

FIRST_WARPS = 4
"""Warps of the first warpgroup, which write the table; its first byte is for the fifth warp."""
MAX_WARPS = 28
"""Most bytes of the table: a thread block has at most 32 warps."""
TABLE = re.compile(r"STS(?:\.U16|\.64|\.128)? \[U?R\d+\+0x([0-9a-f]+)\], .*")
"""A write to the table."""
BYTE = re.compile(r"LDS\.U8 R\d+, \[.*\+0x([0-9a-f]+)\]")
"""A read of a byte of the table."""
BLOCK_BARRIER = "BAR.SYNC.DEFER_BLOCKING 0x1"

_LINE = re.compile(r"^\s*(?:/\*([0-9a-f]{4,})\*/\s+([^;]*?)\s*;|(\.L\w+:))", re.MULTILINE)
_PART = re.compile(r"(?:@!?U?P\w+ )?(?:BAR|BRA|BRX|BRXU|JMP|JMX|CALL|RET|EXIT|BREAK|BSYNC)\b")
"""Barriers and branches."""
_LABEL = re.compile(r"\.L")
"""Targets of branches."""


class Ordered(NamedTuple):
    """Offsets in bytes of a write and a read that a barrier of the thread block orders."""

    write: int
    read: int


def ordered(sass: str) -> frozenset[Ordered]:
    """Writes and reads of the table that ``sass`` (from nvdisasm) proves to be ordered.

    The proof: every path from the write reaches the barrier, and every path to the read comes from
    the barrier, with no other barrier and no branch in between.
    """
    code = [(int(at or "0", 16), text or label) for at, text, label in _LINE.findall(sass)]
    writes, reads = list(_writes(code)), list(_reads(code))
    return frozenset(
        Ordered(write, read)
        for read, table in reads
        for write, address in writes
        if table <= address < table + MAX_WARPS
    )


def _writes(code: Sequence[tuple[int, str]]) -> Iterator[tuple[int, int]]:
    """Offset of each write to the table right before the barrier, and the address it writes."""
    for i, (at, text) in enumerate(code):
        match = TABLE.fullmatch(text)
        after = (text for _, text in code[i + 1 :] if _PART.match(text))
        if match and next(after, None) == BLOCK_BARRIER:
            yield at, int(match[1], 16)


def _reads(code: Sequence[tuple[int, str]]) -> Iterator[tuple[int, int]]:
    """Offset of each read right after the barrier, and the address of the fifth warp's byte."""
    for i, (at, text) in enumerate(code):
        match = BYTE.fullmatch(text)
        before = (text for _, text in code[:i][::-1] if _PART.match(text) or _LABEL.match(text))
        if match and next(before, None) == BLOCK_BARRIER:
            yield at, int(match[1], 16) + FIRST_WARPS

"""Where Triton tells warps their roles, and what in the machine code shows that it is no race.

A kernel with ``warp_specialize`` keeps a table in shared memory, a byte for each warp beyond the
first warpgroup: what it runs next. The first warpgroup writes the table and waits at a barrier of
the whole block; the others wait at that barrier and read their byte. Now and then racecheck
(compute-sanitizer 2025.3, with Triton 3.6) calls such a read a hazard.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

FIRST_WARPS = 4
"""Warps that write the table; the first byte is the next one's."""
MAX_WARPS = 28
"""Bytes of the table at most: a block has 32 warps."""
TABLE = re.compile(r"STS(?:\.U16|\.64|\.128)? \[U?R\d+\+0x([0-9a-f]+)\], .*")
BYTE = re.compile(r"LDS\.U8 R\d+, \[.*\+0x([0-9a-f]+)\]")
BLOCK_BARRIER = "BAR.SYNC.DEFER_BLOCKING 0x1"

_LINE = re.compile(r"^\s*(?:/\*([0-9a-f]{4,})\*/\s+([^;]*?)\s*;|(\.L\w+:))", re.MULTILINE)
_PART = re.compile(r"(?:@!?U?P\w+ )?(?:BAR|BRA|BRX|BRXU|JMP|JMX|CALL|RET|EXIT|BREAK|BSYNC)\b")
"""Barriers, and where paths part."""
_LABEL = re.compile(r"\.L")
"""Where paths meet."""


class Ordered(NamedTuple):
    """A write and a read that a barrier of the whole block orders, by their offsets in bytes."""

    write: int
    read: int


def ordered(sass: str) -> frozenset[Ordered]:
    """The writes and reads of the table in the code of a kernel, as nvdisasm prints it.

    Only those of which the text is the proof: every path from the write comes to the barrier, and
    every path to the read comes from it, past no other barrier and no branch.
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
    """Offset and address of what is written right before the barrier."""
    for i, (at, text) in enumerate(code):
        match = TABLE.fullmatch(text)
        after = (text for _, text in code[i + 1 :] if _PART.match(text))
        if match and next(after, None) == BLOCK_BARRIER:
            yield at, int(match[1], 16)


def _reads(code: Sequence[tuple[int, str]]) -> Iterator[tuple[int, int]]:
    """Offset of what is read right after the barrier, and the address of the fifth warp's byte."""
    for i, (at, text) in enumerate(code):
        match = BYTE.fullmatch(text)
        before = (text for _, text in code[:i][::-1] if _PART.match(text) or _LABEL.match(text))
        if match and next(before, None) == BLOCK_BARRIER:
            yield at, int(match[1], 16) + FIRST_WARPS

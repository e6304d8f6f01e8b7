"""Device memory of zeros for workspaces.

An allocation of the driver, with the zeros that a new workspace holds, takes longer than everything
else of a first call. So launchers that serve calls cut workspaces from larger pieces. Launchers
that are measured or verified have an allocation for each workspace: a sanitizer then finds accesses
outside of a workspace.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

from kernelcat.runtime import driver

PIECE_BYTES = 8 << 20
MAX_CUT_BYTES = PIECE_BYTES // 4
"""A larger workspace has an allocation of its own."""

_ALIGNMENT = 256  # as that of the driver's allocations


class Memory:
    """Device memory of zeros, freed with the last reference; ``pointer`` is 0 for a size of 0."""

    __slots__ = ("_device", "pointer")

    def __init__(self, size: int, device: int) -> None:
        self._device = device
        self.pointer = driver.opened().allocate(size, device) if size else 0

    def __del__(self) -> None:
        if getattr(self, "pointer", 0):
            try:  # noqa: SIM105 (when Python exits, globals such as `suppress` may be None)
                driver.opened().free(self.pointer, self._device)
            except Exception:
                pass  # when Python exits, the driver frees the memory


class Cut:
    """A part of a piece of zeros; the piece is freed with its last part."""

    __slots__ = ("_piece", "pointer")

    def __init__(self, piece: Memory, pointer: int) -> None:
        self._piece, self.pointer = piece, pointer


class _Piece:
    """The piece that workspaces are cut from, and the bytes that are cut from it already."""

    def __init__(self, device: int) -> None:
        self.memory, self.used = Memory(PIECE_BYTES, device), 0


_pieces: WeakKeyDictionary[Any, dict[int, _Piece]] = WeakKeyDictionary()
"""Driver -> GPU -> its newest piece."""
_lock = threading.Lock()


def cut(size: int, device: int) -> Memory | Cut:
    """``size`` bytes of zeros on GPU ``device``; nothing is used twice.

    Allowed in stream capture. Raises ``LaunchError`` where the GPU has no memory left.
    """
    if not 0 < size <= MAX_CUT_BYTES:
        return Memory(size, device)
    padded = -(-size // _ALIGNMENT) * _ALIGNMENT
    with _lock:
        pieces = _pieces.setdefault(driver.opened(), {})
        piece = pieces.get(device)
        if piece is None or piece.used + padded > PIECE_BYTES:
            piece = pieces[device] = _Piece(device)
        pointer = piece.memory.pointer + piece.used
        piece.used += padded
    return Cut(piece.memory, pointer)

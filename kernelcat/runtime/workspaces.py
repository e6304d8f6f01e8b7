"""Device memory of zeros for workspaces.

An allocation of the driver, with the zeros that a new workspace holds, takes longer than everything
else of a first call. So launchers that serve calls cut workspaces from larger pieces. Launchers
that are measured or verified have an allocation for each workspace: a sanitizer then finds accesses
outside of a workspace.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from kernelcat.runtime import driver

PIECE_BYTES = 32 << 20
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


Zeros = Callable[[Mapping[str, int], int], tuple[dict[str, int], Sequence[Memory]]]
"""``zeros(name -> bytes, device)``: the address of each workspace, and what keeps them alive."""


def separate(sizes: Mapping[str, int], device: int) -> tuple[dict[str, int], Sequence[Memory]]:
    """An allocation for each workspace."""
    spaces = {name: Memory(size, device) for name, size in sizes.items()}
    return {name: memory.pointer for name, memory in spaces.items()}, [*spaces.values()]


class _Piece:
    """The piece that workspaces are cut from, and the bytes that are cut from it already."""

    def __init__(self, device: int) -> None:
        self.memory, self.used = Memory(PIECE_BYTES, device), 0


_pieces: WeakKeyDictionary[Any, dict[int, _Piece]] = WeakKeyDictionary()
"""Driver -> GPU -> its newest piece."""
_lock = threading.Lock()


def cut(sizes: Mapping[str, int], device: int) -> tuple[dict[str, int], Sequence[Memory]]:
    """Workspaces of a piece that others are cut from too; nothing is used twice.

    The piece is freed when its last workspace is. Allowed in stream capture. Raises ``LaunchError``
    where the GPU has no memory left.
    """
    found: dict[str, int] = {}
    offsets: dict[str, int] = {}
    large: list[Memory] = []
    total = 0
    for name, size in sizes.items():
        if size > MAX_CUT_BYTES:
            large.append(Memory(size, device))
            found[name] = large[-1].pointer
        elif size:
            offsets[name] = total
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        else:
            found[name] = 0
    if not total:
        return found, large
    if total > PIECE_BYTES:
        memory, used = Memory(total, device), 0
    else:
        with _lock:
            pieces = _pieces.setdefault(driver.opened(), {})
            piece = pieces.get(device)
            if piece is None or piece.used + total > PIECE_BYTES:
                piece = pieces[device] = _Piece(device)
            memory, used = piece.memory, piece.used
            piece.used += total
    start = memory.pointer + used
    for name, offset in offsets.items():
        found[name] = start + offset
    return found, [*large, memory]

"""A group whose ranks keep arrays on the host, for compute-sanitizer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernelcat.catalog.implementation import MappedPointer
from kernelcat.ranks.group import Group
from kernelcat.runtime.device import Arrays, Bind, MirroredDevice, Run
from kernelcat.runtime.launcher import Launcher
from kernelcat.verify.sanitizer import MAPPED

LAUNCHES = 3
"""Launches of a run: an odd number, so that the next run begins with the other half of the windows.
Nothing is copied between them, as in a CUDA graph."""


class MirroredGroup(Group):
    """A :class:`Group` on NumPy arrays: every run copies them to the GPU and back.

    As with :class:`~kernelcat.runtime.device.MirroredDevice` every array gets an allocation of its
    exact size, and no kernels but the catalog's run. Mapped tensors lie in memory that all ranks
    map, which is copied whole, guard bands included. The ranks meet on the host right before they
    launch, because a kernel waits for 5 s at most, and a tool may slow down one rank's copies.
    """

    def __init__(
        self, rank: int, ranks: int, path: Path, device: MirroredDevice, slowness: float = 1.0
    ) -> None:
        super().__init__(rank, ranks, path, device.cuda, slowness=slowness)
        self.mirrored, self.xp = device, device.xp
        self._mirrors: list[tuple[Any, Any]] = []  # arrays of `share`, and what they are copied to

    def share(self, size: int) -> Any:
        """An array of bytes on the host, which a run copies to memory that all ranks map."""
        memory, array = super().share(size), np.empty(size, "uint8")
        self._mirrors.append((array, memory))
        return array

    def unshare(self) -> None:
        """Free the memory of :meth:`share`, which nobody uses any more."""
        self._mirrors.clear()
        super().unshare()

    def _bind(self, launch: Launcher, peers: Sequence[MappedPointer]) -> Bind:
        bind = super()._bind(launch, peers)

        def bind_mirrored(arrays: Arrays) -> Run:
            def run() -> None:
                own = {name: self.mirrored.span(array) for name, array in arrays.items()
                       if self._mirrored_at(array) is None}  # fmt: skip
                copies = {name: self.mirrored.upload(span) for name, span in own.items()}
                mapped = {name: self._mirrored_at(array) for name, array in arrays.items()
                          if name not in own}  # fmt: skip
                for array, memory in self._mirrors:
                    memory.set(array)
                bound = bind({**copies, **mapped})
                self.device.synchronize()
                print(f"{MAPPED}{self._mappings()}", file=sys.stderr, flush=True)
                self.meet()  # nobody writes to another rank before all have copied
                for _ in range(LAUNCHES):
                    bound()
                self.synchronize()
                for array, memory in self._mirrors:
                    memory.get(out=array)
                for name, span in own.items():
                    copies[name].get(out=span)

            return run

        return bind_mirrored

    def _mirrored_at(self, array: Any) -> Any:
        """The bytes on the GPU that stand for ``array``; None if it is not in memory of `share`."""
        address = array.__array_interface__["data"][0]
        for whole, memory in self._mirrors:
            offset = address - whole.__array_interface__["data"][0]
            if 0 <= offset < whole.size:
                return memory[offset : offset + self.mirrored.span(array).nbytes]
        return None

    def _mappings(self) -> str:
        """All windows and all memory of `share`: each with its rank, first and last address."""
        return " ".join(
            f"{rank}:{memory.address:#x}-{memory.address + memory.size - 1:#x}"
            for memories in (self.windows, *self._shared) for rank, memory in enumerate(memories)
        )  # fmt: skip

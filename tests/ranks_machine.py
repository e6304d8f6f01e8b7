"""A machine of ranks without GPUs: ``RANK RANKS SOCKET JOB``, a job of `kernelcat.ranks.worker`.

Kernels run on the CPU (`cuda_fibers`), windows are memory files, and CuPy's streams and events are
stand-ins. Groups, checks and races are the package's own. Prints the job's value, or the error. A
job's ``last`` replaces what it names on the last rank; with ``is_broken`` its results are wrong.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda_fibers
import numpy as np

from kernelcat.errors import CompileError, RankFailed
from kernelcat.jit.interpreter import interpret
from kernelcat.jit.triton import TritonSource
from kernelcat.kernels.cuda import all_reduce, kv_transfer
from kernelcat.kernels.cuda.common import expert_exchange
from kernelcat.ranks import group, links, race
from kernelcat.ranks.worker import verbs
from kernelcat.runtime import gpu
from kernelcat.runtime.device import MirroredDevice

MAX_BLOCKS = 512
"""More than any grid has."""


class Stream:
    """Runs at once, but what is captured when its graph is launched."""

    captured: list[Callable[[], None]] | None = None

    def __init__(self, non_blocking: bool) -> None:
        assert non_blocking

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin_capture(self) -> None:
        Stream.captured = []

    def end_capture(self) -> Any:
        runs, Stream.captured = Stream.captured, None
        return SimpleNamespace(launch=lambda stream: [run() for run in runs or ()])


class Event:
    """A time of the host."""

    def record(self, stream: Stream) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass


class Arrays:
    """NumPy, with CuPy's streams."""

    cuda = SimpleNamespace(
        Stream=Stream, Event=Event,
        get_elapsed_time=lambda start, end: (end.seconds - start.seconds) * 1e3,
    )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


class Device:
    """The GPU that all ranks share."""

    index, gpu, xp = 0, gpu.find("h200"), Arrays()
    is_broken = False  # whether the first bit of each result is wrong

    def synchronize(self) -> None:
        pass

    @staticmethod
    def address_of(array: Any) -> int:
        return int(array.__array_interface__["data"][0])

    @staticmethod
    def bytes_at(address: int, size: int, owner: object) -> Any:
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def bind(self, program: Any) -> Any:
        def bind(arrays: Any) -> Callable[[], None]:
            def launch() -> None:
                if any(isinstance(step.source, TritonSource) for step in program.steps):
                    interpret(program, arrays)
                else:
                    cuda_fibers.run(program, arrays, MAX_BLOCKS, seed=1)
                if Device.is_broken and arrays["out"].size:
                    arrays["out"].reshape(-1).view("uint8")[0] ^= 1

            def run() -> None:
                launch() if Stream.captured is None else Stream.captured.append(launch)

            return run

        return bind


class Copied(np.ndarray):
    """An array of the stand-in's memory, which takes what is copied from and to the host."""

    def set(self, array: Any) -> None:
        self[...] = array

    def get(self, out: Any) -> None:
        out[...] = self


class CopyingDevice(Device):
    """The GPU of a :class:`MirroredDevice`: its arrays are copies."""

    xp: Any = SimpleNamespace(empty=lambda shape, dtype: np.empty(shape, dtype).view(Copied))

    @staticmethod
    def bytes_at(address: int, size: int, owner: object) -> Any:
        return Device.bytes_at(address, size, owner).view(Copied)


class Mirrored(MirroredDevice):
    """A :class:`MirroredDevice` without a GPU."""

    def __init__(self) -> None:
        self.cuda: Any = CopyingDevice()
        self.xp, self.gpu = np, self.cuda.gpu


class Memory:
    """A memory file that other processes map."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size, self.bytes = fd, size, mmap.mmap(fd, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))

    @staticmethod
    def allocated(size: int, device: int) -> Memory:
        fd = os.memfd_create("window")
        os.ftruncate(fd, size)
        return Memory(fd, size)

    @staticmethod
    def imported(fd: int, size: int, device: int) -> Memory:
        return Memory(fd, size)

    def exported(self) -> int:
        return os.dup(self.fd)

    def free(self) -> None:
        pass


DRIVER = SimpleNamespace(
    version=lambda: "13.0", count=lambda: 1, pci_bus_id=lambda number: "0000:01:00.0",
    read=lambda address, size, device, stream: bytearray(ctypes.string_at(address, size)),
)  # fmt: skip


def stand_in(too_new: str = "") -> None:
    """Replace GPU memory, driver and launcher; one configuration for each variant, short races.

    ``too_new`` is an implementation that does not compile.
    """
    module: Any = group
    module.Memory = Memory
    module.driver = links.driver = SimpleNamespace(opened=lambda: DRIVER)  # type: ignore[attr-defined]

    def prepare(name: str, program: Any, *_: Any) -> Any:
        if name == too_new:
            raise CompileError(f"{name} does not compile", "")
        return program

    module.launcher = SimpleNamespace(prepare=prepare)
    race.BLOCKS, race.SHORT, race.MAX_NODES, race.SCREEN_US, race.BLOCK_US = 3, 2, 2, 1.0, 1.0
    all_reduce.LL_SPACE.update(threads=(128,), blocks=(8,))
    all_reduce.TILE_SPACE.update(unroll=(1,), blocks=(16,))
    all_reduce.SLOT_SPACE.update(blocks=(64,))
    kv_transfer.SPACE.update(unroll=(2,), blocks=(8,))
    expert_exchange.LL_SPACE.update(blocks=(64,))
    expert_exchange.TILE_SPACE.update(tile_tokens=(1,), blocks=(32,))


def main() -> None:
    rank, ranks, job = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[4])
    if rank == ranks - 1:
        job |= job.pop("last", {})
        Device.is_broken = job.get("is_broken", False)
    stand_in(job.get("too_new", ""))
    try:
        joined = group.Group(rank, ranks, Path(sys.argv[3]), Device())  # type: ignore[arg-type]
        print(json.dumps(verbs()[job["verb"]](joined, job)))
        joined.close()
    except RankFailed as error:
        print(json.dumps(str(error)))


if __name__ == "__main__":
    main()

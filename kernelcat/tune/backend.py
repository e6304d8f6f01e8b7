"""What a tune runs on: a catalog, its compilers, a device and a clock.

A worker process is told its backend by name (``module:factory``), so kernels from outside the
catalog, or a device without CUDA, are tuned by the same machinery.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kernelcat import catalog, jit
from kernelcat.bench import peers
from kernelcat.bench.timer import CudaTimer, Timer
from kernelcat.catalog.digest import digest
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.errors import InvalidArgument, MissingDependency
from kernelcat.runtime import driver, gpu
from kernelcat.runtime.device import Arrays, CudaDevice, Device
from kernelcat.runtime.devices import VISIBLE, visible
from kernelcat.runtime.gpu import Gpu

CUDA = "kernelcat.tune.backend:Cuda"


class Backend(Protocol):
    """The catalog part is used in every process; ``device`` and what follows only in a worker."""

    def entry(self, name: str) -> Entry: ...

    def implementations(self, name: str) -> tuple[Implementation, ...]: ...

    def digest(self, implementation: Implementation) -> str: ...

    def count(self) -> int:
        """How many GPUs this machine has."""
        ...

    def gpu(self, index: int) -> Gpu:
        """A GPU of this machine; ``MissingDependency`` where there is none."""
        ...

    def build(
        self, implementation: Implementation, problem: Problem, config: Config, gpu: Gpu
    ) -> list[Mapping[str, Any]]:
        """Compile every step; the artifacts' metadata, with the dynamic ``shared_bytes``."""
        ...

    def device(self, index: int) -> Device: ...

    def timer(self, device: Device) -> Timer: ...

    def pci_bus_id(self, device: Device) -> str | None: ...

    def free_bytes(self, device: Device) -> int: ...

    def release(self, device: Device) -> None:
        """Give freed arrays' memory back to the device."""
        ...

    def bind_peer(
        self, entry: Entry, problem: Problem, timer: Timer, make: Callable[..., Any]
    ) -> Callable[[Arrays], Callable[[], Any]]: ...


class Cuda:
    """The catalog on an NVIDIA GPU."""

    entry = staticmethod(catalog.entry)
    implementations = staticmethod(catalog.implementations)
    digest = staticmethod(digest)
    count = staticmethod(driver.count)

    def gpu(self, index: int) -> Gpu:
        return gpu.detect(index)

    def build(
        self, implementation: Implementation, problem: Problem, config: Config, gpu: Gpu
    ) -> list[Mapping[str, Any]]:
        built: list[Mapping[str, Any]] = []
        for step in implementation.program(problem, config, gpu).steps:
            source: Any = step.source
            artifact = jit.build(source, gpu.arch)
            dynamic = {"shared_bytes": step.shared_bytes} if step.shared_bytes else {}
            built.append({**artifact.metadata, **dynamic})
        return built

    def device(self, index: int) -> CudaDevice:
        """The GPU, alone and first in this process, which must not have used CUDA yet.

        Libraries that think of GPU 0 must neither fail on another one nor disturb its race.
        """
        os.environ[VISIBLE] = visible(index)
        return CudaDevice(0)

    def timer(self, device: Any) -> CudaTimer:
        return CudaTimer(device)

    def pci_bus_id(self, device: Any) -> str | None:
        return str(device.xp.cuda.runtime.deviceGetPCIBusId(device.index))

    def free_bytes(self, device: Any) -> int:
        return int(device.xp.cuda.runtime.memGetInfo()[0])

    def release(self, device: Any) -> None:
        peers.forget()
        device.xp.get_default_memory_pool().free_all_blocks()

    def bind_peer(
        self, entry: Entry, problem: Problem, timer: Any, make: Callable[..., Any]
    ) -> Callable[[Arrays], Callable[[], Any]]:
        peers.enter(timer)
        return peers.binder(entry, problem, make)


def load(spec: str) -> Backend:
    """The backend called ``module:factory``.

    Raises
    ------
    InvalidArgument
        When it does not name one.
    """
    module, _, factory = spec.partition(":")
    try:
        found: Backend = getattr(importlib.import_module(module), factory)()
    except ModuleNotFoundError as error:
        if error.name != module:
            raise MissingDependency(f"backend {spec}: {error}") from error
        raise InvalidArgument(f"no backend {spec!r}: {error}") from error
    except AttributeError as error:
        raise InvalidArgument(f"no backend {spec!r}: {error}") from error
    return found

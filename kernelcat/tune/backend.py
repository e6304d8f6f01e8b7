"""Backends: the catalog, the compilers, the devices and the timer that a tune uses.

Every process of a tune loads the backend by its name (``module:factory``). Another backend can
therefore tune kernels from outside the catalog, or use a device without CUDA.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from kernelcat import catalog, jit
from kernelcat.bench import peers
from kernelcat.bench.states import STATES, State
from kernelcat.bench.timer import CudaTimer, Timer
from kernelcat.catalog.digest import digest
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.errors import InvalidArgument, MissingDependency
from kernelcat.runtime import driver, gpu
from kernelcat.runtime.device import Arrays, CudaDevice, Device
from kernelcat.runtime.devices import VISIBLE, visible
from kernelcat.runtime.gpu import Gpu

if TYPE_CHECKING:
    from kernelcat.call.choice import Attempt, Decision
    from kernelcat.store import Snapshot

CUDA = "kernelcat.tune.backend:Cuda"


class Backend(Protocol):
    """The interface of a backend.

    The methods from ``device`` on are called in the measuring process only.
    """

    def entry(self, name: str) -> Entry: ...

    def implementations(self, name: str) -> tuple[Implementation, ...]: ...

    def digest(self, implementation: Implementation) -> str: ...

    def count(self) -> int:
        """Number of GPUs in this machine."""
        ...

    def gpu(self, index: int) -> Gpu:
        """GPU ``index`` of this machine; raises ``MissingDependency`` where there is none."""
        ...

    def build(
        self, implementation: Implementation, problem: Problem, config: Config, gpu: Gpu
    ) -> list[Mapping[str, Any]]:
        """Compiles every step; the metadata of the artifacts, with the dynamic ``shared_bytes``."""
        ...

    def decide(
        self, entry: Entry, problem: Problem, gpu: Gpu, failed: Mapping[Attempt, str]
    ) -> Decision:
        """What serves a program's call of ``problem``; raises ``Unsupported`` if nothing does.

        ``failed`` has the configurations that could not be compiled, with the reason.
        """
        ...

    def device(self, index: int) -> Device: ...

    def timer(self, device: Device) -> Timer: ...

    def state(self, name: str) -> State:
        """How races in the thermal state ``name`` are run on this device."""
        ...

    def pci_bus_id(self, device: Device) -> str | None: ...

    def free_bytes(self, device: Device) -> int: ...

    def release(self, device: Device) -> None:
        """Returns the memory of freed arrays to the device."""
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

    def decide(
        self, entry: Entry, problem: Problem, gpu: Gpu, failed: Mapping[Attempt, str]
    ) -> Decision:
        from kernelcat.call.choice import Pin
        from kernelcat.call.sharing import Choices

        rows, refuted = self.known.choices(entry.name), self.known.refuted(entry.name)
        return Choices(entry, Pin(), rows, refuted).choose(problem, gpu, failed=failed)

    @cached_property
    def known(self) -> Snapshot:
        """The shipped results and the user's own, as calls read them."""
        from kernelcat.store import snapshot

        return snapshot()

    def device(self, index: int) -> CudaDevice:
        """GPU ``index`` as the only visible GPU of this process, with index 0.

        The process must not have used CUDA before. Some libraries use GPU 0 whatever GPU is
        current; they would fail, or disturb the race on GPU 0.
        """
        os.environ[VISIBLE] = visible(index)
        return CudaDevice(0)

    def timer(self, device: Any) -> CudaTimer:
        return CudaTimer(device)

    def state(self, name: str) -> State:
        return STATES[name]

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
    """The backend that ``spec``, ``module:factory``, names.

    Raises
    ------
    InvalidArgument
        There is no such module or factory.
    MissingDependency
        The module imports a package that is not installed.
    """
    module, _, factory = spec.partition(":")
    try:
        backend: Backend = getattr(importlib.import_module(module), factory)()
    except ModuleNotFoundError as error:
        if error.name != module:
            raise MissingDependency(f"backend {spec}: {error}") from error
        raise InvalidArgument(f"no backend {spec!r}: {error}") from error
    except AttributeError as error:
        raise InvalidArgument(f"no backend {spec!r}: {error}") from error
    return backend

"""A group: what one rank sees of the ranks that compute with it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import kernelcat
from kernelcat import catalog
from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    MappedPointer,
    Param,
    Pointer,
    Program,
    Rank,
    Window,
)
from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument, KernelcatError, RankFailed
from kernelcat.ranks import links
from kernelcat.ranks.rendezvous import Rendezvous, Watch, by_rank, require_equal
from kernelcat.ranks.window import ERROR_OFFSET, WINDOW_BYTES, Memory
from kernelcat.runtime import code, driver, gpu, launcher
from kernelcat.runtime.device import Arrays, Bind, CudaDevice
from kernelcat.runtime.gpu import Gpu
from kernelcat.runtime.launcher import Launcher

Loaded = tuple[Launcher, list[MappedPointer]]
"""What launches, and the addresses at other ranks that it takes beside the entry's tensors."""

LOAD_S = 120.0
"""Seconds in which all ranks must have prepared what they launch: some compile, others need not."""


class Group:
    """Rank ``rank`` of ``ranks`` processes of one host, on the GPU of ``device``.

    All ranks make a group with the same socket ``path``, whose folder exists; then they load the
    same programs and launch them in the same order, each behind the one before. ``watch`` and
    ``slowness`` are those of :class:`~kernelcat.ranks.rendezvous.Rendezvous`. It is a
    :class:`~kernelcat.runtime.device.Device` for implementations of entries of several ranks.

    Raises
    ------
    RankFailed
        A rank did not come or ended; or ranks have different versions of the driver or of this
        package, or GPUs of different kinds or without access to each other.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        path: Path,
        device: CudaDevice,
        watch: Watch | None = None,
        slowness: float = 1.0,
    ) -> None:
        self.rank, self.ranks, self.path, self.device = rank, ranks, path, device
        self.gpu, self.xp = device.gpu, device.xp
        self.rendezvous = Rendezvous(rank, ranks, path, watch=watch, slowness=slowness)
        self._bus_ids = self._agree_on_machine()
        self.windows = self._mapped(WINDOW_BYTES)
        self._shared: list[list[Memory]] = []

    @property
    def shares_gpus(self) -> bool:
        """Whether two ranks have one GPU."""
        return len(set(self._bus_ids)) < self.ranks

    @property
    def pci_bus_id(self) -> str:
        """PCI bus id of this rank's GPU."""
        return self._bus_ids[self.rank]

    @property
    def machine(self) -> Gpu:
        """The GPUs of all ranks, as results name them: ``h200x2-nvlink``, ``h200x1-shared``."""
        gpus = set(self._bus_ids)
        if len(gpus) == 1:
            return gpu.together(self.gpu, 1, "shared")
        link = "nvlink" if links.are_nvlink(self.device.index, gpus) else "pcie"
        return gpu.together(self.gpu, len(gpus), link)

    def load(self, implementation: Implementation, problem: Problem, config: Config) -> Bind:
        """Build a configuration on every rank; the bind takes this rank's parts of CuPy arrays.

        Tensors that are ``mapped`` must lie in memory of :meth:`share`, at the same place on all
        ranks. Raises what :meth:`launcher` raises.
        """
        return self._bind(*self._load(implementation, problem, config))

    def launcher(
        self,
        implementation: Implementation,
        problem: Problem,
        config: Config,
        sms: int | None = None,
    ) -> Launcher:
        """Build a configuration on every rank; the launcher takes addresses of this rank's parts.

        ``sms`` is the number of SMs for which launches are sized; None for all of the GPU.

        Raises
        ------
        InvalidArgument
            The entry is not one of several ranks, or is one of another number of ranks.
        RankFailed
            The ranks load different problems or configurations, or one of them failed.
        CompileError, LaunchError, MissingDependency
            This rank failed; the others raise ``RankFailed``.
        """
        return self._load(implementation, problem, config, sms)[0]

    def try_load(
        self, implementation: Implementation, problem: Problem, config: Config
    ) -> Bind | str:
        """As :meth:`load`, or why ranks cannot build the configuration: the same on all ranks."""
        try:
            loaded = self._prepare(implementation, problem, config)
        except KernelcatError as error:
            loaded, reason = None, str(error)
        else:
            reason = ""
        reasons, _ = self.rendezvous.gather(reason, limit_s=LOAD_S)
        if loaded is None or any(reasons):
            return by_rank(reasons)
        return self._bind(*loaded)

    def load_alone(self, implementation: Implementation, problem: Problem, config: Config) -> Bind:
        """As :meth:`load`, on this rank only: for kernels that wait for no other rank."""
        return self._bind(*self._prepare(implementation, problem, config))

    def _load(
        self,
        implementation: Implementation,
        problem: Problem,
        config: Config,
        sms: int | None = None,
    ) -> Loaded:
        """Build a configuration on every rank; raises what :meth:`launcher` raises."""
        entry = catalog.entry(implementation.entry)
        if entry.ranks is None or problem[entry.ranks] != self.ranks:
            raise InvalidArgument(f"{entry.name} {problem} is not for {self.ranks} ranks")
        try:
            loaded = self._prepare(implementation, problem, config, sms)
        except KernelcatError as error:
            self.rendezvous.fail(str(error))
            raise
        self._agree("loads", f"{implementation.name} {problem} {config} {sms or self.gpu.sms}")
        return loaded

    def _prepare(
        self,
        implementation: Implementation,
        problem: Problem,
        config: Config,
        sms: int | None = None,
    ) -> Loaded:
        """Build a configuration on this rank."""
        entry = catalog.entry(implementation.entry)
        addresses = [window.address for window in self.windows]
        part = self.gpu if sms is None else replace(self.gpu, sms=sms)
        program = implementation.program(problem, config, part)
        peers = mapped_pointers(program)
        program = filled(program, self.rank, addresses)
        find = partial(code.of_source, arch=self.gpu.arch, device=self.device.index)
        names = (*entry.tensor_names, *(pointer.name for pointer in peers))
        launch = launcher.prepare(
            implementation.name, program, lambda step: find(step.source), names, self.device.index
        )
        return launch, peers

    def _bind(self, launch: Launcher, peers: Sequence[MappedPointer]) -> Bind:
        bind = self.device.bind(launch)
        return lambda arrays: bind({**arrays, **self.at_peers(peers, arrays)})

    def share(self, size: int) -> Any:
        """Memory of at least ``size`` bytes that all ranks map, as an array of bytes (uint8).

        All ranks call this together, with the same size. The memory lives until :meth:`unshare`.
        """
        memories = self._mapped(size)
        self._shared.append(memories)
        own = memories[self.rank]
        return self.device.bytes_at(own.address, own.size, own)[:size]

    def unshare(self) -> None:
        """Free the memory of :meth:`share`, which nobody uses any more."""
        for memory in (memory for memories in self._shared for memory in memories):
            memory.free()
        self._shared.clear()

    def at_peers(self, pointers: Iterable[MappedPointer], arrays: Arrays) -> Arrays:
        """The bytes of mapped tensors of other ranks, by the names of the pointers to them.

        Raises ``InvalidArgument`` for a tensor that does not lie in memory of :meth:`share`.
        """
        found = {}
        for pointer in pointers:
            if pointer.shift >= self.ranks or pointer.tensor not in arrays:
                continue
            array = arrays[pointer.tensor]
            memories, offset = self._place(pointer.tensor, self.device.address_of(array))
            peer = memories[(self.rank + pointer.shift) % self.ranks]
            found[pointer.name] = self.device.bytes_at(peer.address + offset, array.nbytes, peer)
        return found

    def at_ranks(self, array: Any) -> list[Any]:
        """The bytes of an array in memory of :meth:`share`, of all ranks: this rank's, too."""
        memories, offset = self._place("an array", self.device.address_of(array))
        return [
            self.device.bytes_at(memory.address + offset, array.nbytes, memory)
            for memory in memories
        ]

    def _place(self, name: str, address: int) -> tuple[list[Memory], int]:
        """The shared memory that has ``address``, and the bytes before it."""
        for memories in self._shared:
            offset = address - memories[self.rank].address
            if 0 <= offset < memories[self.rank].size:
                return memories, offset
        raise InvalidArgument(f"{name} must lie in memory that all ranks map: see Group.share")

    def meet(self) -> None:
        """Wait until all ranks have prepared what comes; raises ``RankFailed``."""
        self.rendezvous.gather(None, limit_s=LOAD_S)

    def synchronize(self) -> None:
        """Wait until the GPUs of all ranks have done their work.

        Raises
        ------
        RankFailed
            A rank did not answer a kernel in time, has ended, or did not call this function.
        """
        self.device.synchronize()
        missing = self.missing()
        if missing is not None:
            reason = f"rank {missing} did not answer a kernel of rank {self.rank} in time"
            self.rendezvous.fail(reason)
            raise RankFailed(reason)
        self.rendezvous.gather(None)

    def close(self) -> None:
        """Leave the group, after all ranks have called this or ended."""
        self.device.synchronize()
        self.rendezvous.gather(None)
        self.unshare()
        for window in self.windows:
            window.free()
        self.rendezvous.close()

    def _mapped(self, size: int) -> list[Memory]:
        """Memory of each rank that this rank maps, zeros, of which this rank allocates its own."""
        index = self.device.index
        own = Memory.allocated(size, index)
        _, fds = self.rendezvous.gather(None, own.exported())
        memories = [own if rank == self.rank else Memory.imported(fd, own.size, index)
                    for rank, fd in enumerate(fds)]  # fmt: skip
        os.close(fds[self.rank])
        self.rendezvous.gather(None)  # nobody writes before all memory is zero
        return memories

    def missing(self) -> int | None:
        """The rank that a kernel of this rank waited for in vain, or None; waits for no kernel."""
        address = self.windows[self.rank].address + ERROR_OFFSET
        word = driver.opened().read(address, 4, self.device.index, 0)
        return int.from_bytes(word, "little") - 1 if any(word) else None

    def _agree(self, does: str, what: str) -> None:
        """Raise ``RankFailed`` on all ranks unless ``what`` is the same on all."""
        texts, _ = self.rendezvous.gather(what, limit_s=LOAD_S)
        require_equal(texts, does)

    def _agree_on_machine(self) -> list[str]:
        """The PCI bus ids of the ranks' GPUs, which are of one kind and reach each other."""
        index = self.device.index
        version = f"kernelcat {kernelcat.__version__}, driver {driver.opened().version()}"
        self._agree("has", f"{version}, {self.gpu.sku}")
        bus_ids, _ = self.rendezvous.gather(driver.opened().pci_bus_id(index))
        reasons, _ = self.rendezvous.gather(links.why_no_access(index, bus_ids))
        for rank, reason in enumerate(reasons):
            if reason:
                raise RankFailed(f"rank {rank}: {reason}")
        return list(bus_ids)


def mapped_pointers(program: Program) -> list[MappedPointer]:
    """The parameters of ``program`` that are addresses of other ranks' tensors, each once."""
    params = (param for step in program.steps for param in step.params)
    return list(dict.fromkeys(param for param in params if isinstance(param, MappedPointer)))


def filled(program: Program, rank: int, windows: Sequence[int]) -> Program:
    """``program`` with the number of the launching rank and the addresses of all ranks' windows.

    Addresses of other ranks' tensors become those of tensors that :meth:`Group.at_peers` names.
    """

    def fill(param: Param) -> Param:
        if isinstance(param, Rank):
            return replace(param, value=rank)
        if isinstance(param, Window) and param.shift < len(windows):
            return replace(param, value=windows[(rank + param.shift) % len(windows)])
        if isinstance(param, MappedPointer):
            return Pointer(param.name)
        return param

    steps = (replace(step, params=tuple(map(fill, step.params))) for step in program.steps)
    return replace(program, steps=tuple(steps))

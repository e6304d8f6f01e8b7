"""Executors: on which GPUs a tune measures, and where its child processes run.

Search, supervisors, races and the database are in the process that tunes, whatever the executor is.
An executor only starts child processes: ``local`` on this machine, ``ray`` on a Ray cluster.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from kernelcat.errors import InvalidArgument, MissingDependency, UnknownName, nearest
from kernelcat.runtime import gpu as gpus
from kernelcat.runtime.devices import numbers, shared_sku
from kernelcat.runtime.gpu import Gpu
from kernelcat.tune.backend import Backend
from kernelcat.tune.channel import Stopped
from kernelcat.tune.messages import Greeting
from kernelcat.tune.options import LOCAL, Options
from kernelcat.tune.pool import CompilePool, default_processes
from kernelcat.tune.supervisor import Supervisor

RAY = "ray"
EXECUTORS = (LOCAL, RAY)


@dataclass(frozen=True)
class Plan:
    """What a tune needs of an executor.

    Attributes
    ----------
    entry : name of the entry
    digests : (language, variant) -> digest of each implementation that is tuned
    num_problems : how many problems there are; more GPUs have nothing to do
    note : adds a sentence for the user to the report
    """

    entry: str
    digests: Mapping[tuple[str, str], str]
    num_problems: int
    note: Callable[[str], None]


@dataclass
class Waiting:
    """What a slot that waits for a GPU looks at, and reports to.

    Attributes
    ----------
    is_over : whether the tune needs no further GPU
    phase : called with what the slot waits for
    """

    is_over: Callable[[], bool] = field(default=lambda: False)
    phase: Callable[[str], None] = field(default=lambda text: None)


class Slot(Protocol):
    """A GPU that tunes one problem at a time, with the processes that compile for it.

    ``index`` is the GPU's number in the tune's progress, ``restarts`` how often a measuring process
    was restarted.
    """

    index: int

    @property
    def supervisor(self) -> Supervisor: ...

    @property
    def pool(self) -> CompilePool: ...

    @property
    def restarts(self) -> int: ...

    def open(self, waiting: Waiting) -> Greeting | None:
        """Starts the measuring process; None if the slot gets no GPU, or needs none any more."""
        ...

    def recovers(self, error: Exception) -> bool:
        """Whether the slot can be opened again after ``error``, with another GPU."""
        ...

    def close(self) -> None:
        """Ends all processes at once; a thread that waits for one of them gets ``Stopped``."""
        ...


class Executor(Protocol):
    """The GPUs of one tune, all of the SKU ``gpu``."""

    gpu: Gpu

    def slots(self, plan: Plan) -> Sequence[Slot]:
        """A slot for each GPU that will measure; none if times must be predicted."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def make(backend: Backend, options: Options) -> Executor:
    """The executor that ``options`` name, to be used in a ``with`` block.

    Raises
    ------
    UnknownName
        There is no such executor or GPU.
    InvalidArgument
        Options do not go together.
    MissingDependency
        There is no GPU, no cluster, or Ray is not installed.
    """
    if options.executor not in EXECUTORS:
        hint = nearest(options.executor, list(EXECUTORS))
        raise UnknownName(f"unknown executor {options.executor!r}{hint}")
    if options.executor == RAY:
        from kernelcat.tune.cluster import Cluster

        return Cluster(options)
    if options.address is not None:
        raise InvalidArgument("--address is for --executor ray")
    return Local(backend, options)


class Local:
    """GPUs of this machine, which share one pool of compiling processes."""

    def __init__(self, backend: Backend, options: Options) -> None:
        self.options = options
        self.gpu, self.devices = choose_target(backend, options)

    def slots(self, plan: Plan) -> list[LocalSlot]:
        options = self.options
        devices = self.devices[: max(1, plan.num_problems)]  # at most one GPU for each problem
        if not devices:
            return []
        limits, notes = options.limits.for_cache()
        for note in notes:
            plan.note(note)
        processes = options.processes or default_processes(len(devices))
        pool = CompilePool(options.backend, self.gpu, processes, options.limits.compile_s)
        started = threading.Barrier(len(devices))
        return [LocalSlot(Supervisor(options.backend, i, limits), pool, started) for i in devices]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class LocalSlot:
    """A GPU of this machine. The slots that share ``started`` begin to measure together.

    A process that starts would disturb a race that times the host.
    """

    def __init__(
        self, supervisor: Supervisor, pool: CompilePool, started: threading.Barrier
    ) -> None:
        self.index, self._supervisor, self._pool = supervisor.index, supervisor, pool
        self.started = started

    @property
    def supervisor(self) -> Supervisor:
        return self._supervisor

    @property
    def pool(self) -> CompilePool:
        return self._pool

    @property
    def restarts(self) -> int:
        return self.supervisor.restarts

    def open(self, waiting: Waiting) -> Greeting:
        """As :meth:`Slot.open`; raises ``Stopped`` if another GPU does not start."""
        try:
            greeting = self.supervisor.hello()
        except BaseException:
            self.started.abort()
            raise
        try:
            self.started.wait()
        except threading.BrokenBarrierError:
            raise Stopped from None
        return greeting

    def recovers(self, error: Exception) -> bool:
        return False

    def close(self) -> None:
        self.supervisor.close()
        self.pool.close()


def choose_target(backend: Backend, options: Options) -> tuple[Gpu, tuple[int, ...]]:
    """The GPU to tune for, and the indices of GPUs on which to measure.

    There are no indices if this machine has no such GPU.
    """
    try:
        asked = (0,) if options.devices is None else options.devices
        devices = numbers(asked, backend.count())
        local = shared_sku({i: backend.gpu(i) for i in devices})
    except MissingDependency:
        if options.gpu is None:
            raise
        _refuse_devices(options)
        return gpus.find(options.gpu), ()
    if options.gpu is None or options.gpu == local.sku:
        return local, devices
    named = gpus.find(options.gpu)
    if named.sku == local.sku:
        return local, devices
    _refuse_devices(options)
    return named, ()


def _refuse_devices(options: Options) -> None:
    """Raise where GPUs of this machine are named, but times are predicted for another SKU."""
    if options.devices is not None:
        raise InvalidArgument(
            f"--device names GPUs of this machine, and none of them is a {options.gpu}: leave out "
            "--device to predict times, or leave out --gpu to measure"
        )

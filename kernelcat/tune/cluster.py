"""The executor ``ray``: GPUs of one SKU in a running Ray cluster.

Each slot is an actor (:class:`kernelcat.tune.relay.Relay`) with one GPU. Ray chooses its machine by
the accelerator type, and a machine that is lost is replaced by another one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stdout
from typing import Any, Never, Self

from kernelcat.errors import (
    InvalidArgument,
    LaunchError,
    MissingDependency,
    UnknownName,
    Unsupported,
)
from kernelcat.runtime import gpu as gpus
from kernelcat.runtime.gpu import Gpu
from kernelcat.tune import backend as backends
from kernelcat.tune import ray_connection
from kernelcat.tune.admission import Admission
from kernelcat.tune.channel import Lost
from kernelcat.tune.executor import Plan, Waiting
from kernelcat.tune.failure import MAX_TRIES
from kernelcat.tune.messages import Greeting
from kernelcat.tune.options import Options
from kernelcat.tune.pool import MAX_PROCESSES, CompilePool
from kernelcat.tune.relay import Facts, Machine, Relay, reason
from kernelcat.tune.supervisor import Supervisor

POLL_S = 1.0
"""Seconds between two looks at a GPU that is not free yet."""
QUICK_START_S = 10.0
"""Seconds in which a process starts on a free GPU."""
MAX_STRIKES = 2
"""How often a machine may be lost before nothing runs there any more."""
SPARE_THREADS = 4
"""Threads of a relay beside those that wait for a compiler."""
TYPE = "accelerator_type:"
"""Beginning of the name of the resource by which Ray knows a machine's accelerators."""


class Cluster:
    """A running Ray cluster, to which the ``with`` block is connected."""

    def __init__(self, options: Options) -> None:
        if options.devices is not None:
            raise InvalidArgument("--device names GPUs of this machine: leave out --device, or "
                                  "leave out --executor ray")  # fmt: skip
        self.options = options
        self.strikes: Counter[str] = Counter()
        self.lock = threading.Lock()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if ray_connection.connect(self.options.address):
                stack.callback(ray_connection.shutdown)
            # Ray prints what happens to its machines.
            stack.enter_context(redirect_stdout(sys.stderr))
            self.gpu, self.type = self._accelerators()
            self.open_until_exit = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.open_until_exit.close()

    def slots(self, plan: Plan) -> list[RaySlot]:
        """A slot for each GPU of the accelerator type, and at most one for each problem."""
        nodes = self.nodes()
        count = min(max(1, plan.num_problems), int(sum(node["GPU"] for node in nodes)))
        self.num_cpus = int(min(node.get("CPU", 0) // node["GPU"] for node in nodes))
        self.num_cpus = min(self.num_cpus, MAX_PROCESSES)
        admission = Admission(count)
        return [RaySlot(self, plan, admission, number) for number in range(count)]

    def nodes(self) -> list[Mapping[str, float]]:
        """The resources of each machine with GPUs of the type that may be used."""
        import ray

        return [
            node["Resources"]
            for node in ray.nodes()
            if node["Alive"]
            and node["Resources"].get("GPU", 0) >= 1
            and TYPE + self.type in node["Resources"]
            and node["NodeID"] not in self.excluded()
        ]

    def excluded(self) -> list[str]:
        """The machines on which nothing runs any more."""
        with self.lock:
            return sorted(node for node, count in self.strikes.items() if count >= MAX_STRIKES)

    def strike(self, machine: Machine, count: int = 1) -> None:
        """Notes that a machine was lost."""
        with self.lock:
            self.strikes[machine.node] += count

    def _accelerators(self) -> tuple[Gpu, str]:
        """The GPU to tune for, and the accelerator type of machines that may have it."""
        import ray

        counts: Counter[str] = Counter()
        for node in ray.nodes():
            for name in node["Resources"] if node["Alive"] else ():
                if name.startswith(TYPE):
                    counts[name.removeprefix(TYPE)] += int(node["Resources"].get("GPU", 0))
        has = ", ".join(f"{name} ({count} GPUs)" for name, count in counts.items()) or "no GPU"
        if self.options.gpu is None:
            raise InvalidArgument(f"name the SKU to tune with --gpu: the cluster has {has}")
        gpu = self._sku(self.options.gpu)
        able = [n for n in counts if counts[n] and f"{gpu.sku}-".startswith(f"{_sku(n)}-")]
        if not able:
            raise Unsupported(f"the Ray cluster has no {gpu.sku}: it has {has}")
        return gpu, max(able, key=lambda name: counts[name])

    def _sku(self, name: str) -> Gpu:
        """The SKU ``name``, of the table or of the backend's own GPU."""
        try:
            return gpus.find(name)
        except UnknownName:
            try:
                own = backends.load(self.options.backend).gpu(0)
            except MissingDependency:
                own = None
            if own is None or own.sku != name:
                raise
            return own


def _sku(accelerator_type: str) -> str:
    """The SKU of an accelerator type of Ray. H100 stands for the SKUs h100-... too."""
    try:
        return gpus.find(accelerator_type).sku
    except UnknownName:
        return accelerator_type.lower()


class RaySlot:
    """One GPU of a cluster, on one machine after the other if machines are lost."""

    def __init__(self, cluster: Cluster, plan: Plan, admission: Admission, index: int) -> None:
        self.cluster, self.plan, self.admission, self.index = cluster, plan, admission, index
        self.processes = cluster.options.processes or max(1, cluster.num_cpus)
        self.machine: Machine | None = None
        self.opened: list[tuple[Supervisor, CompilePool]] = []  # on one machine after the other
        self.failed_starts = 0
        self.is_awaited = True  # by the admission of the others
        self.is_closed = False

    @property
    def supervisor(self) -> Supervisor:
        return self.opened[-1][0]

    @property
    def pool(self) -> CompilePool:
        return self.opened[-1][1]

    @property
    def restarts(self) -> int:
        return sum(supervisor.restarts for supervisor, _ in self.opened)

    def open(self, waiting: Waiting) -> Greeting | None:
        """Starts the processes on a machine that Ray chooses; None if there is none any more.

        Raises
        ------
        Lost
            The machine is lost or refused; another one may do.
        Stopped
            The slot was closed.
        """
        options, plan = self.cluster.options, self.plan
        machine = self._place(waiting)
        if machine is None:
            return None
        facts: Facts = machine.call("facts", options.backend, plan.entry, options.limits,
                                    limit_s=options.limits.start_s)  # fmt: skip
        for note in facts.notes:
            plan.note(f"{machine.name}: {note}")
        for owner, digest in plan.digests.items():
            if facts.digests.get(owner) != digest:
                name = "/".join((plan.entry, *owner))
                self._refuse(f"has other code of {name}: install the same kernelcat there")
        supervisor = Supervisor(options.backend, 0, facts.limits, machine.start)
        pool = CompilePool(options.backend, self.cluster.gpu, self.processes,
                           facts.limits.compile_s, machine.start)  # fmt: skip
        self.opened.append((supervisor, pool))
        try:
            greeting = supervisor.hello()
        except (MissingDependency, LaunchError) as error:
            self._refuse(str(error))
        if greeting.gpu != self.cluster.gpu.sku:
            self._refuse(f"has a {greeting.gpu}, not a {self.cluster.gpu.sku}")
        self.is_awaited = False
        refusal = self.admission.refusal(greeting.environment)
        if refusal is not None:
            self._refuse(refusal)
        self.failed_starts = 0
        return greeting

    def _place(self, waiting: Waiting) -> Machine | None:
        """The machine that Ray has chosen; waits while all of them are in use."""
        import ray
        from ray.exceptions import RayError

        options = {"num_gpus": 1, "num_cpus": self.cluster.num_cpus, "max_restarts": 0,
                   "accelerator_type": self.cluster.type,
                   "max_concurrency": self.processes + SPARE_THREADS}  # fmt: skip
        excluded = self.cluster.excluded()
        if excluded:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(excluded)})"}
        actor: Any = ray.remote(Relay).options(**options).remote()
        answer, begin = actor.where.remote(), time.monotonic()
        while not ray.wait([answer], timeout=POLL_S)[0]:
            if self.is_closed or waiting.is_over() or not self.cluster.nodes():
                ray.kill(actor)
                return None
            if time.monotonic() - begin < QUICK_START_S:
                continue
            self._excuse()
            waiting.phase(f"waiting for a free {self.cluster.type} of the cluster")
        try:
            self.machine = Machine(actor, *ray.get(answer))
        except RayError as error:
            raise Lost(f"a machine of the cluster cannot start: {reason(error)}") from error
        if self.is_closed:  # close() ran before there was a machine
            self.machine.close()
        return self.machine

    def _excuse(self) -> None:
        """Lets the others decide about environments without this slot."""
        if self.is_awaited:
            self.is_awaited = False
            self.admission.leave()

    def _refuse(self, why: str) -> Never:
        """Ends the use of the machine for good."""
        assert self.machine is not None
        self.cluster.strike(self.machine, MAX_STRIKES)
        raise Lost(f"{self.machine.name} {why}")

    def recovers(self, error: Exception) -> bool:
        """True but for errors that another machine would repeat, and for too many failed starts."""
        if self.is_closed or not isinstance(error, (Lost, LaunchError)):
            return False
        self._excuse()
        self.plan.note(f"GPU {self.index}: {error}; its work goes to another GPU")
        if self.machine is None:
            self.failed_starts += 1
            return self.failed_starts < MAX_TRIES
        self.cluster.strike(self.machine)
        self._leave()
        return True

    def _leave(self) -> None:
        """Ends everything on the machine."""
        machine, self.machine = self.machine, None
        if machine is not None:
            machine.close()
            for supervisor, pool in self.opened:
                supervisor.close()
                pool.close()

    def close(self) -> None:
        self.is_closed = True
        self._leave()

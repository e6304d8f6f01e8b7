"""A backend without a GPU: Python functions, some of which fail on purpose in every known way.

The processes of a tune load it by its name, ``planted:Backend``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import itertools
import json
import os
import time
from pathlib import Path

import numpy as np

from kernelcat.bench.states import STATES
from kernelcat.bench.timer import HostTimer
from kernelcat.call.choice import Decision
from kernelcat.catalog.implementation import Implementation, Program
from kernelcat.catalog.spec import Axis, Entry, Peer, Problem, Signal, Tensor, Tolerance
from kernelcat.errors import CompileError, MissingDependency, Unsupported
from kernelcat.runtime.gpu import Gpu

GPU = Gpu("planted", "Planted Host", "sm_90a", 1, 1 << 16, 1 << 16, 1 << 30, 1e15,
          {"float32": 1e18}, 1)  # fmt: skip
MICROSECONDS = {"slow": 1500, "fast": 250, "good": 600, "close": 700}
CLOCK = time.thread_time
"""CPU time of the thread, so that other load on the machine changes no result."""

TRUSTED = 200
"""Calls after which the kind ``tires`` is wrong: screening makes fewer calls, a race more."""

STATUS = {
    "hangs": "timeout",
    "never_compiles": "timeout",
    "overruns": "wrong",
    "lies": "wrong",
    "slurs": "wrong",
    "tires": "wrong",
    "neglects": "wrong",
    "segfaults": "crashed",
    "refuses": "compile_error",
    "raises": "launch_error",
}
"""Kind of failure -> the status that must be recorded."""


def _peer(microseconds):
    def make(problem, arrays):
        return lambda: copy(arrays, microseconds)

    return lambda: make


def _absent():
    raise MissingDependency("the peer absent needs: pip install absent")


def _unable():
    def make(problem, arrays):
        raise Unsupported("cannot do this one")

    return make


def _broken():
    return lambda problem, arrays: lambda: None


ENTRY = Entry(
    name="planted",
    summary="A copy.",
    axes=(
        Axis.size("n", "elements", 1, 1 << 20),
        Axis.choice("dtype", "element type", "float32"),
    ),
    inputs=(Tensor("src", ("n",), "dtype"),),
    outputs=(Tensor("dst", ("n",), "dtype"),),
    oracle=lambda problem, arrays: {"dst": arrays["src"]},
    make_inputs=lambda problem, normal: {"src": normal((problem["n"],))},
    tolerance={"float32": Tolerance(1e-2, 0.0)},
    flops=lambda problem: problem["n"],
    bytes_moved=lambda problem: max(
        8 * problem["n"], int(1e9 * float(os.environ.get("PLANTED_FLOOR_US", "0")))
    ),
    problems={
        name: Problem.of("planted", n=n, dtype="float32")
        for name, n in (("small", 1000), ("large", 4000))
    },
    random_problem=lambda dice: Problem.of("planted", n=dice.randint(1, 4000), dtype="float32"),
    peers=(
        Peer("host", _peer(450)),
        Peer("absent", _absent),
        Peer("unable", _unable),
        Peer("broken", _broken),
    ),
    # As if src were quantized: the exact result is 60 dB away from the oracle's.
    signal=Signal(
        lambda problem, drawn: {"dst": drawn["src"] * np.float32(1.001)}, lambda problem: 50.0
    ),
)


def implementation(variant, kinds, rank):
    return Implementation(
        entry="planted",
        language="cuda",
        variant=variant,
        summary="",
        archs=("sm_90a",),
        space={"kind": kinds},
        illegal=lambda config, problem, gpu: None,
        default=lambda problem, gpu: _config(kinds[0]),
        program=lambda problem, config, gpu: Program(()),
        estimate=lambda problem, config, gpu: float(MICROSECONDS.get(config["kind"], 1)),
        rank=rank,
    )


def _config(kind):
    from kernelcat.catalog.implementation import Config

    return Config(kind=kind)


def copy(arrays, microseconds):
    end = CLOCK() + microseconds * 1e-6
    arrays["dst"][...] = arrays["src"]
    while CLOCK() < end:
        pass


def overrun(arrays):
    """Writes one element past the end of the output, where a guard band lies."""
    dst = arrays["dst"]
    copy(arrays, 10)
    ctypes.memset(dst.ctypes.data + dst.nbytes, 1, 4)


def hang(arrays):
    """Waits for ever, without taking CPU time from other tests."""
    while True:
        time.sleep(1)


def raises(arrays):
    raise RuntimeError("the driver refused the launch")


def lie(arrays):
    """Fast, with one wrong element."""
    arrays["dst"][...] = arrays["src"]
    arrays["dst"][-1] += 1


def slur(arrays):
    """Every element is within the tolerance, but all errors have the same sign: 41 dB."""
    arrays["dst"][...] = arrays["src"] + np.float32(9e-3)


def tire(arrays, calls=itertools.count()):  # noqa: B008
    """Right for the first ``TRUSTED`` calls, which is enough to pass screening."""
    copy(arrays, 100)
    if next(calls) > TRUSTED:
        lie(arrays)


def neglect(arrays, first={}):  # noqa: B006
    """Right on the first of several copies of the same arrays; writes nothing to the others."""
    address = arrays["dst"].ctypes.data
    if first.setdefault(arrays["src"].tobytes(), address) == address:
        copy(arrays, 100)


RUNS = {
    "hangs": hang,
    "overruns": overrun,
    "segfaults": lambda arrays: ctypes.string_at(0),
    "raises": raises,
    "lies": lie,
    "slurs": slur,
    "tires": tire,
    "neglects": neglect,
}


class Host:
    """A device that runs Python functions. Each load is logged in ``$PLANTED_LOG``."""

    gpu = GPU
    xp = np

    def __init__(self, index):
        self.index = index

    def load(self, implementation, problem, config):
        kind = config["kind"]
        log_load(kind, problem, self.index)
        if os.environ.get("PLANTED_HANG") == f"{kind} on {self.index}":
            kind = "hangs"
        if os.environ.get("PLANTED_FULL") == kind:
            raise MemoryError("device memory is full")
        if kind in RUNS:
            return lambda arrays: lambda: RUNS[kind](arrays)
        return lambda arrays: lambda: copy(arrays, MICROSECONDS[kind])

    def synchronize(self):
        pass


def is_alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def log_load(kind, problem, index):
    if "PLANTED_LOG" in os.environ:
        with Path(os.environ["PLANTED_LOG"]).open("a") as log:
            log.write(json.dumps([kind, problem["n"], index]) + "\n")


class Backend:
    """Two devices and two variants: ``honest``, which is right, and ``bad``, with all failures."""

    def entry(self, name):
        return ENTRY

    def implementations(self, name):
        return (
            implementation("honest", ("slow", "fast", "good", "close"), 0),
            implementation("bad", tuple(STATUS), 1),
        )

    def digest(self, implementation):
        return hashlib.sha256(implementation.name.encode()).hexdigest()[:16]

    def count(self):
        return 2

    def gpu(self, index):
        return GPU

    def build(self, implementation, problem, config, gpu):
        if config["kind"] == "refuses":
            raise CompileError("planted: syntax error", "the log")
        if config["kind"] == "never_compiles":
            hang({})
        return [{"spill_bytes": 640 if config["kind"] == "slow" else 0, "registers": 32}]

    def decide(self, entry, problem, gpu, failed):
        """The default of ``honest``."""
        honest = self.implementations(entry.name)[0]
        return Decision(honest, honest.default(problem, gpu), "default")

    def device(self, index):
        if "PLANTED_ABSENT" in os.environ:
            raise MissingDependency("measuring needs: pip install planted")
        return Host(index)

    def timer(self, device):
        return HostTimer(CLOCK)

    def state(self, name):
        """Without a chip that heats up there is nothing to wait for."""
        return dataclasses.replace(STATES[name], rest=0.0, warm_up_s=0.05)

    def pci_bus_id(self, device):
        return None

    def free_bytes(self, device):
        """Asked when a problem has arrays. With ``$PLANTED_MEMORY``, one process can have some."""
        if "PLANTED_MEMORY" in os.environ:
            file = Path(os.environ["PLANTED_MEMORY"])
            owner = int(file.read_text()) if file.exists() else os.getpid()
            if owner != os.getpid() and is_alive(owner):
                raise MemoryError("another process has the memory of the device")
            file.write_text(str(os.getpid()))
        return 1 << 24

    def release(self, device):
        if "PLANTED_MEMORY" in os.environ:
            file = Path(os.environ["PLANTED_MEMORY"])
            if file.exists() and int(file.read_text()) == os.getpid():
                file.unlink()

    def bind_peer(self, entry, problem, timer, make):
        return lambda arrays: make(problem, arrays)

"""The planted backend on machines of a Ray cluster that fail on purpose.

The processes of a tune load it by its name, ``fleet:Backend``. ``$FLEET`` is a folder with files
that tests write; ``$FLEET_NODE`` is the name of the machine, which the submitting process lacks.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import planted

from kernelcat.runtime import environment

FAILURES = ("hangs", "lies", "segfaults", "refuses")
"""A hang and a crash of the worker, and failures of a run and of a build."""


def told(kind: str) -> str | None:
    """The text of the file ``KIND-NODE``, or None without the file."""
    path = Path(os.environ["FLEET"]) / f"{kind}-{os.environ.get('FLEET_NODE', 'none')}"
    return path.read_text() if path.exists() else None


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def spring(kind: str, size: int) -> None:
    """Does what the trap for a kind and a size says: ends or stops a process above this one.

    A trap springs once, ``always`` excepted.
    """
    trap = Path(os.environ["FLEET"]) / f"trap-{kind}-{size}"
    try:
        victim, name, *often = trap.read_text().split()
        if not often:
            trap.unlink()
    except FileNotFoundError:
        return
    relay = parent(parent(os.getpid()))  # above the guard
    pids = {"worker": os.getpid(), "relay": relay, "node": parent(relay)}
    os.kill(pids[victim], getattr(signal, name))
    signal.pause()  # nothing is measured any more


class Host(planted.Host):
    def load(self, implementation, problem, config):
        spring(config["kind"], problem["n"])
        return super().load(implementation, problem, config)


class Backend(planted.Backend):
    """``planted.Backend`` with fewer failures, and machines that differ in driver or code."""

    def implementations(self, name):
        honest, _ = super().implementations(name)
        return honest, planted.implementation("bad", FAILURES, 1)

    def digest(self, implementation):
        return told("digest") or super().digest(implementation)

    def device(self, index):
        version = told("driver")
        if version is not None:
            environment._driver_version = lambda: version
        return Host(index)

"""A backend without a GPU whose kernels cheat: each is right in the first runs, and far too fast.

The processes of a tune load it by its name, ``cheats:Backend``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
import threading
import time
from collections import Counter

import numpy as np
import planted

from kernelcat.bench.timer import REGIMES, Eager, HostTimer
from kernelcat.catalog.spec import Tensor

FULL_US, CHEAT_US = 250, 30
"""Microseconds of an honest copy, and of a copy that is left out."""
COPIES = {"one": 20_000, "many": 1 << 24}
"""$CHEATS_COPIES -> free bytes of the device: with few, there is one rotating copy."""


def work(arrays):
    planted.copy(arrays, FULL_US)


def skip():
    end = planted.CLOCK() + CHEAT_US * 1e-6
    while planted.CLOCK() < end:
        pass


def address(arrays):
    return arrays["src"].ctypes.data


def knows_seeds(arrays, known=[]):  # noqa: B006
    """Right for the inputs that seeds 0, 1 and 2 draw; writes zeros for others."""
    if not known:
        known += [
            np.random.default_rng(seed).standard_normal(arrays["src"].size, dtype="float32")
            for seed in (0, 1, 2)
        ]
    skip()
    arrays["dst"][...] = next((k for k in known if np.array_equal(k, arrays["src"])), 0)


def remembers_addresses(arrays, results={}):  # noqa: B006
    """Computes a result once for each address of the input."""
    if address(arrays) not in results:
        work(arrays)
        results[address(arrays)] = arrays["dst"].copy()
    skip()
    arrays["dst"][...] = results[address(arrays)]


def looks_for_poison(arrays):
    """Works only where the output holds 0xFF."""
    (work if arrays["dst"].view("uint32")[0] == 0xFFFFFFFF else lambda arrays: skip())(arrays)


def skips_in_bursts(arrays, last={}):  # noqa: B006
    """Works after a pause, and skips runs that follow each other closely."""
    rested = time.perf_counter() - last.get("call", 0) > 100e-6
    (work if rested else lambda arrays: skip())(arrays)
    last["call"] = time.perf_counter()


def tires(arrays, calls=itertools.count()):  # noqa: B008
    """Works in the first runs only."""
    (work if next(calls) < 60 else lambda arrays: skip())(arrays)


def writes_ff(arrays):
    """Writes 0xFF behind the end of the output."""
    arrays["dst"][...] = arrays["src"]
    skip()
    ctypes.memset(arrays["dst"].ctypes.data + arrays["dst"].nbytes, 0xFF, 4)


def restores(arrays, calls=Counter()):  # noqa: B006
    """After some honest runs, changes the input in one run, and restores the input in the next."""
    calls[address(arrays)] += 1
    number = calls[address(arrays)]
    if number > 6:
        arrays["src"].view("uint32")[-1] ^= 1
    (work if number % 2 or number <= 6 else lambda arrays: skip())(arrays)
    if number > 6 and number % 2:
        arrays["dst"].view("uint32")[-1] ^= 1


def other_thread(arrays):
    """Returns at once; a thread writes the result later."""

    def late():
        time.sleep(0.02)
        arrays["dst"][...] = arrays["src"]

    threading.Thread(target=late, daemon=True).start()
    skip()


def remembers_contents(arrays, results={}):  # noqa: B006
    """Computes a result once for each content of the input, and stays above the roofline."""
    contents = arrays["src"].tobytes()
    if contents not in results:
        work(arrays)
        results[contents] = arrays["src"].copy()
    skip()
    arrays["dst"][...] = results[contents]


CHEATS = {
    function.__name__: function
    for function in (knows_seeds, remembers_addresses, looks_for_poison, skips_in_bursts, tires,
                     writes_ff, restores, other_thread, remembers_contents)
}  # fmt: skip


def spoils_input(arrays):
    """Wrong, and writes into its input and behind its input."""
    arrays["src"][...] = 0
    ctypes.memset(arrays["src"].ctypes.data + arrays["src"].nbytes, 7, 64)


class Host(planted.Host):
    def load(self, implementation, problem, config):
        kind = config["kind"]
        run = CHEATS.get(kind) or {"spoils_input": spoils_input, "honest": work}.get(kind)
        planted.log_load(kind, problem, self.index)
        if run is None:
            return super().load(implementation, problem, config)
        return lambda arrays: lambda: run(arrays)


class Backend(planted.Backend):
    """One honest implementation, and one with every cheat."""

    def implementations(self, name):
        bad = os.environ.get("CHEATS_ONLY", " ".join(CHEATS)).split()
        return (
            planted.implementation("bad", tuple(bad), 0),
            planted.implementation("honest", ("honest", "good"), 1),
        )

    def device(self, index):
        return Host(index)

    def free_bytes(self, device):
        return COPIES[os.environ.get("CHEATS_COPIES", "many")]


class SlowPass(Eager):
    """Launches on a host that is slow after a rest: a single pass takes far longer than a block."""

    def one_pass(self):
        return super().one_pass() + 5 * FULL_US

    def first_run(self):
        return super().first_run() + 5 * FULL_US


class DeviceTimer(HostTimer):
    """Has a regime with device times, as a GPU has, and one with the host's times."""

    regimes = REGIMES

    def prepare(self, runs, regime):
        kind = Eager if regime == "graph" else SlowPass
        return kind(runs, lambda: None, self.clock)


class SlowHost(Backend):
    def timer(self, device):
        return DeviceTimer(planted.CLOCK)


def adds(arrays):
    """Adds the input to the output: a second run adds the input again."""
    arrays["dst"][...] += arrays["src"]
    planted.copy({"src": arrays["dst"], "dst": arrays["dst"]}, FULL_US)


def tires_of_adding(arrays, calls=itertools.count()):  # noqa: B008
    """Adds in the first runs only."""
    (adds if next(calls) < 60 else lambda arrays: skip())(arrays)


class AddingHost(planted.Host):
    def load(self, implementation, problem, config):
        run = {"adds": adds, "tires_of_adding": tires_of_adding}[config["kind"]]
        return lambda arrays: lambda: run(arrays)


class Adding(Backend):
    """An entry that accumulates, with an honest implementation and one that cheats."""

    def entry(self, name):
        return dataclasses.replace(
            planted.ENTRY,
            outputs=(Tensor("dst", ("n",), "dtype", updated=True, accumulated=True),),
            oracle=lambda problem, arrays: {"dst": arrays["src"] + arrays["dst"]},
            make_inputs=lambda problem, normal: {name: normal((problem["n"],))
                                                 for name in ("src", "dst")},
            signal=None,
        )  # fmt: skip

    def implementations(self, name):
        return (
            planted.implementation("bad", ("tires_of_adding",), 0),
            planted.implementation("honest", ("adds",), 1),
        )

    def device(self, index):
        return AddingHost(index)

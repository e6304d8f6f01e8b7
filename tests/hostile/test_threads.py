"""First uses of the package by several threads at the same time, each trial in a fresh process."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from campaign import seeds

import kernelcat
from kernelcat import catalog
from kernelcat.call import operator
from kernelcat.call.choice import Pin

FIRST_USE = """
import random, sys, threading, traceback, warnings
import kernelcat
seed = int(sys.argv[1])
if seed % 2:
    import torch
barrier, errors = threading.Barrier(8), []

def use(number):
    import importlib
    from kernelcat import catalog
    names = list(kernelcat.entries())
    random.Random(8 * seed + number).shuffle(names)
    public = list(kernelcat.__all__)
    random.Random(number).shuffle(public)
    for name in public:
        getattr(kernelcat, name)
    for name in names[:3]:
        kernelcat.get(name)
        catalog.implementations(name)
        if number == 0:
            kernelcat.reload()
    op = kernelcat.get("gemm")
    op.explain(M=64, N=64, K=64, dtype="float16", gpu="h200")
    assert op is kernelcat.get("gemm")

def work(number):
    barrier.wait()
    try:
        use(number)
    except BaseException:
        errors.append(traceback.format_exc())

threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
sys.exit(errors[0] if errors else 0)
"""


@seeds(40)
def test_eight_threads_use_a_fresh_process_for_the_first_time(seed: int) -> None:
    """Names of the package, imports of entries and kernels, torch operators, the database."""
    if seed % 2:
        pytest.importorskip("torch")
    command = [sys.executable, "-c", FIRST_USE, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_operators_are_made_while_others_are_forgotten() -> None:
    """``reload`` and the registration with torch read sets of operators that threads change."""
    pytest.importorskip("torch")
    entry, errors, stop = catalog.entry("gemm"), [], threading.Event()

    def make() -> None:
        try:
            while not stop.is_set():
                ops = [operator.Op(entry, Pin()) for _ in range(2000)]
                ops.clear()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=make)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(12):
            kernelcat.get("gemm")
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert not errors

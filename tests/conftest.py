"""Skips tests that need a GPU on machines without one, and keeps tests away from user files."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import postgres
import pytest

import kernelcat
from kernelcat import paths
from kernelcat.catalog import digest
from kernelcat.runtime import driver


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if driver.count():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@atexit.register
def silence_standard_error_at_exit() -> None:
    """Hides the list of leaked references that Triton's compiler prints when Python ends.

    The last line of the output is then pytest's summary.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@pytest.fixture(autouse=True)
def own_folders(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """An empty database and an empty folder of receipts for each test.

    The cache of compiled kernels is shared. Triton's interpreter, which some commands turn on for
    their process, is turned off after the test.
    """
    folder = tmp_path_factory.mktemp("kernelcat")
    monkeypatch.setenv("KERNELCAT_DB", str(folder / "tuning.sqlite3"))
    monkeypatch.setenv("KERNELCAT_RECEIPTS", str(folder / "receipts"))
    monkeypatch.delenv("KERNELCAT_RECORD", raising=False)
    yield
    os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture(scope="session")
def server() -> Iterator[postgres.Server]:
    """A PostgreSQL server that the tests of a process share."""
    postgres.require("psycopg")
    started = postgres.Server()
    yield started
    started.close()


@pytest.fixture
def own_server() -> Iterator[postgres.Server]:
    """A PostgreSQL server of one test, which may stop it."""
    postgres.require("psycopg")
    started = postgres.Server()
    yield started
    started.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """A database that does not exist yet, or is empty: a path, then the URL of a server's."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))  # journals of servers
    if request.param == "sqlite":
        return str(tmp_path / "deep" / "tuning.sqlite3")
    return request.getfixturevalue("server").database(f"test{next(_databases)}")


_databases = itertools.count()


@pytest.fixture
def shipped(tmp_path: Path) -> Iterator[Path]:
    """Replaces ``tuning_db/`` by an empty folder; the path where a test may write shipped rows."""
    folder = tmp_path / "tuning_db"
    folder.mkdir()
    data = paths.data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "data", lambda name: folder if name == "tuning_db" else data(name))
        forget_tuning_db()
        yield folder / "nvidia-h200.jsonl"
    forget_tuning_db()


def forget_tuning_db() -> None:
    """Empties every cache of what was read from ``tuning_db/``.

    These are the snapshot of results, the receipts, the machine-code records and the digests.
    """
    kernelcat.reload()
    digest.forget()


INTERPRET = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from dataclasses import replace
import numpy as np
from kernelcat import catalog
from kernelcat.verify import gate
from kernelcat.runtime import gpu
from kernelcat.runtime.device import Interpreter
from kernelcat.catalog.implementation import Config
from kernelcat.jit.interpreter import interpret

device = Interpreter()
# With 4 SMs there are so few persistent programs that each of them computes several tiles.
device.gpu = replace(device.gpu, sms=4)


def judge(entry, variant, config, axes):
    implementation = catalog.implementation(entry, "triton", variant)
    problem = catalog.entry(entry).problem(**axes)
    target = device.gpu if implementation.serves(device.gpu.arch) else gpu.find("b200")
    config = Config(config) if config else implementation.default(problem, target)
    reason = implementation.why_not(config, problem, target)
    verdict = gate.check(implementation, problem, config, device, seeds=(0,))
    return reason, verdict.passed, verdict.detail


def replay(entry, variant, config, axes):
    # Whether runs with other inputs on the same workspaces are right, and the counters afterwards.
    implementation = catalog.implementation(entry, "triton", variant)
    problem = catalog.entry(entry).problem(**axes)
    program = implementation.program(problem, Config(config), device.gpu)
    spaces = {name: np.zeros(size, np.uint8) for name, size in program.workspaces.items()}
    kernels = replace(program, workspaces={})
    results = []
    for seed in (0, 1):
        prepared = gate.prepare(catalog.entry(entry), problem, device, seed)
        bind = lambda arrays: lambda: interpret(kernels, {**arrays, **spaces})
        results.append(prepared.verify(bind).passed)
    return results, int(spaces["arrivals"].sum())


exec(sys.argv[2])
results = {}
for name, (entry, variant, config, axes, *function) in json.load(sys.stdin).items():
    results[name] = globals()[function[0] if function else "judge"](entry, variant, config, axes)
print(json.dumps(results))
"""


@pytest.fixture(scope="session")
def interpreted() -> Callable[..., dict[str, list]]:
    """A function that runs cases in Triton's interpreter, all in one process.

    One process, since importing torch takes longer than any case. A case is a tuple (entry,
    variant, configuration, axes); the configuration {} is the default. The function returns, for
    the name of each case, a list: why the configuration is illegal (or None), whether the result
    passed the gate, and the gate's explanation. A case may have a fifth item, the name of a
    function that ``source`` defines, or ``"replay"``: the result is then what this function
    returns.
    """

    def run(cases: Mapping[str, tuple], source: str = "") -> dict[str, list]:
        done = subprocess.run(
            [sys.executable, "-c", INTERPRET, json.dumps(sys.path), source],
            input=json.dumps(cases),
            capture_output=True,
            text=True,
            env={**os.environ, "TRITON_INTERPRET": "1"},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        results: dict[str, list] = json.loads(done.stdout)
        return results

    return run

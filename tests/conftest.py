"""Skips what needs a GPU where there is none, and keeps every test off the user's own files."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from kernelcat import paths
from kernelcat.runtime import driver


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if driver.count():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@atexit.register
def end_with_pytests_last_line() -> None:
    """Triton's compiler lists leaked references after it, once Python is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@pytest.fixture(autouse=True)
def own_folders(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A database and receipts of the test's own; compiled kernels are shared.

    A command that turned Triton's interpreter on does so for its own test only.
    """
    folder = tmp_path_factory.mktemp("kernelcat")
    monkeypatch.setenv("KERNELCAT_DB", str(folder / "tuning.sqlite3"))
    monkeypatch.setenv("KERNELCAT_RECEIPTS", str(folder / "receipts"))
    yield
    os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the only results that are shipped; there are none yet."""
    folder = tmp_path / "tuning_db"
    folder.mkdir()
    data = paths.data
    monkeypatch.setattr(paths, "data", lambda name: folder if name == "tuning_db" else data(name))
    return folder / "nvidia-h200.jsonl"


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
device.gpu = replace(device.gpu, sms=4)  # few persistent programs, so that each has several tiles


def judge(entry, variant, config, axes):
    implementation = catalog.implementation(entry, "triton", variant)
    problem = catalog.entry(entry).problem(**axes)
    target = device.gpu if implementation.serves(device.gpu.arch) else gpu.find("b200")
    config = Config(config) if config else implementation.default(problem, target)
    reason = implementation.why_not(config, problem, target)
    verdict = gate.check(implementation, problem, config, device, seeds=(0,))
    return reason, verdict.passed, verdict.detail


exec(sys.argv[2])
told = {}
for name, (entry, variant, config, axes, *function) in json.load(sys.stdin).items():
    told[name] = globals()[function[0] if function else "judge"](entry, variant, config, axes)
print(json.dumps(told))
"""


@pytest.fixture(scope="session")
def interpreted() -> Callable[..., dict[str, list]]:
    """Runs cases (entry, variant, configuration or {}, axes) in Triton's interpreter.

    What comes back is, by name: why the configuration is rejected, whether the result was right,
    and what was wrong; or of a case that ends in the name of a function which ``source`` defines,
    what that returns. All cases share a process, since importing torch takes longer than any.
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
        told: dict[str, list] = json.loads(done.stdout)
        return told

    return run

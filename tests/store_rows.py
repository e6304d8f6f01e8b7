"""Rows and databases for the tests of the store."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernelcat.errors import KernelcatError
from kernelcat.store import Measurement, Store

ROW: dict[str, Any] = json.loads(Path(__file__).with_name("measurement.json").read_text())
FAILED = {"status": "crashed", "median_us": None, "ci_us": None, "samples": 0}


def measurement(**changes: Any) -> Measurement:
    return Measurement.from_json(ROW | changes)


def timed(us: float, **changes: Any) -> Measurement:
    """A row with the median ``us``, plus or minus 0.1 %."""
    return measurement(median_us=us, ci_us=[us * 0.999, us * 1.001], **changes)


def measurements(count: int, **changes: Any) -> list[Measurement]:
    return [measurement(config={"BLOCK_M": i}, **changes) for i in range(count)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "tuning.sqlite3"


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    with Store.open(database) as opened:
        yield opened


def opening_error(path: Path | str, **options: Any) -> str:
    """The one-line error of opening ``path``."""
    with pytest.raises(KernelcatError) as caught:
        Store.open(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


WRITER = """
import json, sys
from kernelcat.store import Measurement, Store
path, row, name, count = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])
with Store.open(path) as store:
    for i in range(0, count, 4):
        rows = [row | {"run": name, "config": {"i": i + j}} for j in range(4)]
        store.add([Measurement.from_json(row) for row in rows])
        print(i, flush=True)
"""


def writer(
    database: Path | str, name: str, count: int, code: str = WRITER
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, str(database), json.dumps(ROW), name, str(count)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)

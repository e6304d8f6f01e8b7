"""Local receipts that a crash, a newer version or several writers left."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest

import kernelcat
from kernelcat.report import show
from kernelcat.verify import code_record, receipts


def a_receipt(name: str = "gemm/cuda/naive") -> receipts.Receipt:
    return receipts.Receipt(name, "source", "h200", {}, ("p",), 100, {"memcheck": 0}, "2026-11-20")


GOOD = a_receipt().to_json()
NEWER = json.dumps({**asdict(a_receipt()), "signature": "of a newer version"})
HOSTILE = {
    "torn": GOOD[: len(GOOD) // 2],
    "newer": NEWER,
    "of no JSON": "\x1b[31m receipt",
    "a number": "7",
    "null": "null",
    "empty": "",
    "without fields": "{}",
    "deep": "[" * 100_000,
    "other types": json.dumps({**asdict(a_receipt()), "sanitizer": {"memcheck": []}}),
    "no mapping": json.dumps({**asdict(a_receipt()), "sanitizer": "memcheck"}),
    "problems": json.dumps({**asdict(a_receipt()), "problems": None}),
    "a huge number": GOOD.replace("100", "1" * 5000),
}


def write_lines(*lines: str) -> Path:
    folder = receipts.local_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nvidia-h200.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_a_line_that_is_no_receipt_ends_neither_dispatch_nor_show(line: str) -> None:
    path = write_lines(GOOD, line, a_receipt("gemm/cuda/tma").to_json())
    kernelcat.reload()
    with pytest.warns(RuntimeWarning, match=f"1 unreadable lines are ignored .{path}:2:"):
        known = receipts.known()
    assert {"gemm/cuda/naive", "gemm/cuda/tma"} <= {
        r.implementation for r in known if not r.environment
    }
    decision = kernelcat.get("gemm").explain(M=64, N=64, K=64, dtype="float16", gpu="h200")
    assert decision.implementation and show.text(show.card("gemm"))


def test_bytes_that_are_no_text_are_ignored() -> None:
    path = write_lines(GOOD)
    path.write_bytes(b"\xff\xfe\n" + path.read_bytes())
    with pytest.warns(RuntimeWarning, match="unreadable"):
        assert receipts.read(path.parent) == [a_receipt()]


@pytest.mark.parametrize("line", [HOSTILE["torn"], HOSTILE["newer"], HOSTILE["deep"]])
def test_other_ledgers_leave_out_such_lines_too(line: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("KERNELCAT_MACHINE_CODE", str(tmp_path))
    (tmp_path / "nvidia-h200.jsonl").write_text(f'{line} "implementation":"gemm/cuda/none"\n')
    code_record.find.cache_clear()
    with pytest.warns(RuntimeWarning, match="unreadable"):
        assert code_record.find("gemm/cuda/none", "h200") is None
    code_record.find.cache_clear()


def test_writing_keeps_lines_of_a_newer_version_and_drops_torn_ones() -> None:
    path = write_lines(HOSTILE["torn"], NEWER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        receipts.write(path.parent, [a_receipt("gemm/cuda/tma")])
        receipts.write(path.parent, [a_receipt()])
    lines = path.read_text().splitlines()
    assert lines == [GOOD, a_receipt("gemm/cuda/tma").to_json(), NEWER]


WRITER = """
import sys
from pathlib import Path
from kernelcat.verify import receipts
for number in range(30):
    name = f"gemm/cuda/{sys.argv[2]}-{number}"
    receipts.write(Path(sys.argv[1]), [receipts.Receipt(name, "s", "h200", {}, (), 1, {}, "")])
"""


def test_six_writers_lose_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, str(number)]) for number in range(6)]
    assert [writer.wait(120) for writer in writers] == [0] * 6
    assert len(receipts.read(tmp_path)) == 180

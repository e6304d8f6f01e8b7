"""JSON Lines files that are huge, damaged or made to do harm."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from kernelcat.store import Measurement, Store, StoreError, import_, lines, merge
from kernelcat.store.measurement import LINE_BYTES

ROW: dict[str, Any] = json.loads(Path(__file__).parents[1].joinpath("measurement.json").read_text())
ROW["problem"] = {"M": 4096}  # axes of another specification: the catalog cannot check such rows


def line(**changes: Any) -> str:
    return Measurement.from_json(ROW | changes).line()


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(tmp_path / "mine.sqlite3") as opened:
        yield opened


HOSTILE = {
    "deep": "[" * 60_000,
    "a number of 10,000 digits": json.dumps(ROW).replace('"samples":', '"samples": 1' + "0" * 9999),
    "no UTF-8": "\udcff",
    "a key twice": '{"entry": 1, "entry": 2}',
    "not a number": '{"median_us": NaN}',
    "a name with an escape": json.dumps(ROW | {"problem_name": "\x1b[31m"}),
    "an unknown race": '{"race": "01234567"}',
    "a race that is a list": '{"id": "0", "race": []}',
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_line_is_refused_and_the_others_are_added(
    store: Store, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "theirs.jsonl"
    content = f"{line(run='a')}\n{text}\n{line(run='b')}\n"
    path.write_bytes(content.encode(errors="surrogateescape"))
    report = import_(store, path)
    assert (report.added, [number for number, _ in report.refused]) == (0, [2])
    assert store.rows() == []
    report = import_(store, path, partial=True)
    assert (report.added, len(report.refused)) == (2, 1)
    assert all("\n" not in reason for _, reason in report.refused)
    merged = merge(store, path)
    assert (merged.added, merged.known, len(merged.refused)) == (0, 2, 1)


@pytest.mark.parametrize("length", [LINE_BYTES + 1, 3 * LINE_BYTES])
def test_a_line_that_is_too_long_is_one_refused_line(
    store: Store, tmp_path: Path, length: int
) -> None:
    path = tmp_path / "theirs.jsonl"
    path.write_text(f"{line(run='a')}\n{'x' * length}\n{line(run='b')}\n")
    report = import_(store, path, partial=True)
    assert (report.added, [number for number, _ in report.refused]) == (2, [2])


def test_a_file_that_is_too_large_is_refused_and_nothing_is_added(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_BYTES", 1 << 20)
    path = tmp_path / "theirs.jsonl"
    path.write_text("".join(f"{line(run=f'r{i}')}\n" for i in range(2000)))
    with pytest.raises(StoreError, match="more than 1 MiB: import it in parts"):
        import_(store, path)
    assert store.rows() == []


def test_an_import_holds_a_part_of_the_file_in_memory(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "theirs.jsonl"
    text = json.loads(line())
    with path.open("w") as file:
        for i in range(4000):
            row = text | {"run": f"r{i}", "detail": "x" * 1900}
            file.write(Measurement.from_json(row).line() + "\n")
    assert path.stat().st_size > 9 << 20
    tracemalloc.start()
    report = import_(store, path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.added == 4000
    assert peak < path.stat().st_size

"""``kernelcat db stats`` counts what a database holds; ``db prune`` deletes what nothing reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from real_rows import SHIPPED

from kernelcat.catalog.digest import digest_of
from kernelcat.cli import main
from kernelcat.store import Measurement, Store

RACE = [row for row in SHIPPED if (row.entry, row.gpu, row.kind, row.state, row.regime)
        == ("gemm", "h200", "measured", "sustained", "graph")]  # fmt: skip
PROBLEM = RACE[0].problem_key
ROWS = [row for row in RACE if row.problem_key == PROBLEM]
"""One race of one problem, with its peers."""
OURS = next(row for row in ROWS if not row.is_peer)
PEER = next(row for row in ROWS if row.is_peer)
TODAY = digest_of(OURS.entry, OURS.language, OURS.variant)


def local(row: Measurement, **changes: object) -> Measurement:
    return replace(row, **{"run": "old", "created_at": "2026-11-01T00:00:00.000Z", **changes})


def failure(status: str, **changes: object) -> Measurement:
    measured = "median_us", "ci_us", "quantiles_us", "sm_clock_mhz", "power_w", "temperature_c"
    timing = dict.fromkeys(measured)
    return local(OURS, **timing, samples=0, status=status, detail="why", winner=False, **changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "d.sqlite3"


def fill(path: Path, *rows: Measurement) -> None:
    with Store.open(path) as store:
        assert store.add(rows) == len(rows)


def held(path: Path) -> set[str]:
    with Store.open(path) as store:
        return {row.digest for row in store.rows()}


def run(path: Path, *words: str) -> dict:
    done = CliRunner().invoke(main, ["db", *words, "--db", str(path), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_what_decides_and_what_a_tune_goes_on_from_stays(path: Path) -> None:
    newest = [replace(OURS, run="new", source="0" * 16), replace(PEER, run="new")]
    kept = [
        *newest,
        local(OURS, source=TODAY),
        failure("compile_error", source=TODAY),
        failure("wrong", source="1" * 16),
    ]
    dead = [
        local(OURS, source="1" * 16),
        failure("compile_error", source="1" * 16),
        failure("timeout", source="2" * 16),
        local(PEER),
    ]
    fill(path, *kept, *dead)
    with Store.open(path) as store:
        before = [(race.run, race.measurements) for race in store.winners(regime=None)]
    report = run(path, "prune", "--dry-run")
    assert (report["deleted"], report["kept"]) == (len(dead), len(kept))
    assert held(path) == {row.digest for row in kept + dead}
    report = run(path, "prune")
    assert (report["deleted"], report["kept"]) == (len(dead), len(kept))
    assert held(path) == {row.digest for row in kept}
    with Store.open(path) as store:
        assert [(r.run, r.measurements) for r in store.winners(regime=None)] == before
    assert run(path, "prune")["deleted"] == 0


def test_rows_of_a_language_that_is_not_here_stay(path: Path) -> None:
    gone = [replace(OURS, language="cobol", source="1" * 16)]
    fill(path, *gone, local(gone[0], run="older"))
    assert run(path, "prune")["deleted"] == 0


def test_the_file_gets_smaller(path: Path) -> None:
    stale = [local(OURS, source="1" * 16, run=f"run{n}", detail="x" * 200) for n in range(1500)]
    fill(path, replace(OURS, run="new"), *stale)
    report = run(path, "prune")
    assert report["deleted"] == 1500
    assert report["bytes_after"] < report["bytes_before"] / 4


def test_statistics_count_rows_by_entry_gpu_and_kind(path: Path) -> None:
    fill(path, OURS, local(OURS), failure("wrong"))
    report = run(path, "stats")
    [count] = report["counts"]
    assert (count["entry"], count["gpu"], count["kind"]) == ("gemm", "h200", "measured")
    assert (count["rows"], count["passed"], count["runs"]) == (3, 2, 2)
    assert (count["first"][:10], count["last"]) == ("2026-11-01", OURS.created_at)
    assert report["rows"] == 3 and report["bytes"] >= path.stat().st_size > 0
    table = CliRunner().invoke(main, ["db", "stats", "--db", str(path)]).stdout
    assert "gemm" in table and "3 rows, 0." in table


@pytest.mark.parametrize("verb", ["stats", "prune"])
def test_a_missing_and_a_damaged_database_are_one_line(path: Path, verb: str) -> None:
    done = CliRunner().invoke(main, ["db", verb, "--db", str(path)])
    assert done.exit_code == 1 and "there is no tuning database" in done.output
    path.write_bytes(b"no database" * 100)
    done = CliRunner().invoke(main, ["db", verb, "--db", str(path)])
    assert done.exit_code == 1 and "is not a SQLite database" in done.stderr
    assert len(done.stderr.splitlines()) == 1

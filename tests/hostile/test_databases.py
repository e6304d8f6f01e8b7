"""Database files that are read-only, layered, oddly named, damaged or made to do harm."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from campaign import share

import kernelcat
from kernelcat.store import Measurement, Store, StoreError, locate, merge, snapshot

ROW: dict[str, Any] = json.loads(Path(__file__).parents[1].joinpath("measurement.json").read_text())
ROW["problem"] = {"M": 4096}  # axes of another specification: the catalog cannot check such rows
TABLE, SCHEMA = "kernelcat_measurements", "kernelcat_schema"


def timed(us: float, **changes: Any) -> Measurement:
    times = {"median_us": us, "ci_us": [us * 0.999, us * 1.001]}
    return Measurement.from_json(ROW | times | changes)


def made(path: Path, *rows: Measurement) -> Path:
    with Store.open(path) as store:
        store.add(rows)
    return path


def content(folder: Path) -> dict[str, bytes]:
    """File name -> bytes, without the locks, which are empty."""
    files = (file for file in sorted(folder.iterdir()) if file.suffix != ".lock")
    return {file.name: file.read_bytes() for file in files}


# ---- read-only ----------------------------------------------------------------------------------

READ_ONLY = """
import subprocess, sys, warnings
folder, *command = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "none", "/mnt"], check=True)
subprocess.run(["cp", "-a", f"{folder}/.", "/mnt"], check=True)
subprocess.run(["mount", "-o", "remount,ro", "/mnt"], check=True)
sys.exit(subprocess.run(command).returncode)
"""


def on_read_only_file_system(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python ``code`` where /mnt is a read-only file system with the files of ``folder``."""
    command = [
        "unshare",
        "--map-root-user",
        "--mount",
        sys.executable,
        "-c",
        READ_ONLY,
        str(folder),
    ]
    return subprocess.run(
        [*command, sys.executable, "-c", code],
        capture_output=True, text=True, check=False, cwd=Path(kernelcat.__file__).parents[1],
        env={**os.environ, "KERNELCAT_DB": "/mnt/tuning.sqlite3"},
    )  # fmt: skip


def columns_of(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [row[1] for row in connection.execute(f"PRAGMA table_info({TABLE})")]


def database_with_wal_and_journal(folder: Path) -> None:
    """Rows of 10 us in the file, 5 us in its write-ahead log, and 2 us in the journal."""
    folder.mkdir()
    path = made(folder / "tuning.sqlite3", timed(10.0))
    other = made(folder / "other.sqlite3", timed(5.0, variant="naive", run="b"))
    columns = ", ".join(column for column in columns_of(path) if column != "id")
    write = f"""
import os, sqlite3
connection = sqlite3.connect({str(path)!r})
connection.execute("PRAGMA journal_mode=WAL")
connection.execute("PRAGMA wal_autocheckpoint=0")
connection.execute("ATTACH {str(other)!r} AS other")
connection.execute("INSERT INTO {TABLE} ({columns}) SELECT {columns} FROM other.{TABLE}")
connection.commit()
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", write], check=True)
    other.unlink()
    assert (folder / "tuning.sqlite3-wal").stat().st_size > 0
    line = timed(2.0, language="triton", variant="tma", run="c").line()
    (folder / "tuning.sqlite3.journal.jsonl").write_text(f"{line}\n")


def test_a_read_only_file_system_serves_every_row(tmp_path: Path) -> None:
    database_with_wal_and_journal(tmp_path / "db")
    done = on_read_only_file_system(
        tmp_path / "db",
        "from kernelcat.store import Store, StoreError, snapshot\n"
        "with Store.open(create=False) as store:\n"
        "    print(sorted(row.median_us for row in store.rows()))\n"
        "    try: store.add(store.rows())\n"
        "    except StoreError as error: print(error)\n"
        "print(min(choice.median_us for choice in snapshot().choices('gemm')) <= 2)\n",
    )
    assert done.returncode == 0, done.stderr
    rows, refusal, served = done.stdout.splitlines()
    assert rows == "[2.0, 5.0, 10.0]"
    assert "is read-only: make it writable" in refusal
    assert served == "True"
    assert "Warning" not in done.stderr


@pytest.mark.parametrize(
    "words", [["leaderboard", "gemm"], ["show", "gemm"], ["db", "path"], ["db", "export", "FILE"]]
)
def test_a_read_only_file_system_serves_every_verb(tmp_path: Path, words: list[str]) -> None:
    made(tmp_path / "db" / "tuning.sqlite3", timed(10.0))
    words = [str(tmp_path / "out") if word == "FILE" else word for word in words]
    code = f"from kernelcat.cli import main; main({words!r})"
    done = on_read_only_file_system(tmp_path / "db", code)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- layers and names ---------------------------------------------------------------------------


def test_a_writable_database_lies_over_read_only_ones(tmp_path: Path) -> None:
    site = made(tmp_path / "site" / "site.sqlite3", timed(10.0, run="a"))
    before = content(site.parent)
    mine = tmp_path / "mine.sqlite3"
    name = f"{mine}:{site}"
    assert [str(layer) for layer in locate(name).layers] == [str(site)]
    with Store.open(name) as store:
        assert [row.median_us for row in store.rows()] == [10.0]
        assert [race.winner.median_us for race in store.winners()] == [10.0]
        later = {"created_at": "2026-12-01T00:00:00Z", "run": "b"}
        store.add([timed(7.0, **later)])
        assert [row.median_us for row in store.rows()] == [10.0, 7.0]
        assert [race.winner.median_us for race in store.winners()] == [7.0]
    assert content(site.parent) == before
    with Store.open(mine) as store:
        assert [row.median_us for row in store.rows()] == [7.0]


def test_a_verdict_in_the_upper_layer_refutes_a_timing_in_the_lower(tmp_path: Path) -> None:
    site = made(tmp_path / "site.sqlite3", timed(10.0))
    failure = {"status": "wrong", "median_us": None, "ci_us": None, "samples": 0}
    mine = made(tmp_path / "mine.sqlite3", Measurement.from_json(ROW | failure))
    with Store.open(f"{mine}:{site}") as store:
        assert store.winners() == []


@pytest.mark.parametrize(
    "name", ["a?b.sqlite3", "50%25.sqlite3", "a%20b?mode=memory", "#1;x.sqlite3"]
)
def test_a_path_means_itself(tmp_path: Path, name: str) -> None:
    path = made(tmp_path / name, timed(10.0))
    assert path.read_bytes().startswith(b"SQLite format 3")
    assert list(content(tmp_path)) == [name]
    with Store.open(path, create=False) as store:
        assert len(store.rows()) == 1


# ---- merge --------------------------------------------------------------------------------------


def test_a_merge_never_writes_to_the_other_file(tmp_path: Path) -> None:
    database_with_wal_and_journal(tmp_path / "db")
    before = content(tmp_path / "db")
    with Store.open(tmp_path / "mine.sqlite3") as store:
        report = merge(store, tmp_path / "db" / "tuning.sqlite3")
    assert report.added == 3
    assert content(tmp_path / "db") == before


def test_a_merge_refuses_invalid_rows_and_adds_all_others(tmp_path: Path) -> None:
    other = made(tmp_path / "other.sqlite3", *(timed(us, run=f"r{us}") for us in (1.0, 2.0, 3.0)))
    connection = sqlite3.connect(other)
    connection.execute(f"UPDATE {TABLE} SET median_us = -1 WHERE run = 'r2.0'")
    connection.execute(f"UPDATE {TABLE} SET problem = ? WHERE run = 'r3.0'", ["[" * 60000])
    connection.commit()
    with Store.open(tmp_path / "mine.sqlite3") as store:
        report = merge(store, other)
        assert (report.added, len(report.refused)) == (1, 2)
        assert [row.median_us for row in store.rows()] == [1.0]


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (f"CREATE VIEW {TABLE} AS {ENDLESS} SELECT * FROM n", "is not a plain table"),
        (f"CREATE VIEW {SCHEMA} AS {ENDLESS} SELECT x AS version FROM n", "is not a plain table"),
        (
            f"CREATE TABLE {TABLE} (id, big AS (hex(zeroblob(400000000))))",
            "cannot use the tuning database",
        ),
        (f"CREATE TABLE {TABLE} (id)", "no such column"),
    ],
)
def test_a_hostile_schema_is_refused(tmp_path: Path, schema: str, message: str) -> None:
    other = made(tmp_path / "other.sqlite3", timed(1.0))
    connection = sqlite3.connect(other)
    name = SCHEMA if SCHEMA in schema else TABLE
    connection.execute(f"DROP TABLE {name}")
    connection.execute(schema)
    connection.commit()
    began = time.monotonic()
    with Store.open(tmp_path / "mine.sqlite3") as store:
        with pytest.raises(StoreError, match=message) as caught:
            merge(store, other)
        assert store.rows() == []
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 20


def test_a_query_that_takes_for_ever_is_interrupted(tmp_path: Path) -> None:
    other = made(tmp_path / "other.sqlite3", timed(1.0))
    connection = sqlite3.connect(other)
    columns = columns_of(other)
    connection.execute(f"DROP TABLE {TABLE}")
    # Every row computes a column: many rows make a query slow, however small the file is.
    slow = "AS (length(replace(hex(zeroblob(1000000)), '0', '1')))"
    declared = ", ".join(f"{column} {slow if column == 'detail' else ''}" for column in columns)
    connection.execute(f"CREATE TABLE {TABLE} ({declared})")
    connection.executemany(f"INSERT INTO {TABLE} (id) VALUES (?)", [(i,) for i in range(200)])
    connection.commit()
    began = time.monotonic()
    with Store.open(tmp_path / "mine.sqlite3") as store:
        report = merge(store, other)
    assert (report.added, len(report.refused)) == (0, 200)
    assert time.monotonic() - began < 60


# ---- damage -------------------------------------------------------------------------------------


@pytest.mark.campaign
def test_flipped_bytes_answer_in_one_line(tmp_path: Path, recwarn: Any) -> None:
    path = made(
        tmp_path / "db.sqlite3", *(timed(us, run=f"r{us}") for us in map(float, range(1, 40)))
    )
    original = path.read_bytes()
    rng = random.Random(7)
    for _ in range(share(2000)):
        damaged = bytearray(original)
        for _ in range(rng.choice((1, 3, 20))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        for suffix in ("-wal", "-shm", "-journal"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        try:
            with Store.open(path, create=False) as store:
                store.rows()
                store.winners()
        except StoreError as error:
            assert "\n" not in str(error)
        snapshot(str(path)).choices("gemm")


@pytest.mark.parametrize("name", ["\udcff.sqlite3", "x" * 300])
def test_a_name_that_no_file_system_takes_is_one_line(tmp_path: Path, name: str) -> None:
    try:
        with Store.open(tmp_path / name):
            pass
    except StoreError as error:
        assert "\n" not in str(error)


# ---- speed --------------------------------------------------------------------------------------


def test_winners_take_time_linear_in_the_rows(tmp_path: Path) -> None:
    from sqlalchemy import insert

    from kernelcat.store.models import measurements, to_row

    def filled(count: int) -> Store:
        store = Store.open(tmp_path / f"{count}.sqlite3")
        row = to_row(timed(10.0))
        fails = {"status": "wrong", "median_us": None, "ci_low_us": None, "ci_high_us": None}
        rows = [
            row
            | {
                "digest": f"{i:032x}",
                "run": f"run{i // 500}",
                "created_at": f"2026-{1 + i // 10000:02d}-{1 + i // 400 % 25:02d}T00:00:00.000Z",
                "config": json.dumps({"BLOCK_M": i % 37}),
                "problem": json.dumps({"M": i % 8}),
            }
            | (fails if i % 10 == 0 else {})
            for i in range(count)
        ]
        with store._writing() as connection:
            for first in range(0, count, 5000):
                connection.execute(insert(measurements), rows[first : first + 5000])
        return store

    def seconds(store: Store) -> float:
        times = []
        for _ in range(3):
            began = time.process_time()
            assert store.winners(entry="gemm")
            times.append(time.process_time() - began)
        return min(times)

    with filled(10_000) as small, filled(100_000) as large:
        assert seconds(large) < 20 * seconds(small)
        assert seconds(large) < 1.0  # CPU time: 0.3 s where no other process is at work

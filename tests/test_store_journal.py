"""The journal beside a database that cannot be written."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
import store_rows
from store_rows import ROW, measurement, measurements, opening_error, writer

from kernelcat.errors import StoreError
from kernelcat.store import Store

path = store_rows.path


class write_lock:
    """A write transaction of another connection, which locks the database."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)

    def __enter__(self) -> None:
        self.connection.execute("BEGIN EXCLUSIVE")

    def __exit__(self, *_: object) -> None:
        self.connection.close()


def test_rows_that_cannot_be_added_go_to_the_journal_and_are_added_later(path: Path) -> None:
    rows = measurements(3)
    with Store.open(path, timeout=0.1) as store:
        with write_lock(path):
            with pytest.warns(UserWarning, match="keeps it locked.*Results go to .*journal"):
                assert store.keep(rows[:2]) is False
            assert store.keep(rows[2:]) is False  # no second warning, no second wait
        assert store.rows() == []
        journal = store.journal.path
        assert len(journal.read_text().splitlines()) == 3
        store._journaling = False  # as in a killed process: close() does not read the journal
    with Store.open(path) as store:
        assert store.rows() == rows
        assert not journal.exists()
        assert store.keep(measurements(4)[3:]) is True


def test_closing_adds_the_rows_of_the_journal(path: Path) -> None:
    with Store.open(path, timeout=0.1) as store:
        with write_lock(path), pytest.warns(UserWarning, match="locked"):
            store.keep([measurement()])
        journal = store.journal.path
    assert not journal.exists()


def test_a_half_written_line_is_dropped_with_a_warning(database: str) -> None:
    first, second = measurements(2)
    with Store.open(database) as store:
        store.journal.path.parent.mkdir(parents=True, exist_ok=True)
        store.journal.path.write_text(first.line() + "\n" + second.line()[:100])
        store.journal.append([second])
    with pytest.warns(UserWarning, match="1 half-written lines"), Store.open(database) as store:
        assert store.rows() == [first, second]


def test_a_journal_of_another_version_is_not_deleted(database: str) -> None:
    with Store.open(database) as store:
        store.journal.path.parent.mkdir(parents=True, exist_ok=True)
        store.journal.path.write_text(json.dumps(ROW | {"colour": "red"}) + "\n")
    assert "unknown key 'colour'; move the file away" in opening_error(database)


def test_a_full_disk_loses_no_row(path: Path) -> None:
    with Store.open(path) as store:
        with store.engine.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
            connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")
        with pytest.raises(StoreError, match="the disk is full: free some space"):
            store.add(measurements(300))
        with pytest.warns(UserWarning, match="the disk is full"):
            assert store.keep(measurements(300)) is False
        store._journaling = False
    with Store.open(path) as store:
        assert len(store.rows()) == 300


LIMITED = """
import json, resource, sys, warnings
from kernelcat.errors import StoreError
from kernelcat.store import Measurement, Store
row, limit = json.loads(sys.argv[2]), int(sys.argv[4])
rows = [Measurement.from_json(row | {"config": {"i": i}}) for i in range(100)]
with Store.open(sys.argv[1]) as store, warnings.catch_warnings(record=True) as caught:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        print("stored" if store.keep(rows) else f"journaled: {caught[0].message}")
    except StoreError as error:
        print(f"refused: {error}")
"""


def test_a_file_that_may_not_grow_sends_rows_to_the_journal(path: Path) -> None:
    with Store.open(path) as store:
        store.add(measurements(600, run="before"))  # so that 100 more rows touch many pages
    out, error = writer(path, "", 100 << 10, LIMITED).communicate(timeout=60)
    assert out.startswith("journaled: cannot use the tuning database"), error
    with Store.open(path) as store:
        assert len(store.rows()) == 700


def test_losing_results_is_an_error(path: Path) -> None:
    Store.open(path).close()
    out, error = writer(path, "", 40 << 10, LIMITED).communicate(timeout=60)
    assert out.startswith("refused: cannot write"), error
    assert "measurements are not being kept; free some space" in out

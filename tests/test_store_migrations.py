"""Migrations: a database of an older version is brought up to date, once."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import store_rows
from sqlalchemy import Connection, create_engine, inspect, text
from store_rows import FAILED, ROW, measurement, opening_error, writer

from kernelcat.errors import KernelcatError
from kernelcat.store import Measurement, Store, migrations, models

path = store_rows.path


def test_migrations_run_once_in_order(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(database) as store:
        store.add([measurement()])
    ran: list[int] = []

    def add_column(connection: Connection) -> None:
        ran.append(2)
        connection.execute(text("ALTER TABLE kernelcat_measurements ADD COLUMN node TEXT"))

    def fill_column(connection: Connection) -> None:
        ran.append(3)
        connection.execute(text("UPDATE kernelcat_measurements SET node = 'local'"))

    before = migrations.newest()
    steps = [*migrations.MIGRATIONS, add_column, fill_column]
    monkeypatch.setattr(migrations, "MIGRATIONS", steps)
    for _ in range(2):
        with Store.open(database) as store, store.engine.connect() as connection:
            assert store.rows() == [measurement()]
            assert migrations.version(connection) == before + 2
            node = connection.execute(text("SELECT node FROM kernelcat_measurements")).scalar()
            assert node == "local"
    assert ran == [2, 3]
    monkeypatch.undo()
    assert f"a newer kernelcat wrote it (schema {before + 2}" in opening_error(database)


def first_version(database: str, detail: str | None = None) -> None:
    """Make the database that the first version of the schema made, with the row of ROW."""
    script = Path(__file__).with_name("database-1.sql").read_text()
    if "://" not in database:
        Path(database).parent.mkdir()
        with sqlite3.connect(database) as old:
            old.executescript(script)
            old.execute("UPDATE kernelcat_measurements SET detail = ?", [detail])
        return
    # What SQLAlchemy wrote for the same tables on a server.
    script = script.replace("id INTEGER NOT NULL", "id BIGSERIAL NOT NULL")
    script = script.replace(" FLOAT,", " FLOAT(53),")
    script = script.replace("VALUES(1,'d42", "VALUES(nextval('kernelcat_measurements_id_seq'),'d42")
    with create_engine(database).begin() as connection:
        for statement in script.replace("BEGIN TRANSACTION;", "").split(";\n"):
            if statement.strip() and not statement.startswith("COMMIT"):
                connection.exec_driver_sql(statement)
        changed = text("UPDATE kernelcat_measurements SET detail = :detail")
        connection.execute(changed, {"detail": detail})


def test_a_database_of_the_first_version_is_migrated(database: str) -> None:
    first_version(database)
    with_sqnr = measurement(sqnr_db=19.25)
    with Store.open(database) as store, store.engine.connect() as connection:
        assert store.rows() == [measurement()]
        assert store.add([measurement(), with_sqnr]) == 1
        assert store.rows() == [measurement(), with_sqnr]
        assert migrations.version(connection) == migrations.newest()


def test_a_migrated_database_has_the_columns_of_a_new_one(database: str) -> None:
    first_version(database)
    with Store.open(database) as store:
        found = {column["name"]: column for column in
                 inspect(store.engine).get_columns(models.measurements.name)}  # fmt: skip
    assert {name: column["nullable"] for name, column in found.items()} == {
        column.name: column.nullable for column in models.measurements.columns
    }


def test_a_migration_moves_the_winner_from_detail_to_its_own_column(database: str) -> None:
    winner = measurement(winner=True)
    first_version(database, detail="winner")
    with Store.open(database) as store:
        assert store.rows() == [winner]
        assert store.add([winner, Measurement.from_json(ROW | {"detail": "winner"})]) == 0


def test_sixteen_processes_that_open_an_old_database_migrate_it_once(database: str) -> None:
    first_version(database)
    opened = [writer(database, f"writer{i}", 4) for i in range(16)]
    assert [process.communicate(timeout=120)[1] for process in opened] == [""] * 16
    with Store.open(database) as store, store.engine.connect() as connection:
        assert len(store.rows()) == 65
        versions = connection.execute(text("SELECT version FROM kernelcat_schema")).all()
        assert versions == [(migrations.newest(),)]


def test_failed_rows_and_peers_cannot_be_winners(path: Path) -> None:
    for changes in (FAILED, {"language": "peer", "config": {}}, {"winner": "yes"}):
        with pytest.raises(KernelcatError, match="winner"):
            measurement(**{"winner": True, **changes})


def test_a_failed_migration_leaves_the_old_version(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(database) as store:
        store.add([measurement()])

    def fails_halfway(connection: Connection) -> None:
        connection.execute(text("ALTER TABLE kernelcat_measurements ADD COLUMN node TEXT"))
        connection.execute(text("UPDATE no_such SET x = 1"))

    monkeypatch.setattr(migrations, "MIGRATIONS", [*migrations.MIGRATIONS, fails_halfway])
    assert "no_such" in opening_error(database)
    monkeypatch.undo()
    with Store.open(database) as store, store.engine.connect() as connection:
        assert store.rows() == [measurement()]
        columns = connection.execute(text("SELECT * FROM kernelcat_measurements")).keys()
        assert "node" not in columns


def test_a_new_database_is_in_wal_mode_with_full_synchronization(path: Path) -> None:
    with Store.open(path) as store, store.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2

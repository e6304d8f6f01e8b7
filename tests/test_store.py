"""The tuning database: rows, races, concurrent processes, damaged files, journal, migrations."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from campaign import seeds
from sqlalchemy import Connection, create_engine, inspect, text

from kernelcat.errors import KernelcatError, MissingDependency, StoreError
from kernelcat.store import SCREEN, Measurement, Store, locate, migrations, models

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


# ---------------------------------------------------------------- rows in and out


def test_rows_are_read_back_unchanged(store: Store) -> None:
    predicted = {"kind": "predicted", "ci_us": None, "samples": 0, "max_error": None}
    rows = [
        measurement(),
        measurement(**FAILED, detail="illegal address"),
        measurement(**predicted, run="model"),
        measurement(sqnr_db=20.5),
        measurement(quantiles_us=[179.0, 180.0, 181.5]),
    ]
    assert store.add(rows) == 5
    assert store.rows() == rows


def test_adding_again_changes_nothing(store: Store) -> None:
    rows = measurements(5)
    assert store.add([*rows, rows[0]]) == 5
    assert store.add(rows + measurements(7)) == 2
    assert len(store.rows()) == 7


def test_a_thousand_rows_are_added_at_once(store: Store) -> None:
    assert store.add(measurements(1300)) == 1300
    assert len(store.rows()) == 1300


def test_rows_are_found_by_every_column(store: Store) -> None:
    other = measurement(
        entry="tma_copy", gpu="b200", language="triton", variant="bulk", problem={"rows": 1},
        config={"BYTES": 4096}, source="feed", kind="predicted", ci_us=None, samples=0, run="r2",
        protocol=ROW["protocol"] | {"regime": "eager"},
    )  # fmt: skip
    store.add([measurement(), other])
    for name in ("entry", "gpu", "language", "variant", "source", "kind", "run", "regime"):
        assert store.rows(**{name: getattr(other, name)}) == [other], name
    for wanted in (other.problem, other.problem_key, other.to_problem()):
        assert store.rows(problem=wanted) == [other]
    for config in (other.config, other.config_key, other.to_config()):
        assert store.rows(config=config) == [other]
    assert store.rows(entry="gemm", gpu="b200") == []


def test_tried_gives_the_last_status_of_each_configuration_for_one_source(store: Store) -> None:
    later = {"created_at": "2026-11-21T00:00:00Z"}
    a, b, c = ({"config": {"BLOCK_M": size}} for size in (64, 128, 256))
    store.add([measurement(**a), measurement(**b, **FAILED), measurement(**c)])
    store.add([measurement(**c, **FAILED, **later), measurement(**a, source="changed")])
    subject = ("gemm", "cuda", "wgmma", ROW["problem"], "h200")
    assert store.tried(*subject, ROW["source"]) == {
        '{"BLOCK_M":64}': "passed",
        '{"BLOCK_M":128}': "crashed",
        '{"BLOCK_M":256}': "crashed",
    }
    assert store.tried(*subject, "changed") == {'{"BLOCK_M":64}': "passed"}
    assert store.tried(*subject, ROW["source"], kind="predicted") == {}


# ---------------------------------------------------------------- races


def test_a_winner_is_compared_within_its_run_only(store: Store) -> None:
    old = timed(100.0, run="old", created_at="2026-11-01T00:00:00Z")
    triton = {"run": "new", "language": "triton", "variant": "tma"}
    new = [
        timed(130.0, run="new"),
        timed(120.0, **triton),
        timed(125.0, **triton, config={"slow": 1}),
        timed(110.0, run="new", language="peer", variant="cublas", config={}, source=""),
    ]
    store.add([old, *new, measurement(**FAILED, run="newer", created_at="2026-12-01T00:00:00Z")])
    (race,) = store.winners(gpu="h200", entry="gemm")
    assert race.run == "new"
    assert race.winner == new[1]
    assert race.rivals == (new[0],)
    assert race.peers == (new[3],)


def test_a_configuration_found_wrong_never_wins_by_an_earlier_timing(store: Store) -> None:
    """This happens where a tune is killed after a finalist failed verification, before the race."""
    liar, honest = timed(1.0, variant="liar"), timed(9.0, variant="honest")
    store.add([liar, honest])
    assert store.winners()[0].winner.variant == "liar"
    failed = {"status": "wrong", "median_us": None, "ci_us": None, "samples": 0}
    store.add([measurement(variant="liar", config=dict(liar.config), **failed)])
    assert [row.variant for row in store.winners()[0].rows] == ["honest"]


def test_each_gpu_problem_regime_and_kind_has_a_winner(store: Store) -> None:
    eager = ROW["protocol"] | {"regime": "eager"}
    rows = [timed(9.0), timed(8.0, gpu="b200"), timed(7.0, problem={"M": 1}),
            timed(6.0, protocol=eager),
            measurement(kind="predicted", ci_us=None, samples=0, median_us=5.0)]  # fmt: skip
    store.add(rows)
    assert {race.winner.median_us for race in store.winners()} == {9.0, 8.0, 7.0, 5.0}
    assert {race.winner.median_us for race in store.winners(regime=None)} == {9, 8, 7, 6, 5}
    assert [race.winner for race in store.winners(gpu="b200")] == [rows[1]]
    assert store.winners(entry="tma_copy") == []


def test_raced_rows_decide_over_screened_rows(store: Store) -> None:
    screened = ROW["protocol"] | {"state": SCREEN}
    store.add([timed(100.0, config={"lucky": True}, protocol=screened), timed(120.0)])
    store.add([timed(90.0, run="z", protocol=screened, created_at="2026-12-01T00:00:00Z")])
    (race,) = store.winners()
    assert race.winner.median_us == 120.0


def test_ties_are_broken_by_name_unless_the_tuner_named_a_winner(store: Store) -> None:
    triton = timed(99.5, language="triton", variant="tma")
    store.add([timed(100.0), triton])
    assert store.winners()[0].winner.language == "cuda"
    later = {"run": "z", "created_at": "2026-12-01T00:00:00Z"}
    store.add([timed(100.0, **later), timed(101.5, language="cute", winner=True, **later)])
    assert store.winners()[0].winner.language == "cute"


def test_peers_alone_are_no_race(store: Store) -> None:
    store.add([timed(1.0, language="peer", variant="cublas", config={})])
    assert store.winners() == []


# ---------------------------------------------------------------- many processes

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


def test_sixteen_concurrent_writers_lose_no_row_and_store_none_twice(database: str) -> None:
    """Each writer adds rows of its own and rows that another writer adds at the same time."""
    names = [f"writer{i % 12}" for i in range(16)]
    writers = [writer(database, name, 100) for name in names]
    errors = [process.communicate(timeout=120)[1] for process in writers]
    assert errors == [""] * 16
    assert [process.returncode for process in writers] == [0] * 16
    with Store.open(database) as store:
        rows = store.rows()
        assert len(rows) == len({row.digest for row in rows}) == 1200
        assert len(store.rows(run="writer3")) == 100


@seeds(50)
def test_a_killed_process_loses_no_added_row(database: str, seed: int) -> None:
    dice, process = random.Random(seed), writer(database, "killed", 100_000)
    assert process.stdout is not None
    done = [int(process.stdout.readline()) for _ in range(dice.randint(1, 20))]
    time.sleep(dice.uniform(0, 0.02))  # often in the middle of a transaction
    process.send_signal(signal.SIGKILL)
    done += [int(line) for line in process.communicate()[0].split()]
    with Store.open(database) as store:
        assert len(store.rows(run="killed")) >= 4 * len(done)
        assert store.add([measurement()]) == 1


# ---------------------------------------------------------------- files that cannot be used


def opening_error(path: Path | str, **options: Any) -> str:
    """The one-line error of opening ``path``."""
    with pytest.raises(KernelcatError) as caught:
        Store.open(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_garbage_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database\n" * 200)
    assert "is not a SQLite database: move it away" in opening_error(path)
    assert path.read_text() == "not a database\n" * 200


def test_a_damaged_database_is_refused(path: Path) -> None:
    with Store.open(path) as store:
        store.add(measurements(400))
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (size - 8192))
    with pytest.raises(StoreError, match="damaged"), Store.open(path) as store:
        store.rows()


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bookmarks.db"
    sqlite3.connect(path).execute("CREATE TABLE bookmarks (url TEXT)")
    assert "tables of another program (bookmarks)" in opening_error(path)


def test_a_newer_database_is_refused(database: str) -> None:
    with Store.open(database) as store, store.engine.begin() as connection:
        connection.execute(text("UPDATE kernelcat_schema SET version = 99"))
    message = opening_error(database)
    versions = f"(schema 99, this kernelcat reads up to {migrations.newest()})"
    assert f"{versions}: upgrade kernelcat" in message


def test_a_missing_database_is_refused_without_create(path: Path) -> None:
    assert f"there is no tuning database at {path}: run kernelcat tune" in opening_error(
        path, create=False
    )
    assert not path.parent.exists()


def test_impossible_paths_of_a_database_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot make the folder" in opening_error(tmp_path / "file" / "tuning.sqlite3")
    assert "it cannot be opened" in opening_error(tmp_path)
    assert "is not a database: use a path" in opening_error("nosuch://host/name")


def test_a_missing_driver_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingDependency, match=r"pip install 'kernelcat\[postgres\]'"):
        Store.open("postgresql+psycopg://me:secret@localhost/kernelcat")


def test_passwords_are_not_shown() -> None:
    assert "secret" not in str(locate("postgresql+psycopg://me:secret@localhost/kernelcat"))


def test_a_read_only_database_can_be_read(path: Path) -> None:
    with Store.open(path) as store:
        store.add([measurement()])
    with Store.open(f"sqlite:///file:{path}?mode=ro&uri=true") as store:
        assert store.rows() == [measurement()]
        with pytest.raises(StoreError, match="read-only: make it writable"):
            store.add(measurements(1))


def test_a_locked_database_is_waited_for_and_then_refused(store: Store, database: str) -> None:
    with store._writing():
        started = time.monotonic()
        with Store.open(database, timeout=0.2) as other:
            with pytest.raises(StoreError, match="another process keeps it locked"):
                other.add([measurement()])
            assert time.monotonic() - started >= 0.2
            assert other.rows() == []  # reading needs no lock


def test_the_default_path_comes_from_environment_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNELCAT_DB", str(tmp_path / "named.db"))
    assert locate().path == tmp_path / "named.db"
    monkeypatch.delenv("KERNELCAT_DB")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert locate().named is False


class write_lock:
    """A write transaction of another connection, which locks the database."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)

    def __enter__(self) -> None:
        self.connection.execute("BEGIN EXCLUSIVE")

    def __exit__(self, *_: object) -> None:
        self.connection.close()


# ---------------------------------------------------------------- the journal


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


# ---------------------------------------------------------------- migrations


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

"""The tuning database: rows, races, concurrent processes, damaged files."""

from __future__ import annotations

import random
import signal
import sqlite3
import sys
import time
from pathlib import Path

import pytest
import store_rows
from campaign import seeds
from sqlalchemy import text
from store_rows import (
    FAILED,
    ROW,
    measurement,
    measurements,
    opening_error,
    timed,
    writer,
)

from kernelcat.errors import MissingDependency, StoreError
from kernelcat.store import SCREEN, Store, locate, migrations

path, store = store_rows.path, store_rows.store


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

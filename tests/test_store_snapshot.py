"""The snapshot that calls read: the best known choices of each entry, and never an exception."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from kernelcat import paths
from kernelcat.catalog.implementation import Config
from kernelcat.store import Measurement, Store, snapshot
from kernelcat.store.lines import read_all, write_lines

ROW: dict[str, Any] = json.loads(Path(__file__).with_name("measurement.json").read_text())


def timed(us: float, **changes: Any) -> Measurement:
    times = {"median_us": us, "ci_us": [us * 0.999, us * 1.001]}
    return Measurement.from_json(ROW | times | changes)


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the user's default database, which does not exist yet."""
    monkeypatch.delenv("KERNELCAT_DB")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "kernelcat" / "tuning.sqlite3"


def write(path: Path, *rows: Measurement) -> None:
    path.write_text("".join(f"{row.line()}\n" for row in rows))


def test_choices_are_the_best_of_each_variant_in_order_of_time(
    shipped: Path, database: Path
) -> None:
    write(
        shipped,
        timed(20.0),
        timed(10.0, language="triton", variant="tma", config={"BLOCK_M": 64}),
        timed(11.0, language="triton", variant="tma", config={"BLOCK_M": 32}),
        timed(5.0, language="peer", variant="cublas", config={}),
        timed(1.0, protocol=ROW["protocol"] | {"regime": "eager"}),
        timed(2.0, entry="tma_copy"),
    )
    rows = snapshot()
    assert [(c.language, c.median_us) for c in rows.choices("gemm")] == [
        ("triton", 10.0),
        ("cuda", 20.0),
    ]
    best = rows.choices("gemm")[0]
    assert best.config == Config(BLOCK_M=64)
    assert best.problem == timed(1.0).to_problem()
    assert (best.gpu, best.kind, best.origin, best.source) == (
        "h200", "measured", "shipped", ROW["source"],
    )  # fmt: skip
    assert rows.choices("flashmla") == ()


@pytest.mark.parametrize("newer", ["local", "shipped"])
def test_newer_results_come_before_older_results(shipped: Path, database: Path, newer: str) -> None:
    times = {"local": "2026-11-20T00:00:00Z", "shipped": "2026-11-20T00:00:00Z"}
    times[newer] = "2026-11-21T00:00:00Z"
    write(shipped, timed(10.0, run="shipped", created_at=times["shipped"]))
    with Store.open() as store:
        store.add([timed(30.0, language="triton", run="local", created_at=times["local"])])
    assert database.exists()
    choices = snapshot().choices("gemm")
    assert [choice.origin for choice in choices] == sorted(times, key=lambda n: n != newer)


def test_local_results_are_added_to_shipped_results_of_other_problems(
    shipped: Path, database: Path
) -> None:
    write(shipped, timed(10.0))
    with Store.open() as store:
        store.add([timed(30.0, problem={"M": 1})])
    assert {choice.origin for choice in snapshot().choices("gemm")} == {"local", "shipped"}


def damage(path: Path) -> None:
    path.write_bytes(b"garbage" * 1000)


def renumber(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("UPDATE kernelcat_schema SET version = 99")
    connection.commit()


def remove(path: Path) -> None:
    path.unlink()


def spoil_row(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("UPDATE kernelcat_measurements SET config = 'import os'")
    connection.commit()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (damage, "is not a SQLite database"),
        (renumber, "a newer kernelcat wrote it"),
        (remove, "there is no tuning database"),
        (spoil_row, "holds a row that is not a measurement"),
    ],
)
def test_a_database_that_cannot_be_read_is_one_warning(
    shipped: Path, tmp_path: Path, harm: Any, message: str
) -> None:
    write(shipped, timed(10.0), timed(3.0, entry="tma_copy"))
    path = tmp_path / "mine.sqlite3"
    with Store.open(path) as store:
        store.add([timed(1.0)])
    harm(path)
    with pytest.warns(UserWarning, match=message) as caught:
        rows = snapshot(str(path))
        assert [choice.median_us for choice in rows.choices("gemm")] == [10.0]
        assert len(rows.choices("tma_copy")) == 1
    assert len(caught) == 1
    assert str(caught[0].message).endswith("Using shipped results only")


def test_a_locked_database_is_a_miss(shipped: Path, tmp_path: Path) -> None:
    write(shipped, timed(10.0))
    path = tmp_path / "mine.sqlite3"
    Store.open(path).close()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA locking_mode=EXCLUSIVE")
    connection.execute("BEGIN EXCLUSIVE")
    with pytest.warns(UserWarning, match="another process keeps it locked") as caught:
        assert len(snapshot(str(path)).choices("gemm")) == 1
    assert len(caught) == 1
    connection.close()


def test_a_bad_shipped_line_is_skipped_with_its_number(shipped: Path, database: Path) -> None:
    shipped.write_text(timed(10.0).line() + "\n" + timed(9.0).line().replace("9.0", "null") + "\n")
    with pytest.warns(UserWarning, match=r"nvidia-h200.jsonl:2 is skipped"):
        assert len(snapshot().choices("gemm")) == 1


def test_a_missing_default_database_causes_no_warning(shipped: Path, database: Path) -> None:
    write(shipped, timed(10.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(snapshot().choices("gemm")) == 1
    assert not database.parent.exists()


def test_shipped_results_need_no_sqlalchemy(tmp_path: Path) -> None:
    code = (
        "import sys; from kernelcat.store import snapshot; snapshot().choices('gemm'); "
        "sys.exit('sqlalchemy' in sys.modules)"
    )
    env = {"XDG_DATA_HOME": str(tmp_path), "PATH": ""}
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=env, cwd=Path(paths.__file__).parents[1]
    )


def test_every_shipped_file_has_the_form_that_an_export_writes() -> None:
    """The call path looks for ``"entry":"NAME"`` in the text before it parses a line."""
    for path in sorted(paths.data("tuning_db").glob("*.jsonl")):
        assert write_lines(read_all(path)) == path.read_text(), path

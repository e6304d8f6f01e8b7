"""`kernelcat db query` answers what a database holds, and can change nothing."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner
from real_rows import SHIPPED

from kernelcat import catalog
from kernelcat.cli import main
from kernelcat.store import Store

SELECT = "SELECT entry, gpu, median_us, problem_name AS name FROM kernelcat_measurements ORDER BY 3"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "d.sqlite3"
    with Store.open(path) as store:
        store.add([row for row in SHIPPED if row.problem_name][:2])
    return path


def ask(database: Path, *words: str):
    return CliRunner().invoke(main, ["db", "query", *words, "--db", str(database)])


def test_a_query_is_answered_as_table_csv_and_json(database: Path) -> None:
    with sqlite3.connect(database) as connection:
        expected = connection.execute(SELECT).fetchall()
    assert len(expected) == 2
    records = json.loads(ask(database, SELECT, "--json").stdout)
    assert [tuple(record.values()) for record in records] == expected
    header, *rows = csv.reader(io.StringIO(ask(database, SELECT, "--csv").stdout))
    assert header == ["entry", "gpu", "median_us", "name"]
    assert [(a, b, float(c), d) for a, b, c, d in rows] == expected
    table = ask(database, SELECT).stdout
    assert all(str(value) in table for row in expected for value in row) and "2 rows" in table


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM kernelcat_measurements",
        "UPDATE kernelcat_measurements SET median_us = 1",
        "DROP TABLE kernelcat_measurements",
        "CREATE TABLE mine (a)",
        "PRAGMA user_version = 7",
        "ATTACH '{other}' AS other",
        "VACUUM INTO '{other}'",
        "WITH a AS (SELECT 1) INSERT INTO kernelcat_schema SELECT * FROM a",
    ],
)
def test_a_statement_that_is_no_select_is_refused(database: Path, sql: str, tmp_path: Path) -> None:
    other, before = tmp_path / "other.sqlite3", database.read_bytes()
    done = ask(database, sql.format(other=other))
    assert done.exit_code == 1 and "only SELECT is allowed" in done.stderr
    assert database.read_bytes() == before and not other.exists()


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELEC 1", 'near "SELEC": syntax error'),
        ("SELECT speed FROM kernelcat_measurements", "no such column: speed"),
        ("SELECT 1; SELECT 2", "one statement at a time"),
        ("", "the query is empty"),
        ("SELECT 1 AS a, 2 AS a", "two columns have one name"),
    ],
)
def test_a_wrong_query_is_one_line(database: Path, sql: str, message: str) -> None:
    done = ask(database, sql)
    assert done.exit_code == 1 and message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_what_is_no_database_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database" * 100)
    assert "is not a SQLite database" in ask(tmp_path / "text", "SELECT 1").stderr
    assert "there is no database" in ask(tmp_path / "none", "SELECT 1").stderr
    assert not (tmp_path / "none").exists()


def test_the_leaderboard_as_csv_has_the_fields_of_json() -> None:
    words = ["leaderboard", "gemm", "--gpu", "h200"]
    rows = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)["rows"]
    read = list(csv.DictReader(io.StringIO(CliRunner().invoke(main, [*words, "--csv"]).stdout)))
    assert len(read) == len(rows) > 3
    for line, row in zip(read, rows, strict=True):
        low, high = row.pop("ci_us")
        assert (float(line.pop("ci_low_us")), float(line.pop("ci_high_us"))) == (low, high)
        assert line.keys() == row.keys()
        for name, value in row.items():
            if isinstance(value, dict | list):
                assert json.loads(line[name]) == value
            else:
                assert line[name] == ("" if value is None else str(value))


def test_the_leaderboard_as_markdown_has_a_line_for_each_problem() -> None:
    words = ["leaderboard", "gemm", "--gpu", "h200"]
    rows = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)["rows"]
    done = CliRunner().invoke(main, [*words, "--markdown"])
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    for row in rows:
        name = row["problem_name"] or str(catalog.entry("gemm").problem(**row["problem"]))
        assert any(name in line for line in lines)
    assert CliRunner().invoke(main, [*words, "--markdown", "--csv"]).exit_code == 2

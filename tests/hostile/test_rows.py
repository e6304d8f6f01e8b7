"""Rows that are forged, refuted or out of date: what an import refuses and a call passes over."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from real_rows import LOCAL, SHIPPED, Machine, hours_later, raced
from sqlalchemy import text

import kernelcat
from kernelcat import catalog
from kernelcat.catalog.digest import digest_of
from kernelcat.cli import main
from kernelcat.errors import CompileError, InvalidArgument
from kernelcat.report.board import board, load
from kernelcat.runtime import gpu
from kernelcat.store import Measurement, Store, calibration, import_, merge
from kernelcat.store.origin import brought
from kernelcat.store.plausibility import doubt

NAME = "4096x4096x4096"
PROBLEM = catalog.entry("gemm").named(NAME)
HONEST = raced("gemm", NAME)
WINNER = next(row for row in HONEST if row.winner)
WGMMA = next(row for row in HONEST if (row.language, row.variant) == ("cuda", "wgmma"))
NOT_TIMED = {"median_us": None, "ci_us": None, "quantiles_us": None, "samples": 0, "winner": False}
FAILED = {**NOT_TIMED, "status": "wrong"}
PIN = {"language": "cuda", "variant": "wgmma"}


def changed(row: Measurement = WGMMA, **changes: Any) -> Measurement:
    return dataclasses.replace(row, **{**LOCAL, **changes})


def timed(us: float, **changes: Any) -> Measurement:
    return changed(median_us=us, ci_us=(us, us), quantiles_us=None, winner=True, **changes)


def todays() -> str:
    return digest_of("gemm", WGMMA.language, WGMMA.variant)


def add(*rows: Measurement) -> None:
    with Store.open() as store:
        store.add(rows)
    kernelcat.reload()


def decide(**pin: Any) -> Any:
    """What serves the problem, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decision = kernelcat.get("gemm", **pin).plan(**PROBLEM.values).decision
    return decision, [str(warning.message) for warning in caught]


# ---------------------------------------------------------------- configurations


ALTERATIONS = (-1, 0, 3, 1 << 40, 1.0, True, False, None, "", "1", "); asm(", [1], {"a": 1})


def test_no_altered_configuration_is_of_a_space() -> None:
    """Every parameter of every implementation, with values that are not in its space."""
    tried = 0
    for name in catalog.names():
        for implementation in catalog.implementations(name):
            config = dict(next(implementation.whole_space()))
            assert implementation.why_not_in_space(config) is None
            assert implementation.why_not_in_space({**config, "more": 1}) is not None
            for parameter, values in implementation.space.items():
                known = {(type(value), repr(value)) for value in values}
                for value in (*ALTERATIONS, *map(str, values), *map(repr, values)):
                    if (type(value), repr(value)) not in known:
                        altered = {**config, parameter: value}
                        assert implementation.why_not_in_space(altered), (implementation, altered)
                        tried += 1
                missing = {k: v for k, v in config.items() if k != parameter}
                assert implementation.why_not_in_space(missing) is not None
    assert tried > 2000


@pytest.mark.parametrize("value", [-1, "1", True, 1.0, None, 5])
def test_a_pinned_value_comes_from_the_space(value: Any) -> None:
    config = {**WGMMA.config, "split_k": value}
    with pytest.raises(InvalidArgument, match=r"split_k=.* must be one of: 1, 2") as caught:
        kernelcat.get("gemm", **PIN, config=config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [-1, "1", True, 1.0, 5, "a + b; asm("])
def test_a_row_with_a_value_that_is_not_of_the_space_serves_nothing(
    machine: Machine, value: Any
) -> None:
    add(timed(150.0, config={**WGMMA.config, "split_k": value}))
    decision, said = decide()
    assert decision.evidence.origin == "shipped"
    assert len(said) == 1
    assert "is passed over: split_k=" in said[0] and "must be one of: 1, 2" in said[0]
    assert decide()[1] == [], "one warning is enough"


@pytest.mark.parametrize("value", ["4096", 4096.0, True, -1])
def test_a_row_with_a_malformed_problem_breaks_no_call(machine: Machine, value: Any) -> None:
    add(timed(150.0, problem={**PROBLEM.values, "M": value}))
    assert decide()[0].evidence.origin == "shipped"
    other = kernelcat.get("gemm").plan(**{**PROBLEM.values, "M": 4090})
    assert other.decision.evidence.origin == "shipped"


# ---------------------------------------------------------------- verdicts of the gate


def wrong(**changes: Any) -> Measurement:
    return changed(**{**FAILED, "detail": "too far from the oracle", **changes})


def test_a_configuration_found_wrong_does_not_win_by_a_time_of_an_older_source(
    machine: Machine,
) -> None:
    add(timed(150.0, source="older"), wrong(source=todays()))
    decision, said = decide()
    assert (decision.implementation.name, decision.config.key) != (
        f"gemm/{WGMMA.language}/{WGMMA.variant}", WGMMA.config_key,
    )  # fmt: skip
    found = f"found wrong on h200, {LOCAL['created_at'][:10]}: too far from the"
    assert len(said) == 1 and found in said[0]


def test_a_shipped_winner_that_was_found_wrong_here_does_not_serve(machine: Machine) -> None:
    before = decide()[0]
    assert (before.evidence.origin, before.config.key) == ("shipped", WINNER.config_key)
    add(wrong(row=WINNER))
    after, said = decide()
    assert after.config.key != WINNER.config_key or after.implementation != before.implementation
    assert "found wrong" in said[0]
    assert "found wrong" in str(kernelcat.get("gemm").explain(**PROBLEM.values, gpu="h200"))


@pytest.fixture
def no_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Without calibrated models a problem that nobody measured gets a default."""
    with monkeypatch.context() as patched:
        patched.setattr(calibration, "path", lambda sku: tmp_path / "none.json")
        calibration.models.cache_clear()
        yield
    calibration.models.cache_clear()


@pytest.mark.usefixtures("no_models")
def test_a_default_that_was_found_wrong_does_not_serve(machine: Machine) -> None:
    target, problem = gpu.SKUS["h200"], catalog.entry("gemm").problem(
        M=77, N=64, K=64, dtype="float16", bias=False
    )  # fmt: skip
    first = kernelcat.get("gemm").plan(**problem.values).decision
    assert first.why == "default"
    chosen = first.implementation
    digest = digest_of(chosen.entry, chosen.language, chosen.variant)
    add(wrong(language=chosen.language, variant=chosen.variant, config=dict(first.config),
              problem=problem.values, problem_name=None, source=digest))  # fmt: skip
    with pytest.warns(UserWarning, match="found wrong"):
        second = kernelcat.get("gemm").plan(**problem.values).decision
    assert (second.implementation, second.config) != (chosen, first.config)
    assert chosen.default(problem, target) == first.config


def test_a_verdict_about_an_older_source_does_not_count_against_todays(machine: Machine) -> None:
    add(timed(150.0, source=todays()), wrong(source="older"))
    decision, said = decide()
    assert (decision.evidence.run, said) == ("local", [])


def test_a_pinned_configuration_that_was_found_wrong_serves_with_a_warning(
    machine: Machine,
) -> None:
    add(wrong(source=todays()))
    decision, said = decide(**PIN, config=WGMMA.config)
    assert decision.why == "forced" and len(said) == 1 and "was found wrong" in said[0]


# ---------------------------------------------------------------- rows that cannot be built


@pytest.mark.parametrize("error", [CompileError("line 3: error"), ValueError("grid of 0")])
def test_a_row_whose_program_cannot_be_built_is_passed_over(
    machine: Machine, error: Exception
) -> None:
    add(timed(150.0, config=dict(WGMMA.config)))
    machine.broken = lambda name, config: error if config.key == WGMMA.config_key else None
    decision, said = decide()
    assert decision.config.key != WGMMA.config_key
    assert len(said) == 1 and f"{type(error).__name__}: {error}" in said[0]
    with pytest.raises(type(error)):
        decide(**PIN, config=WGMMA.config)


def test_where_nothing_can_be_built_the_first_error_is_raised(machine: Machine) -> None:
    errors = []

    def broken(name: str, config: Any) -> Exception:
        errors.append(CompileError(f"{name} does not compile", log="line 3"))
        return errors[-1]

    machine.broken = broken
    with pytest.raises(CompileError) as caught:
        decide()
    assert caught.value is errors[0] and len(errors) > 3


def test_a_fault_of_a_default_is_not_hidden(machine: Machine) -> None:
    problem = catalog.entry("gemm").problem(M=77, N=64, K=64, dtype="float16", bias=False)
    machine.broken = lambda name, config: ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        kernelcat.get("gemm").plan(**problem.values)


# ---------------------------------------------------------------- rows that cannot be true


FORGERIES = {
    "below the roofline": timed(0.001),
    "just below the roofline": timed(138.9),
    "of the future": timed(150.0, created_at="2099-01-01T00:00:00Z"),
    "of the year 9999": timed(150.0, created_at="9999-12-31T00:00:00Z"),
    "above the tolerance": timed(150.0, max_error=1e6),
    "of another SKU": timed(150.0, environment={**WGMMA.environment, "sku": "b200"}),
    "of another GPU": timed(150.0, environment={**WGMMA.environment, "name": "NVIDIA B200"}),
    "out of the space": timed(150.0, config={**WGMMA.config, "split_k": -1}),
    "of no problem": timed(150.0, problem={**PROBLEM.values, "M": "4096"}),
}
each_forgery = pytest.mark.parametrize("name", FORGERIES)


@each_forgery
def test_an_import_refuses_what_cannot_be_true(tmp_path: Path, name: str) -> None:
    path = tmp_path / "theirs.jsonl"
    path.write_text(f"{timed(150.0).line()}\n{FORGERIES[name].line()}\n")
    with Store.open() as store:
        report = import_(store, path)
        assert (report.added, [line for line, _ in report.refused]) == (0, [2])
        assert "\n" not in report.refused[0][1]
        assert import_(store, path, partial=True).added == 1
        assert store.rows() == [timed(150.0)]


@each_forgery
def test_a_merge_refuses_what_cannot_be_true(tmp_path: Path, name: str) -> None:
    with Store.open(tmp_path / "theirs.sqlite3") as theirs:
        theirs.add([timed(150.0), FORGERIES[name]])
    with Store.open() as store:
        report = merge(store, tmp_path / "theirs.sqlite3")
        assert (report.added, len(report.refused)) == (1, 1)
        assert store.rows() == [timed(150.0)]


@each_forgery
def test_what_cannot_be_true_is_never_chosen_and_hides_no_older_race(
    machine: Machine, name: str
) -> None:
    older = timed(160.0, run="older", created_at=hours_later(2))
    forged = dataclasses.replace(FORGERIES[name], run="forged")
    if forged.created_at < "2027":
        forged = dataclasses.replace(forged, created_at=hours_later(4))
    add(older, forged)
    decision, said = decide()
    assert decision.evidence.run == "older"
    assert len(said) == (name != "of no problem")


@each_forgery
def test_the_board_marks_what_cannot_be_true(name: str) -> None:
    honest = timed(160.0, run="older", created_at="2026-11-21T00:00:00Z")
    add(honest, dataclasses.replace(FORGERIES[name], run="forged"))
    rows = board(load(entry="gemm"), "h200", "gemm", problem=NAME, doubt=doubt)
    assert [(row.median_us > 138, row.tflops < 1000) for row in rows] == [(True, True)]
    if name != "of no problem":
        assert [reason.partition(":")[0] for reason in rows[0].doubtful] == ["cuda/wgmma"]
    shown = CliRunner().invoke(main, ["leaderboard", "gemm", "--gpu", "h200"]).output
    assert "1 results cannot be true and are left out: kernelcat db verify" in shown
    assert "‡" in shown or name == "of no problem"
    assert "137,4" not in shown


def test_a_row_that_was_changed_after_it_was_stored_is_not_chosen(machine: Machine) -> None:
    add(timed(150.0))
    assert decide()[0].evidence.run == "local"
    with Store.open() as store, store.engine.begin() as connection:
        connection.execute(
            text("UPDATE kernelcat_measurements SET median_us = 149, ci_low_us = 149")
        )
    kernelcat.reload()
    decision, said = decide()
    assert decision.evidence.origin == "shipped"
    assert "changed after it was stored" in said[0]


def test_a_prediction_far_below_the_roofline_is_refused() -> None:
    guess = {**NOT_TIMED, "kind": "predicted"}
    assert doubt(changed(**{**guess, "median_us": 100.0})) is None
    assert "below the roofline" in str(doubt(changed(**{**guess, "median_us": 60.0})))


def test_the_shipped_results_pass() -> None:
    rows = SHIPPED
    assert len(rows) > 3000
    assert [reason for row in rows if (reason := doubt(row))] == []
    assert [reason for row in rows if (reason := doubt(brought(row, "import.jsonl")))] == []


def test_a_huge_problem_is_refused_before_its_work_is_counted() -> None:
    entry = catalog.entry("paged_attn")
    row = next(row for row in SHIPPED if row.entry == "paged_attn" and not row.is_peer)
    huge = {**row.problem, "lengths": "ragged", "batch": 1 << 20, "tokens": 1 << 30}
    assert entry.name in str(doubt(changed(row, problem=huge, problem_name=None)))


# ---------------------------------------------------------------- sources


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["db", *arguments])


def test_sources_are_listed_and_dropped(tmp_path: Path) -> None:
    path = tmp_path / "theirs.jsonl"
    path.write_text(f"{timed(150.0, run='theirs').line()}\n")
    add(timed(160.0))
    with Store.open() as store:
        import_(store, path)
    listed = json.loads(run("sources", "--json").output)
    found = {source["name"]: source["rows"] for source in listed}
    assert found == {"local": 1, "shipped": len(SHIPPED), str(path): 1}
    day = LOCAL["created_at"][:10]
    assert f"{path}: 1 rows, {day} to {day}" in run("sources").output
    assert run("drop", str(path)).output == f"1 rows of {path} deleted\n"
    with Store.open() as store:
        assert [row.median_us for row in store.rows()] == [160.0]
    again = run("drop", str(path))
    assert again.exit_code == 1 and "kernelcat db sources lists the sources" in again.output
    assert "files of the package" in run("drop", "shipped").output


def test_without_a_database_only_shipped_results_are_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KERNELCAT_DB")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert [source["name"] for source in json.loads(run("sources", "--json").output)] == ["shipped"]
    assert run("verify").exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_verify_lists_what_cannot_be_true_and_doubtful_verdicts() -> None:
    crash = {**FAILED, "status": "crashed", "detail": "killed by signal 9"}
    add(timed(160.0), changed(**crash), changed(**{**FAILED, "status": "timeout"}),
        wrong(), timed(0.001, run="forged"))  # fmt: skip
    shown = run("verify")
    lines = shown.output.splitlines()
    assert "0.001 us is below the roofline of h200" in lines[0]
    assert lines[1].endswith("crashed: killed by signal 9") and "timeout" in lines[2]
    assert lines[3] == "1 results cannot be true; 2 crashes and timeouts"
    assert shown.exit_code == 1
    findings = json.loads(run("verify", "--json").output.partition("\nError")[0])
    assert [finding["is_verdict"] for finding in findings] == [False, True, True]
    run("drop", "local")
    assert run("verify").exit_code == 0


def test_verify_lists_rows_that_are_no_measurements() -> None:
    add(timed(160.0))
    with Store.open() as store, store.engine.begin() as connection:
        connection.execute(text("UPDATE kernelcat_measurements SET config = 'import os'"))
    shown = run("verify")
    assert shown.exit_code == 1 and shown.output.startswith("local: row 1: not JSON")


def test_rows_of_an_older_database_are_of_an_unknown_source(tmp_path: Path) -> None:
    script = Path(__file__).parents[1].joinpath("database-1.sql").read_text()
    with sqlite3.connect(tmp_path / "old.sqlite3") as old:
        old.executescript(script)
    with Store.open(tmp_path / "old.sqlite3") as store:
        (row,) = store.rows()
        assert (row.origin, row.is_altered) == ("unknown", False)
        store.add([timed(1.0)])
        assert {row.origin for row in store.rows()} == {"unknown", "local"}

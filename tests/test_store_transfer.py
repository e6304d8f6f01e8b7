"""Export, import and merge: no row is lost or doubled, and every line is validated."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcat.errors import StoreError
from kernelcat.store import Measurement, Store, export, import_, merge
from kernelcat.store.lines import read_all
from kernelcat.store.origin import brought

ROW: dict[str, Any] = json.loads(Path(__file__).with_name("measurement.json").read_text())
ROW["problem"] = {"K": 4096}  # axes of another specification: the catalog cannot check such rows
FAILED = {"status": "wrong", "median_us": None, "ci_us": None, "samples": 0}
LATER = {"run": "later", "created_at": "2026-11-22T00:00:00Z"}


def measurement(**changes: Any) -> Measurement:
    return Measurement.from_json(ROW | changes)


def timed(us: float, **changes: Any) -> Measurement:
    return measurement(median_us=us, ci_us=[us * 0.999, us * 1.001], **changes)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "ours.sqlite3") as opened:
        yield opened


words = st.from_regex(r"[a-z0-9_][A-Za-z0-9_.+-]{0,20}", fullmatch=True)
values = st.one_of(st.booleans(), st.integers(-(1 << 62), 1 << 62), words)
mappings = st.dictionaries(words, values, max_size=5)
seconds = st.floats(0, 1e6, allow_nan=False)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)  # fmt: skip


@st.composite
def rows(draw: st.DrawFn) -> Measurement:
    """Any valid measurement."""
    status = draw(st.sampled_from(["passed", "wrong", "compile_error", "timeout"]))
    kind = draw(st.sampled_from(["measured", "predicted"]))
    low, median, high = sorted(draw(st.tuples(*[st.floats(1e-3, 1e9)] * 3)))
    passed, timed = status == "passed", status == "passed" and kind == "measured"
    return Measurement(
        entry=draw(words), language=draw(words), variant=draw(words), problem=draw(mappings),
        problem_name=draw(st.none() | words), config=draw(mappings), source=draw(words),
        gpu=draw(words), environment=draw(st.dictionaries(st.text(max_size=9), plain, max_size=3)),
        protocol={"regime": draw(st.sampled_from(["graph", "eager"])), "l2": draw(words),
                  "state": draw(words)},
        run=draw(words), kind=kind, status=status, median_us=median if passed else None,
        ci_us=(low, high) if timed else None,
        samples=draw(st.integers(1, 10**9)) if timed else 0,
        sm_clock_mhz=draw(st.none() | st.floats(0, 1e5)), power_w=draw(st.none() | st.just(-0.0)),
        temperature_c=draw(st.none() | st.floats(-100, 1000)), max_error=draw(st.none() | seconds),
        created_at=f"{draw(st.datetimes(max_value=datetime(2026, 11, 20))).isoformat()}Z",
        sqnr_db=draw(st.none() | st.floats(-100, 100)),
        detail=draw(st.none() | st.text(max_size=40)),
        quantiles_us=(low, median, high) if timed and draw(st.booleans()) else None,
    )  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(rows())
def test_a_row_survives_the_conversion_to_a_line_and_back(row: Measurement) -> None:
    parsed = Measurement.from_line(row.line())
    assert parsed == row
    assert parsed.line() == row.line()


@settings(max_examples=10, deadline=None)
@given(st.lists(rows(), max_size=8))
def test_export_then_import_is_the_identity(
    tmp_path_factory: pytest.TempPathFactory, originals: list[Measurement]
) -> None:
    folder = tmp_path_factory.mktemp("trip")
    with Store.open(folder / "a.sqlite3") as ours, Store.open(folder / "b.sqlite3") as theirs:
        ours.add(originals)
        count = export(ours, folder / "a.jsonl", shipped=False)
        report = import_(theirs, folder / "a.jsonl")
        assert (report.added, report.known, report.refused) == (count, 0, ())
        by_digest = {row.digest: row for row in originals}
        assert {row.digest: row for row in theirs.rows()} == by_digest
        export(theirs, folder / "b.jsonl", shipped=False)
        assert (folder / "a.jsonl").read_bytes() == (folder / "b.jsonl").read_bytes()
        assert import_(theirs, folder / "a.jsonl").known == count


def race() -> list[Measurement]:
    """One problem: two configurations of a winner, two runs of a rival, a peer and a failure."""
    return [timed(180.0), timed(190.0, config={"BLOCK_M": 64}),
            timed(200.0, language="triton", variant="tma"), timed(170.0, language="triton",
            variant="tma", run="earlier", created_at="2026-11-01T00:00:00Z"),
            timed(185.0, language="peer", variant="cublas", config={}, source=""),
            measurement(**FAILED, config={"BLOCK_M": 32})]  # fmt: skip


def test_shipped_rows_are_the_newest_winners_with_rivals_and_peers(
    store: Store, tmp_path: Path
) -> None:
    store.add(race())
    assert export(store, tmp_path / "h200.jsonl") == 3
    exported = read_all(tmp_path / "h200.jsonl")
    assert [(row.language, row.median_us) for row in exported] == [
        ("cuda", 180.0), ("triton", 200.0), ("peer", 185.0),
    ]  # fmt: skip
    records = [json.loads(line) for line in (tmp_path / "h200.jsonl").read_text().splitlines()]
    environment, shared, *rows = records
    assert environment["environment"] == exported[0].environment
    assert shared["race"]["environment"] == environment["id"]
    assert shared["race"]["problem"] == exported[0].problem
    assert [row["race"] for row in rows] == [shared["id"]] * 3


def test_environments_and_races_are_written_once(store: Store, tmp_path: Path) -> None:
    """A line that refers to an environment or race that is missing before the line is refused."""
    rows = [timed(5.0 + m, problem={"M": m}, environment={"sms": m % 3}) for m in range(9)]
    store.add(rows)
    path = tmp_path / "h200.jsonl"
    export(store, path)
    assert {row.line() for row in read_all(path)} == {row.line() for row in rows}
    lines = path.read_text().splitlines(keepends=True)
    assert sum(line.startswith('{"environment":{') for line in lines) == 3
    assert sum(line.startswith('{"id":') for line in lines) == 9
    path.write_text("".join(lines[3:]))
    with pytest.raises(StoreError, match=r"no environment '[0-9a-f]{8}' stands before this line"):
        read_all(path)
    path.write_text("".join(line for line in lines if not line.startswith('{"id":')))
    with pytest.raises(StoreError, match=r"no race '[0-9a-f]{8}' stands before this line"):
        read_all(path)
    path.write_text('{"id":"a","race":5}\n')
    with pytest.raises(StoreError, match="a race must be a JSON object"):
        read_all(path)


def test_an_export_does_not_depend_on_the_order_of_insertion(store: Store, tmp_path: Path) -> None:
    rows = [row for m in range(9) for row in (timed(5.0 + m, problem={"M": m}),
            timed(6.0 + m, problem={"M": m}, language="cute"))]  # fmt: skip
    random.Random(0).shuffle(rows)
    store.add(rows)
    export(store, tmp_path / "a.jsonl")
    with Store.open(tmp_path / "other.sqlite3") as other:
        other.add(sorted(rows, key=lambda row: row.digest))
        export(other, tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_an_export_never_reads_its_target(store: Store, tmp_path: Path) -> None:
    store.add(race())
    path = tmp_path / "h200.jsonl"
    path.write_text(f"{timed(50.0, problem={'M': 1}).line()}\n")
    num_rows = export(store, path, gpu="h200")
    assert len(read_all(path)) == num_rows
    path.write_text("no results\n")
    assert export(store, path, gpu="h200") == num_rows


def test_an_export_onto_a_file_keeps_its_rows_that_the_database_lacks(
    store: Store, tmp_path: Path
) -> None:
    path, file_only = tmp_path / "h200.jsonl", timed(50.0, problem={"M": 1})
    path.write_text(f"{file_only.line()}\n{timed(99.0, **LATER).line()}\n")
    store.add(race())
    assert export(store, path, gpu="h200", onto=path) == 2
    assert read_all(path) == [timed(99.0, **LATER), file_only]
    assert export(store, path, gpu="h200", onto=path) == 2


def test_an_export_keeps_the_winners_of_earlier_races_in_the_history(
    store: Store, tmp_path: Path
) -> None:
    path, kept = tmp_path / "h200.jsonl", tmp_path / "history" / "h200.jsonl"
    peers = [timed(us, variant=name, language="peer", config={}) for us, name in
             ((270.0, "slow"), (260.0, "fast"))]  # fmt: skip
    screen = ROW["protocol"] | {"state": "screen"}
    store.add([timed(250.0), timed(255.0, variant="second"), *peers, timed(209.0, protocol=screen)])
    export(store, path, onto=None, history=kept)
    assert read_all(kept) == []
    store.add([timed(245.0, **LATER)])
    export(store, path, onto=path, history=kept)
    assert read_all(kept) == [timed(250.0), peers[1]]
    export(store, path, onto=path, history=kept)
    assert read_all(kept) == [timed(250.0), peers[1]]


def test_a_case_that_was_found_wrong_is_no_winner_of_the_past(store: Store) -> None:
    store.add([timed(250.0, variant="liar"), timed(255.0)])
    assert [row.variant for row in store.best_rows()] == ["liar"]
    store.add([measurement(**FAILED | {"status": "wrong"}, variant="liar", **LATER)])
    assert [row.variant for row in store.best_rows()] == [timed(255.0).variant]


def test_a_prediction_is_shipped_only_where_nothing_was_measured(
    store: Store, tmp_path: Path
) -> None:
    guess = {"kind": "predicted", "ci_us": None, "samples": 0, "median_us": 9.0}
    store.add([timed(10.0), measurement(**guess, **LATER), measurement(**guess, gpu="b200")])
    export(store, tmp_path / "all.jsonl")
    assert {(row.gpu, row.kind) for row in read_all(tmp_path / "all.jsonl")} == {
        ("h200", "measured"), ("b200", "predicted"),
    }  # fmt: skip


def test_a_failed_export_changes_nothing(store: Store, tmp_path: Path) -> None:
    store.add(race())
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot write .* free some space or export to another"):
        export(store, tmp_path / "file" / "h200.jsonl")
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    with pytest.raises(StoreError, match=r"bad.jsonl:1: the key .* is missing; mend or remove"):
        export(store, tmp_path / "out.jsonl", onto=bad)
    assert not (tmp_path / "out.jsonl").exists()
    assert bad.read_text() == "{}\n"


def test_a_bad_line_refuses_the_whole_file(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "theirs.jsonl"
    nonsense = json.dumps(ROW | {"median_us": "__import__('os')"})
    path.write_text(f"{measurement().line()}\n\n{nonsense}\nnot json\n")
    report = import_(store, path)
    assert (report.added, report.known) == (0, 0)
    assert [line for line, _ in report.refused] == [3, 4]
    assert report.refused[0][1].startswith("median_us=")
    assert store.rows() == []
    report = import_(store, path, partial=True)
    assert (report.added, len(report.refused)) == (1, 2)


def test_an_unreadable_file_is_a_one_line_error(store: Store, tmp_path: Path) -> None:
    for action in (import_, merge):
        with pytest.raises(StoreError, match=r"^cannot read .* directory"):
            action(store, tmp_path / "missing.jsonl")


def test_an_import_of_a_database_names_the_verb_that_takes_it(store: Store, tmp_path: Path) -> None:
    Store.open(tmp_path / "other.sqlite3").close()
    with pytest.raises(StoreError, match=r"is a database: kernelcat db merge .*other\.sqlite3"):
        import_(store, tmp_path / "other.sqlite3")


@pytest.mark.parametrize("form", ["database", "lines"])
def test_a_merge_reports_conflicts_between_winners_and_the_one_kept(
    store: Store, tmp_path: Path, form: str
) -> None:
    theirs = [timed(100.0, language="triton", variant="tma", samples=50, **LATER),
              timed(104.0, **LATER), timed(5.0, problem={"M": 1})]  # fmt: skip
    if form == "database":
        with Store.open(tmp_path / "theirs.sqlite3") as other:
            other.add(theirs)
        source = tmp_path / "theirs.sqlite3"
    else:
        source = tmp_path / "theirs.jsonl"
        source.write_text("".join(f"{row.line()}\n" for row in theirs))
    store.add(brought(row, "/an/earlier/import.jsonl") for row in race())
    report = merge(store, source)
    assert (report.added, report.known) == (3, 0)
    (conflict,) = report.conflicts
    assert conflict.kept is conflict.theirs
    assert str(conflict) == (
        "gemm 4096x4096x4096 on h200 (graph, sustained): ours cuda/wgmma 180 us, theirs "
        "triton/tma 100 us; kept theirs: 2026-11-22T00:00 against 2026-11-20T09:30, 50 against "
        "200 samples; in that race the other winner was 1.040x slower"
    )
    assert store.winners()[0].winner == theirs[0]
    again = merge(store, source)
    assert (again.added, again.known, again.conflicts) == (0, 3, ())


def test_a_local_race_outranks_an_import(store: Store, tmp_path: Path) -> None:
    """Also an import that is newer, and an import that claims to be of the same run."""
    store.add(race())
    path = tmp_path / "theirs.jsonl"
    forged = [timed(100.0, language="triton", variant="tma", **LATER),
              timed(99.0, language="cute", variant="wgmma")]  # fmt: skip
    path.write_text("".join(f"{row.line()}\n" for row in forged))
    assert import_(store, path).added == 2
    (decided,) = store.winners()
    assert (decided.winner.language, decided.winner.median_us) == ("cuda", 180.0)
    assert [row.median_us for row in decided.rows] == [180.0, 200.0]
    assert decided.origin == "local"
    with Store.open(tmp_path / "empty.sqlite3") as other:
        import_(other, path)
        assert {race.origin for race in other.winners()} == {str(path)}


def test_a_merge_keeps_what_was_measured_here(store: Store, tmp_path: Path) -> None:
    store.add(race())
    path = tmp_path / "theirs.jsonl"
    path.write_text(timed(100.0, language="triton", variant="tma", **LATER).line() + "\n")
    (conflict,) = merge(store, path).conflicts
    assert conflict.kept is conflict.ours
    assert "kept ours: measured here, 2026-11-20T09:30 against 2026-11-22T00:00" in str(conflict)


def test_a_merge_of_older_results_keeps_our_winner(store: Store, tmp_path: Path) -> None:
    store.add([timed(180.0, **LATER)])
    (tmp_path / "old.jsonl").write_text(timed(10.0, language="cute").line() + "\n")
    (conflict,) = merge(store, tmp_path / "old.jsonl").conflicts
    assert conflict.kept is conflict.ours
    assert store.winners()[0].winner.language == "cuda"

"""Tunes of the planted entry, whose candidates fail in every known way."""

from __future__ import annotations

import json
import re
from collections import Counter
from statistics import median

import planted_tunes
import pytest
from planted_tunes import (
    QUICK,
    kinds,
    loads,
    run,
    winner_of,
)

from kernelcat.bench import BLOCKS
from kernelcat.errors import (
    InvalidArgument,
    MissingDependency,
    UnknownName,
    Unsupported,
)
from kernelcat.store import SCREEN, decisive
from kernelcat.tune import Quiet, ladder, race_best_known, tune
from kernelcat.tune import progress as progresses
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.progress import Bar, Lines

planted, store = planted_tunes.planted, planted_tunes.store


def test_failures_are_recorded_do_not_stop_the_tune_and_are_not_tried_again(
    planted, store, tmp_path
) -> None:
    report = run(store, processes=2)
    rows = {row.config["kind"]: row for row in report.rows if row.variant == "bad"}
    assert {kind: row.status for kind, row in rows.items()} == planted.STATUS
    assert all(row.detail and row.median_us is None for row in rows.values())
    assert "wrote outside of dst" in rows["overruns"].detail
    assert "SIGSEGV" in rows["segfaults"].detail
    assert "after the timed runs" in rows["tires"].detail
    assert "after the timed runs: copy " in rows["neglects"].detail
    assert "of signal to quantization noise, less than 50.0" in rows["slurs"].detail
    assert 8e-3 < rows["slurs"].max_error < 1e-2
    passed = [row for row in report.rows if row.status == "passed"]
    assert passed and all(round(row.sqnr_db) == 60 and row.max_error == 0 for row in passed)
    problem = report.problems[0]
    assert winner_of(report).candidate == Candidate("cuda", "honest", {"kind": "fast"})
    assert set(problem.skipped_peers) == {"absent", "unable", "broken"}
    for peer, why in problem.skipped_peers.items():
        assert f"peer {peer} was left out of {problem.name}: {why}" in report.lines()
    assert winner_of(report).peer == "host"
    assert winner_of(report).vs_peer[1] > 1.5
    assert report.restarts == 4  # two for "hangs", two for "segfaults"
    [race] = store.winners(gpu="planted", entry="planted", regime="eager")
    assert race.winner.config == {"kind": "fast"}
    assert [peer.variant for peer in race.peers] == ["host"]
    assert race.winner.samples == BLOCKS and race.winner.protocol["l2"] == "cold"
    for row in race.measurements:
        assert row.quantiles_us and len(row.quantiles_us) == BLOCKS
        assert row.median_us == median(row.quantiles_us)
    assert {row.digest for row in store.rows()} == {row.digest for row in report.rows}

    (tmp_path / "loads").unlink()
    again = run(store)
    assert again.problems[0].known == 14 and not again.problems[0].tried
    assert not set(loads(tmp_path)) & set(planted.STATUS)
    assert again.restarts == 0
    assert winner_of(again).candidate == winner_of(report).candidate
    assert not kinds(again.rows) & kinds(again.rows, "wrong")


def test_an_incumbent_races_even_in_a_tune_of_other_variants(store) -> None:
    first = winner_of(run(store, variants=["honest"], peers=False)).candidate
    again = run(store, variants=["bad"], peers=False)
    raced = {row.variant for row in again.rows if row.protocol["state"] != SCREEN}
    assert "honest" in raced
    assert winner_of(again).candidate == first


def test_a_candidate_with_changed_source_is_tried_again(planted, store, monkeypatch) -> None:
    honest = {"variants": ["honest"], "peers": False}
    assert run(store, **honest).problems[0].known == 0
    monkeypatch.setattr(planted.Backend, "digest", lambda self, i: "another")
    assert run(store, **honest).problems[0].known == 0
    assert run(store, fresh=True, **honest).problems[0].tried["passed"] == 4


def test_halving_finds_the_same_winner_and_a_budget_ends_screening(store) -> None:
    honest = {"variants": ["honest"], "peers": False, "fresh": True}
    report = run(store, strategy="halving", **honest)
    assert winner_of(report).candidate.config["kind"] == "fast"
    assert kinds(r for r in report.rows if r.protocol["state"] == SCREEN) == Counter(
        slow=1, good=2, close=1, fast=3
    )
    report = run(store, budget_s=1e-6, **honest)
    assert report.problems[0].cut_short and report.problems[0].tried["passed"] == 1
    assert winner_of(report).median_us > 0


def test_bench_races_the_best_known_configuration_or_the_default(store) -> None:
    options = {"backend": "planted:Backend", "store": store, "problems": ["small"],
               "limits": QUICK, "progress": Quiet(), "variants": ["honest"],
               "states": ["burst"]}  # fmt: skip
    before = race_best_known("planted", **options)
    assert winner_of(before).candidate.config["kind"] == "slow"
    run(store, variants=["honest"])
    after = race_best_known("planted", **options)
    raced = [row for row in after.rows if row.protocol["state"] != SCREEN]
    assert kinds(raced) == Counter(fast=1, host=1)


def test_each_state_has_its_own_race_winner_and_incumbent(store) -> None:
    options = {"variants": ["honest"], "peers": False, "states": ["burst", "sustained"]}
    report = run(store, **options)
    assert set(report.problems[0].winners) == {("eager", "burst"), ("eager", "sustained")}
    races = store.winners(gpu="planted", regime="eager")
    assert [race.key.state for race in races] == ["burst", "sustained"]
    assert all(race.winner.config == {"kind": "fast"} for race in races)
    assert len({race.run for race in races}) == 1
    [line, _] = report.lines()
    assert line.startswith("small eager burst: cuda/honest kind=fast ")
    json.dumps(report.to_json())
    again = run(store, **options).problems[0].winners
    assert {winner.reason for winner in again.values()} == {"the incumbent ties with the fastest"}


def test_a_ladder_races_the_slowest_variant_but_decides_nothing_beside_a_tune(
    planted, store, monkeypatch
) -> None:
    monkeypatch.setitem(planted.MICROSECONDS, "slow", 2500)
    options = {"backend": "planted:Backend", "store": store, "problems": ["small"],
               "limits": QUICK, "progress": Quiet(), "regimes": ["eager"]}  # fmt: skip
    first = ladder("planted", **options, variants=["honest"])
    assert set(first.problems[0].winners) == {("eager", "ladder")}
    raced = [row for row in first.rows if row.state == "ladder"]
    assert kinds(raced) == Counter(slow=1, host=1)
    run(store, variants=["honest"], peers=False)
    races = decisive(store.winners(gpu="planted", regime="eager"))
    assert [race.key.state for race in races] == ["burst"]


def test_a_tune_for_another_gpu_predicts_and_notes_that_nothing_ran(store, tmp_path) -> None:
    report = run(store, gpu="h100", variants=["honest"])
    assert report.kind == "predicted" and "nothing ran" in report.notes[0]
    assert {row.kind for row in report.rows} == {"predicted"}
    assert not loads(tmp_path)
    assert not any(row.config["kind"] == "slow" for row in report.rows), "a spill is no failure"
    [note] = [note for note in report.notes if "kind=slow" in note]
    assert "was left out: spills 640 bytes" in note
    winner = report.problems[0].winners["graph", "predicted"]
    assert winner.candidate.config["kind"] == "fast"
    assert not store.rows(kind="measured")
    json.dumps(report.to_json())


def test_a_compiler_that_fails_loses_only_one_prediction(planted, store) -> None:
    report = run(store, gpu="b200", variants=["bad"])
    assert report.problems[0].skipped == "no implementation serves this problem on b200"
    report = run(store, gpu="h100", variants=["bad"], budget_s=100)  # compiles what there is
    status = {row.config["kind"]: row.status for row in report.rows}
    assert status["refuses"] == "compile_error" and status["never_compiles"] == "timeout"
    assert set(status) <= set(planted.STATUS)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"problems": ["smal"]}, UnknownName),
        ({"gpu": "voodoo2"}, UnknownName),
        ({"languages": ["triton"]}, Unsupported),
        ({"strategy": "guess"}, UnknownName),
        ({"states": ["warm"]}, UnknownName),
        ({"backend": "no_such_module:Backend"}, InvalidArgument),
        ({"backend": "planted:Nothing"}, InvalidArgument),
    ],
)
def test_an_error_about_options_is_one_line(store, options, error) -> None:
    with pytest.raises(error) as caught:
        tune("planted", **{"backend": "planted:Backend", "store": store, "progress": Quiet(),
                           **options})  # fmt: skip
    assert "\n" not in str(caught.value)


def test_without_a_gpu_the_error_names_the_option(planted, store, monkeypatch) -> None:
    def none(self, index):
        raise MissingDependency("no NVIDIA driver in this machine: name a GPU with --gpu")

    monkeypatch.setattr(planted.Backend, "gpu", none)
    with pytest.raises(MissingDependency, match="--gpu"):
        run(store)


def test_a_time_below_the_roofline_is_an_error(planted, store, monkeypatch) -> None:
    monkeypatch.setenv("PLANTED_FLOOR_US", "400")
    report = run(store, variants=["honest"], peers=False)
    fast = next(row for row in report.rows if row.config["kind"] == "fast")
    assert fast.status == "wrong" and "below the roofline floor" in fast.detail
    assert winner_of(report).candidate.config["kind"] in ("good", "close")


def test_each_gpu_has_its_own_progress_bar() -> None:
    bar = Bar("planted", 3)
    lines = [bar.line("GPU 0"), bar.line("GPU 1")]
    for line, name in zip(lines, ("small", "large"), strict=True):
        line.problem(name, 4)
        line.tried(Candidate("cuda", "honest"), "passed", 250.0)
    assert [(task.description, task.completed) for task in bar.bar.tasks] == [
        ("GPU 0 planted small (1/3)", 1),
        ("GPU 1 planted large (2/3)", 1),
    ]


def test_lines_tell_of_a_problem_when_it_begins_and_when_it_has_ended(store, capsys) -> None:
    report = run(store, problems=["small", "large"], variants=["honest"], progress=Lines("p", 2))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    for number, problem in enumerate(report.problems):
        begin, end = lines[2 * number : 2 * number + 2]
        tried = problem.tried.total() + problem.known
        assert begin == f"p {problem.name}: problem {number + 1} of 2, {tried} candidates"
        for (regime, state), winner in problem.winners.items():
            assert winner.peer is not None and f"x of {winner.peer} [" in winner.summary()
            assert f"{regime} {state} {winner.summary()}" in end
        assert re.search(r"; took \d+\.\d s$", end)


def test_a_problem_that_takes_long_has_lines_in_between(store, capsys, monkeypatch) -> None:
    monkeypatch.setattr(progresses, "QUIET_S", 0.0)
    run(store, progress=Lines("p", 1))
    between = [line for line in capsys.readouterr().err.splitlines() if " tried, " in line]
    assert any("screening, 1 of " in line for line in between)
    assert any(re.search(r"[1-9] failed, best \d+\.\d\d us", line) for line in between)
    assert any("racing (eager, burst)" in line for line in between)


def test_a_problem_that_no_candidate_solves_ends_with_the_reason(store, capsys) -> None:
    run(store, variants=["bad"], progress=Lines("p", 1))
    *_, end = capsys.readouterr().err.splitlines()
    assert end.startswith("p small: skipped, no candidate passed the checks; took ")

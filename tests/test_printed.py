"""What commands print about a tune and its results is true."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import planted_tunes
import pytest
from click.testing import CliRunner

import kernelcat
from kernelcat import catalog
from kernelcat.cli import main
from kernelcat.cli.output import show
from kernelcat.errors import InvalidArgument
from kernelcat.report.board import board
from kernelcat.report.sheet import Sheet
from kernelcat.store import Store
from kernelcat.tune import Interrupted, Quiet, TuneReport, cross, tune
from kernelcat.tune.messages import Built
from kernelcat.tune.pool import CompilePool
from kernelcat.verify import receipts

planted, store = planted_tunes.planted, planted_tunes.store


def builds(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0, **metadata: int) -> list[Any]:
    """Replaces the compilers of a tune: a candidate takes ``seconds``. Returns the candidates."""
    built = []

    def build_each(self, candidates):
        for problem, candidate in candidates:
            time.sleep(seconds)
            built.append((problem, candidate))
            yield problem, candidate, Built(({"registers": 32, **metadata},))

    monkeypatch.setattr(CompilePool, "build_each", build_each)
    monkeypatch.setattr(cross._Codes, "ready", lambda *_: None)  # whatever the cache holds
    return built


def predict(store: Store, **options: Any) -> TuneReport:
    return tune("gemm", **{"gpu": "b200", "store": store, "progress": Quiet(),
                           "languages": ["cuda"], **options})  # fmt: skip


def test_problems_that_were_not_tried_are_reported_as_such(store, monkeypatch) -> None:
    built = builds(monkeypatch, seconds=0.02)
    report = predict(store, budget_s=0.1)
    tried = {str(problem) for problem, _ in built}
    assert not any("nothing compiles" in reason for reason in report.skipped.values())
    for problem in report.problems:
        assert problem.cut_short and problem.not_tried > 0
        if not problem.tried:
            assert "the budget ended before anything was compiled" in problem.skipped
    assert tried and any(f"{p.not_tried} candidates were tried" in line
                         for p in report.problems for line in report.lines())  # fmt: skip


def test_nothing_compiles_only_where_all_was_tried(store, monkeypatch) -> None:
    builds(monkeypatch, shared_bytes=1 << 30)
    report = predict(store)
    assert set(report.skipped.values()) == {"nothing compiles and fits on b200"}
    assert not report.rows, "code that does not fit is no failure of the compiler"


def test_candidates_that_the_budget_left_out_of_a_measured_tune_are_counted(store) -> None:
    report = planted_tunes.run(store, variants=["honest"], peers=False, budget_s=0.01)
    [problem] = report.problems
    assert problem.cut_short and problem.not_tried == 4 - problem.tried.total()
    assert f"before {problem.not_tried} candidates were tried" in "\n".join(report.lines())


@pytest.mark.parametrize("budget_s", [0, -1, float("nan")])
def test_a_budget_of_no_time_is_refused(store, budget_s: float) -> None:
    with pytest.raises(InvalidArgument, match="leave the budget out for no limit"):
        predict(store, budget_s=budget_s)


@pytest.mark.parametrize("text", ["0s", "0", ""])
def test_the_command_line_refuses_a_budget_of_no_time(text: str) -> None:
    done = CliRunner().invoke(main, ["tune", "gemm", "--gpu", "b200", "--budget", text])
    assert done.exit_code == 1 and "budget" in done.output and done.output.count("\n") == 1


def test_an_interrupted_prediction_measured_nothing(store, monkeypatch) -> None:
    builds(monkeypatch)

    def build_each(self, candidates):
        yield *next(iter(candidates)), Built(({"registers": 32},))
        raise KeyboardInterrupt

    monkeypatch.setattr(CompilePool, "build_each", build_each)
    with pytest.raises(Interrupted, match=r"[1-9]\d* predictions are kept") as caught:
        predict(store)
    assert "measurement" not in str(caught.value)


def test_the_bar_shows_the_best_and_not_the_last(store, monkeypatch) -> None:
    builds(monkeypatch)
    shown = []

    class Line(Quiet):
        def tried(self, candidate, status, best_us):
            shown.append(best_us)

    report = predict(store, progress=Line(), problems=["4096x4096x4096"])
    times = [row.median_us for row in report.rows]
    assert times != sorted(times, reverse=True), "the last candidate must not be the best"
    assert shown == pytest.approx([min(times[: i + 1]) for i in range(len(times))], rel=1e-4)


def test_with_json_progress_goes_to_standard_error_alone(monkeypatch) -> None:
    builds(monkeypatch)
    line = "tune gemm --gpu b200 --language triton --problem 4096x4096x4096 --json"
    done = CliRunner().invoke(main, line.split())
    assert done.exit_code == 0, done.output
    [problem] = json.loads(done.stdout)["problems"]
    begin, end = done.stderr.splitlines()
    assert begin.startswith("gemm 4096x4096x4096: problem 1 of 1, ")
    [winner] = problem["winners"].values()
    assert f"{winner['candidate']['variant']} " in end and f" {winner['median_us']:.2f} us" in end


def test_tune_board_and_explain_name_one_winner(store, monkeypatch) -> None:
    """Estimates within 1 % tie: everywhere the names decide, although the last is the least."""
    builds(monkeypatch)
    promising = cross.promising_candidates

    def ties(implementation, problem, gpu):
        last = 0.5 if implementation.language == "triton" else 0.7
        return (
            (candidate, 1e6 + 1000 * last)
            for candidate, _ in promising(implementation, problem, gpu)
        )

    monkeypatch.setattr(cross, "promising_candidates", ties)
    verified = {i.variant for i in catalog.implementations("gemm") if receipts.doubt(i) is None}
    report = predict(store, languages=["cuda", "triton"], variants=sorted(verified))
    kernelcat.reload()
    rows = {row.title: row for row in board(store.rows(kind="predicted"), "b200", "gemm")}
    for problem in report.problems:
        winner = problem.winners["graph", "predicted"].candidate
        assert winner.language == "cuda"
        row = rows[problem.name]
        explained = kernelcat.get("gemm").explain(gpu="b200", **row.problem)
        names = (f"gemm/{row.language}/{row.variant}", row.config)
        assert names == (f"gemm/{winner.language}/{winner.variant}", dict(winner.config))
        assert names == (explained.implementation.name, dict(explained.config))


def test_a_prediction_that_is_repeated_stores_nothing_again(store, monkeypatch) -> None:
    builds(monkeypatch)
    first = predict(store, problems=["4096x4096x4096", "64x7168x16384"])
    before = {row.digest for row in store.rows()}
    assert len(before) == len(first.rows) > 10
    again = predict(store, problems=["4096x4096x4096", "64x7168x16384"])
    assert not again.rows and {row.digest for row in store.rows()} == before
    winners = [[p.winners["graph", "predicted"].candidate for p in r.problems]
               for r in (first, again)]  # fmt: skip
    assert winners[0] == winners[1]
    assert all(problem.known == problem.tried.total() for problem in again.problems)


def test_an_interrupted_prediction_goes_on_in_the_same_run(store, monkeypatch) -> None:
    complete = builds(monkeypatch)
    build_each = CompilePool.build_each

    def stops(self, candidates):
        for number, built in enumerate(build_each(self, candidates)):
            if number == 3:
                raise KeyboardInterrupt
            yield built

    monkeypatch.setattr(CompilePool, "build_each", stops)
    with pytest.raises(Interrupted):
        predict(store, problems=["4096x4096x4096"])
    assert len(store.rows()) == 3
    monkeypatch.setattr(CompilePool, "build_each", build_each)
    predict(store, problems=["4096x4096x4096"])
    assert complete and len({row.run for row in store.rows()}) == 1


def test_a_small_spill_is_no_error(store, monkeypatch) -> None:
    builds(monkeypatch, spill_bytes=8)
    report = predict(store, problems=["4096x4096x4096"])
    assert {row.status for row in report.rows} == {"passed"}
    builds(monkeypatch, spill_bytes=4096)
    report = predict(store, problems=["64x7168x16384"])
    assert not report.rows and any("spills 4096 bytes" in note for note in report.notes)


@pytest.mark.parametrize("columns", [40, 80, 300])
def test_tables_cut_no_number(columns: int, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    numbers = [f"{1_234_567 + i:,}.25 ± 0.5" for i in range(12)]
    headers = ["problem", "best", *(f"µs {i}" for i in range(12))]
    line = ["a-problem-with-a-long-name" * 3, "cuda/warp_specialized", *numbers]
    show(Sheet("title", headers, [line], ["a note"], slice(2, None), line).console())
    printed = capsys.readouterr().out
    assert all(printed.count(number) == 2 for number in numbers), printed
    assert "…" not in printed


def test_a_missing_named_database_is_named(tmp_path: Path, monkeypatch) -> None:
    missing = tmp_path / "typo.sqlite3"
    monkeypatch.setenv("KERNELCAT_DB", str(missing))
    done = CliRunner().invoke(main, ["leaderboard", "gemm", "--gpu", "b200"])
    assert done.exit_code == 0 and f"names {missing}, which does not exist" in done.stderr
    assert "does not exist" not in done.stdout
    done = CliRunner().invoke(main, ["leaderboard", "gemm", "--db", str(missing)])
    assert done.exit_code == 1 and str(missing) in done.output
    assert "Nothing measured" not in done.output and not missing.exists()
    monkeypatch.delenv("KERNELCAT_DB")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    done = CliRunner().invoke(main, ["leaderboard", "gemm", "--gpu", "b200"])
    assert "does not exist" not in done.stderr
    assert not list(tmp_path.iterdir())

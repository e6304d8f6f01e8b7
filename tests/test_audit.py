"""Audits of tunes on a device without a GPU: regret, flips, files, and what the command shows."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import postgres
import pytest
from click.testing import CliRunner

from kernelcat import paths
from kernelcat.cli import main
from kernelcat.errors import InvalidArgument, UnknownName
from kernelcat.report.audits import line, sheet, summary
from kernelcat.store.audits import (
    Audit,
    AuditedProblem,
    AuditedTune,
    ScreenedTimes,
    read,
    shipped,
)
from kernelcat.tune import Limits
from kernelcat.tune.audit import CACHE, NUM_PROBLEMS, _flips, audit, empty_cache, representative
from kernelcat.tune.candidate import Candidate

PLANTED = Path(__file__).parent / "planted"
CHOICE = {"winner": "gemm/cuda/a", "config": {"tile": 1}, "us": 10.0}
TUNES = (
    AuditedTune("random", False, 64, 30.0, **CHOICE, regret=0.01, regret_ci=(0.0, 0.02)),
    AuditedTune("random", True, 64, 3.0, **CHOICE, regret=0.03, regret_ci=(0.02, 0.04)),
    AuditedTune("tpe", False, 64, 40.0, **CHOICE, regret=0.0, regret_ci=(0.0, 0.0)),
    AuditedTune("tpe", True, 64, 4.0, failed="no candidate passed the checks"),
)
PROBLEM = AuditedProblem(
    {"M": 64}, None, 100, 70, {"passed": 90, "wrong": 10}, 120.0, "gemm/cuda/a", {"tile": 1}, 10.0,
    ("random",), TUNES, times={"gemm/cuda/a": ScreenedTimes(["tile"], [[1, 10.0], [2, 12.5]])},
)  # fmt: skip
AUDIT = Audit("gemm", "h200", 64, ["random", "tpe"], {"gemm/cuda/a": "d"}, "graph", "burst",
              "2026-11-24T00:00:00Z", {"driver": "580.1"}, (PROBLEM,))  # fmt: skip


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the planted backend importable here and in the processes of a tune."""
    found = [str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(found))
    monkeypatch.syspath_prepend(str(PLANTED))


def run(path: Path | None = None, **options) -> Audit:
    options = {"strategies": ["tpe"], "problems": ["small"], "processes": 1,
               "variants": ["honest"], "limits": Limits(candidate_s=5.0), **options}  # fmt: skip
    return audit("planted", backend="planted:Backend", path=path, **options)


@pytest.mark.usefixtures("planted")
def test_a_choice_from_too_few_candidates_has_the_regret_that_the_race_shows(
    tmp_path: Path,
) -> None:
    """One candidate is the default, 1,500 us; the best of the space takes 250 us."""
    postgres.require("optuna")
    path = tmp_path / "folder" / "audit.jsonl"
    found = run(path, trials=1)
    [problem] = found.problems
    assert (problem.num_legal, problem.num_promising, problem.screened) == (4, 4, {"passed": 4})
    assert problem.best_config == {"kind": "fast"} and 250 <= problem.best_us < 300
    tried = [(t.strategy, t.compiled, t.screened) for t in problem.tunes]
    assert tried == [("tpe", False, 1), ("tpe", True, 1)]
    assert {t.config["kind"] for t in problem.tunes} == {"slow"}
    [table] = problem.times.values()
    times = {config["kind"]: us for config, us in table.times().items()}
    assert list(problem.times) == ["planted/cuda/honest"] and len(times) == 4
    assert 250 <= times["fast"] < times["good"] < times["slow"]
    for tune in problem.tunes:
        assert 4.5 < tune.regret_ci[0] <= tune.regret <= tune.regret_ci[1] < 5.5
        assert tune.regret == pytest.approx(tune.us / problem.best_us - 1, rel=0.05)
    assert not problem.flips
    assert read(path) == found

    shown: list[AuditedProblem] = []
    assert run(path, trials=1, report=shown.append) == found  # nothing is run again
    assert shown == [problem]
    with pytest.raises(InvalidArgument, match="an audit with trials=1, not 2: name another file"):
        run(path, trials=2)


@pytest.mark.usefixtures("planted")
def test_a_tune_of_the_whole_space_has_no_regret_and_nothing_runs_after_the_budget() -> None:
    found = run(strategies=["halving"], trials=None)
    [problem] = found.problems
    assert [tune.config for tune in problem.tunes] == [{"kind": "fast"}] * 2
    assert [tune.regret for tune in problem.tunes] == [0.0, 0.0]
    assert found.trials == 64 and found.environment["sku"] == found.gpu == "planted"
    assert run(strategies=["halving"], budget_s=1e-9).problems == ()
    with pytest.raises(UnknownName):
        run(strategies=["guess"])


@pytest.mark.usefixtures("planted")
def test_a_problem_that_nothing_solves_is_skipped_with_the_reason(monkeypatch) -> None:
    monkeypatch.setenv("PLANTED_FLOOR_US", "1e6")  # every time is below the roofline
    [problem] = run(strategies=["halving"]).problems
    assert problem.skipped == "no candidate passed the checks" and not problem.tunes
    assert problem.screened == {"wrong": 4}


def test_a_flip_is_two_choices_of_different_speed() -> None:
    one, other, third = (Candidate("cuda", name) for name in "abc")
    samples = {one: [10.0] * 11, other: [10.05] * 11, third: [10.5] * 11}
    assert not _flips([one, one], samples) and not _flips([third, third], {})
    assert not _flips([one, other], samples) and not _flips([other, one], samples)  # 0.5 %
    assert _flips([one, third], samples) and _flips([third, one], samples)  # 5 %
    assert _flips([one, None], samples) and _flips([Candidate("cuda", "failed"), one], samples)


def test_the_audited_problems_are_of_all_sizes() -> None:
    from kernelcat import catalog
    from kernelcat.runtime import gpu

    gemm, h200 = catalog.entry("gemm"), gpu.find("h200")
    chosen = representative(gemm, h200)
    assert len(set(chosen)) == NUM_PROBLEMS < len(gemm.problems)
    flops = [gemm.flops(problem) for problem in chosen]
    assert max(flops) == max(map(gemm.flops, gemm.problems.values())) and flops[0] > flops[-1]
    few = replace(gemm, problems=dict(list(gemm.problems.items())[:1]))
    assert representative(few, h200) == list(few.problems.values())


def test_a_tune_without_compiled_kernels_has_a_cache_of_its_own(monkeypatch) -> None:
    monkeypatch.setenv(CACHE, "/mine")
    with empty_cache(True):
        folder = Path(os.environ[CACHE])
        assert folder.is_dir() and not list(folder.iterdir())
    assert os.environ[CACHE] == "/mine" and not folder.exists()
    monkeypatch.delenv(CACHE)
    with empty_cache(False):
        assert CACHE not in os.environ
    with empty_cache(True):
        pass
    assert CACHE not in os.environ


def test_a_file_keeps_everything_and_another_file_is_refused(tmp_path: Path) -> None:
    AUDIT.write(tmp_path / "audit.jsonl")
    assert read(tmp_path / "audit.jsonl") == replace(AUDIT, problems=(replace(
        PROBLEM, flips=["random"]),))  # fmt: skip
    for text in ("", "{}", "[]\n{}", '{"entry":1}\n{}'):
        (tmp_path / "other.jsonl").write_text(text)
        with pytest.raises(InvalidArgument, match="has no audit"):
            read(tmp_path / "other.jsonl")


def test_the_table_has_regret_flips_and_times_of_each_strategy() -> None:
    assert summary(AUDIT, "random") == (
        "random: regret 2.0% at the median, 3.0% at worst, 1 flips, 30.0 s in the mean, 3.0 s with "
        "compiled kernels."
    )
    assert "1 tunes without a result" in summary(AUDIT, "tpe")
    table = sheet(AUDIT)
    assert [cells[-3:] for cells in table.lines] == [("1.0%", "3.0%", "flip"),
                                                     ("0.0%", "failed", "")]  # fmt: skip
    assert "M=64, tpe: no candidate passed the checks" in table.notes
    assert line(PROBLEM) == (
        "M=64: best of 100 is gemm/cuda/a 10.00 us; regret: random 1.0%, random 3.0%, tpe 0.0%, "
        "tpe failed"
    )
    skipped = replace(PROBLEM, skipped="too large", tunes=())
    assert line(skipped) == "M=64: skipped, too large"
    assert "M=64: skipped, too large" in sheet(replace(AUDIT, problems=(skipped,))).notes


def test_the_command_shows_shipped_audits_and_refuses_what_it_does_not_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = paths.data
    monkeypatch.setattr(paths, "data", lambda n: tmp_path if n == "tuning_db" else data(n))
    command = ["tune", "gemm", "--audit", "--shipped"]
    assert "No audits come with" in CliRunner().invoke(main, command).output
    AUDIT.write(tmp_path / "audit" / "gemm-h200.jsonl")
    assert [audit.entry for audit in shipped("gemm")] == ["gemm"] and shipped("lm_head") == []
    shown = CliRunner().invoke(main, command).output
    assert "random: regret 2.0% at the median" in shown and "flip" in shown
    [found] = json.loads(CliRunner().invoke(main, [*command, "--json"]).output)
    assert found["problems"][0]["tunes"][0]["regret"] == 0.01
    for words, text in (
        (["tune", "gemm", "--out", "x"], "--out and --shipped are for --audit"),
        (["tune", "--audit"], "Missing argument 'ENTRY'"),
        (["tune", "gemm", "--audit", "--device", "all"], "an audit runs on one GPU"),
        (["tune", "gemm", "--audit", "--fresh", "--gpu", "h200"], "no use for these options: "
         "fresh, gpu"),
    ):  # fmt: skip
        done = CliRunner().invoke(main, words)
        assert done.exit_code and text in done.output + str(done.exception), words

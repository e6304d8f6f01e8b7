"""Cheating kernels lose, and honest kernels are not blamed for what others broke."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernelcat.store import Store
from kernelcat.tune import Limits, Quiet, tune

PLANTED = Path(__file__).parent.parent / "planted"


@pytest.fixture(autouse=True)
def cheats(monkeypatch: pytest.MonkeyPatch):
    paths = [str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.syspath_prepend(str(PLANTED))
    import cheats

    return cheats


def run(backend="cheats:Backend"):
    with Store.open() as store:
        return tune("planted", backend=backend, store=store, problems=["small"],
                    limits=Limits(candidate_s=5), processes=1, progress=Quiet(), peers=False,
                    states=["burst"])  # fmt: skip


@pytest.mark.parametrize("copies", ["one", "many"])
def test_every_cheat_loses_and_honest_kernels_win(cheats, copies, monkeypatch) -> None:
    monkeypatch.setenv("CHEATS_COPIES", copies)
    report = run()
    failed = {row.config["kind"]: row.detail for row in report.rows if row.status != "passed"}
    times = {row.config["kind"]: (row.state, row.median_us, row.samples) for row in report.rows}
    assert set(failed) == set(cheats.CHEATS), (failed, times)
    assert {row.status for row in report.rows} == {"passed", "wrong"}
    assert report.problems[0].winners["eager", "burst"].candidate.config["kind"] == "honest"
    assert "wrote outside of dst" in failed["writes_ff"]
    assert "skips work" in failed["remembers_contents"]
    assert all(len(row.environment["seeds"]) >= 3 for row in report.rows)


def test_a_candidate_that_spoils_the_inputs_is_blamed_alone(monkeypatch) -> None:
    monkeypatch.setenv("CHEATS_ONLY", "spoils_input")
    report = run()
    status = {row.config["kind"]: row.status for row in report.rows}
    assert status == {"spoils_input": "wrong", "honest": "passed", "good": "passed"}


def test_a_slow_host_condemns_no_kernel_and_hides_no_cheat(monkeypatch) -> None:
    monkeypatch.setenv("CHEATS_ONLY", "remembers_contents")
    report = run("cheats:SlowHost")
    failed = {row.config["kind"]: row.detail for row in report.rows if row.status != "passed"}
    assert failed.keys() == {"remembers_contents"}, failed
    assert report.problems[0].winners.keys() == {("graph", "burst"), ("eager", "burst")}


@pytest.mark.parametrize("copies", ["one", "many"])
def test_a_kernel_that_accumulates_is_judged_by_a_run_of_its_own(copies, monkeypatch) -> None:
    monkeypatch.setenv("CHEATS_COPIES", copies)
    report = run("cheats:Adding")
    status = {row.config["kind"]: row.status for row in report.rows}
    assert status == {"tires_of_adding": "wrong", "adds": "passed"}


def test_seeds_differ_from_tune_to_tune_and_are_recorded() -> None:
    from kernelcat.verify.seeds import draw_seeds

    assert len(set(draw_seeds(20))) == 20 and all(0 <= seed < 2**31 for seed in draw_seeds(20))

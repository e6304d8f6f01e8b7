"""Tunes of entries of several ranks: what a race becomes in the database and on the board."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernelcat import catalog
from kernelcat.catalog.implementation import Config
from kernelcat.errors import RankFailed
from kernelcat.ranks import race, tune
from kernelcat.ranks.processes import JobFailed, RanksSilent
from kernelcat.ranks.race import Raced
from kernelcat.runtime import gpu
from kernelcat.runtime.environment import Environment
from kernelcat.store import Store
from kernelcat.store.plausibility import doubt
from kernelcat.tune.candidate import PEER, Candidate
from kernelcat.tune.messages import Failed, Timing

ENTRY = catalog.entry("all_reduce")
PROBLEM = ENTRY.named("128x7168")
MACHINE = gpu.together(gpu.find("h200"), 2, "nvlink")
ENVIRONMENT = Environment.capture(MACHINE).to_json()


def tiles(variant: str, blocks: int = 32) -> Candidate:
    return Candidate("cuda", variant, Config(unroll=1, blocks=blocks))


def around(us: float) -> Timing:
    return Timing(tuple(us * (1 + 0.001 * (i % 5)) for i in range(21)))


RACED = Raced(
    PROBLEM, 2, ENVIRONMENT,
    {tiles("one_shot"): around(9.75), tiles("two_shot"): around(11.3),
     Candidate(PEER, "nccl"): around(26.4)},
    {tiles("one_shot", 64): Failed("wrong", "rank 1: out: 3 of 8 differ"),
     Candidate(PEER, "torch-one-shot"): Failed("wrong", "far from the oracle")},
    None,
)  # fmt: skip


def tuned(
    path: Path, monkeypatch: pytest.MonkeyPatch, raced: Raced | RankFailed, **options: Any
) -> Any:
    def run(*arguments: Any) -> Raced:
        if isinstance(raced, RankFailed):
            raise raced
        return raced

    monkeypatch.setattr(race, "run", run)
    with Store.open(str(path)) as store:
        return tune.tune(
            ENTRY, catalog.implementations("all_reduce"), [PROBLEM], [0, 1], store, **options
        )


def test_a_race_becomes_rows_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "db.sqlite"
    report = tuned(path, monkeypatch, RACED)
    (problem,) = report.problems
    winner = problem.winners["graph", "burst"]
    assert winner.candidate == tiles("one_shot")
    assert (winner.peer, round(winner.vs_peer[0], 2)) == ("nccl", 2.71)
    assert problem.skipped_peers == {"torch-one-shot": "far from the oracle"}
    with Store.open(str(path)) as store:
        rows = store.rows(gpu="h200x2-nvlink", entry="all_reduce")
    assert sorted((row.language, row.variant, row.status) for row in rows) == [
        ("cuda", "one_shot", "passed"), ("cuda", "one_shot", "wrong"),
        ("cuda", "two_shot", "passed"), ("peer", "nccl", "passed"),
    ]  # fmt: skip
    assert [doubt(row) for row in rows] == [None] * 4


def test_the_board_shows_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "db.sqlite"
    tuned(path, monkeypatch, RACED)
    command = [sys.executable, "-m", "kernelcat", "leaderboard", "all_reduce", "--db", str(path),
               "--gpu", "h200x2-nvlink", "--csv"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "128x7168" in done.stdout
    assert "one_shot" in done.stdout


def test_a_second_tune_keeps_a_winner_that_ties(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "db.sqlite"
    tuned(path, monkeypatch, RACED)
    times = {tiles("one_shot"): around(9.75), tiles("two_shot"): around(9.7)}
    report = tuned(path, monkeypatch, Raced(PROBLEM, 2, ENVIRONMENT, times, {}, None))
    assert report.problems[0].winners["graph", "burst"].candidate == tiles("one_shot")


def test_ranks_that_fail_and_a_budget_that_ends_skip_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "db.sqlite"
    report = tuned(path, monkeypatch, RankFailed("rank 1: no memory"))
    assert report.skipped == {"128x7168": "rank 1: no memory"}
    assert tuned(path, monkeypatch, RACED, budget_s=0).skipped == {
        "128x7168": "the budget ended before"
    }


@pytest.mark.parametrize("name", ["h200x2-nvlink", "2 x NVIDIA H200, nvlink"])
def test_gpus_that_compute_together_have_a_row(name: str) -> None:
    assert gpu.find(name) == MACHINE
    assert gpu.find(name).bandwidth == gpu.find("h200").bandwidth


@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [(partial(RanksSilent, 60), "timeout", "the ranks gave no sign for 60 s"),
     (partial(JobFailed, "rank 1 did not answer"), "crashed", "rank 1 did not answer")],
    ids=["hangs", "fails"],
)  # fmt: skip
def test_a_race_goes_on_without_what_ended_it(
    error: Callable[[list[str]], JobFailed], status: str, detail: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    hung, asked = tiles("one_shot"), list[list[Any]]()

    def run(job: dict[str, Any], *_: Any) -> list[dict[str, Any]]:
        asked.append(job["left_out"])
        if not job["left_out"]:
            lines = [race.ANNOUNCED + json.dumps(["cuda", "one_shot", dict(hung.config)]), "a word"]
            raise error(lines)
        other = ["cuda", "two_shot", {"blocks": 32, "unroll": 1}, "", "wrong", [11.3] * 21, []]
        return [{"contestants": [other], "environment": ENVIRONMENT, "left_out": None}]

    monkeypatch.setattr(race.processes, "run", run)
    monkeypatch.setattr(race, "compile_candidates", lambda *_: None)
    monkeypatch.setattr(gpu, "detect", lambda _: gpu.find("h200"))
    raced = race.run(catalog.implementations("all_reduce"), PROBLEM, [0, 1])
    assert asked == [[], [["cuda", "one_shot", dict(hung.config)]]]
    assert (raced.failed[hung].status, raced.failed[hung].detail) == (status, detail)
    assert [candidate.variant for candidate in raced.times] == ["two_shot"]


@pytest.mark.parametrize(("name", "us"), [("all_reduce", 2.0), ("kv_transfer", 46.0)])
def test_the_longest_rank_counts_where_none_waits_for_another(name: str, us: float) -> None:
    """A sender takes 46 us, and its receiver, which launches nothing but an empty list, 2."""
    cuda = SimpleNamespace(get_elapsed_time=lambda start, end: 2e-3)
    group = SimpleNamespace(
        synchronize=lambda: None, xp=SimpleNamespace(cuda=cuda),
        rendezvous=SimpleNamespace(gather=lambda ms: ([46e-3, ms], [])),
    )  # fmt: skip
    timed = race.Race.__new__(race.Race)
    timed.group, timed.entry, timed.stream = group, catalog.entry(name), None  # type: ignore
    timed.start = timed.end = SimpleNamespace(record=lambda stream: None)
    contestant = race.Contestant(Candidate("cuda", "any", Config()), None, nodes=1)
    contestant.graph = SimpleNamespace(launch=lambda stream: None)
    assert timed.time(contestant, 0.0) == pytest.approx(us)


def test_a_race_that_hangs_outside_its_contestants_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        raise RanksSilent(60, ["a word"])

    monkeypatch.setattr(race.processes, "run", run)
    monkeypatch.setattr(race, "compile_candidates", lambda *_: None)
    monkeypatch.setattr(gpu, "detect", lambda _: gpu.find("h200"))
    with pytest.raises(RankFailed, match="no sign for 60 s after a word"):
        race.run(catalog.implementations("all_reduce"), PROBLEM, [0, 1])

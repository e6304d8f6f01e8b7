"""Races on random problems: what the seed decides, what fails, and what a file keeps."""

from __future__ import annotations

import json
import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kernelcat import catalog, dtypes, paths
from kernelcat.call.choice import Decision
from kernelcat.catalog.implementation import NAIVE, Config
from kernelcat.catalog.spec import Problem
from kernelcat.cli import main
from kernelcat.errors import InvalidArgument, UnknownName, Unsupported
from kernelcat.reference._random_sizes import pages_needed
from kernelcat.reference.gemm import product
from kernelcat.report.random_races import line, reason, sheet, summary
from kernelcat.runtime import checkout
from kernelcat.runtime.gpu import SKUS
from kernelcat.store.random_races import (
    RandomRace,
    RandomRaces,
    checked_seed,
    percentile,
    read,
    shipped,
)
from kernelcat.tune import Limits
from kernelcat.tune.backend import Cuda
from kernelcat.tune.random_races import NOT_ASKED, SHORT_TUNE_S, TUNE_SHARE, draw, race_random
from kernelcat.tune.random_races import _tune_seconds as tune_seconds

SEED = "0123456789abcdef" * 2 + "01234567"
DRAWING = [name for name in catalog.names() if catalog.entry(name).random_problem]
COMMON = {"regime": "graph", "state": "burst", "created_at": "", "environment": {}}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch):
    """The planted backend's module, importable in the processes that race too."""
    folder = str(Path(__file__).parent / "planted")
    python_path = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(python_path))
    monkeypatch.syspath_prepend(folder)
    import planted

    return planted


def race_planted(monkeypatch, planted, kinds: list[str | None], **options) -> RandomRaces:
    """Races of the planted entry, where problem i gets ``kinds[i]``; None: nothing serves it."""
    numbers = {p: i for i, p in enumerate(draw(planted.ENTRY, SEED, len(kinds)))}
    assert len(numbers) == len(kinds)

    def decide(self, entry, problem, gpu, failed):
        kind = kinds[numbers[problem]]
        if kind is None:
            raise Unsupported("nothing serves it")
        if failed:  # the next offer
            kind = "fast"
        variant = "bad" if kind in planted.STATUS else "honest"
        chosen = next(i for i in self.implementations(entry.name) if i.variant == variant)
        return Decision(chosen, Config(kind=kind), "default")

    monkeypatch.setattr(planted.Backend, "decide", decide)
    limits = Limits(candidate_s=5.0, compile_s=5.0, peer_s=10)
    return race_random("planted", SEED, count=len(kinds), backend="planted:Backend",
                       limits=limits, processes=1, **options)  # fmt: skip


def test_a_failure_costs_its_own_race_only_and_counts_as_zero(monkeypatch, planted) -> None:
    kinds = ["fast", "segfaults", "lies", None, "refuses", "slow"]
    races = race_planted(monkeypatch, planted, kinds)
    fast, segfaults, lies, unserved, refuses, slow = races.races
    assert fast.best_peer == slow.best_peer == "host"
    assert fast.ratio > 1.4 > 0.5 > slow.ratio > 0
    assert set(fast.skipped_peers) == {"absent", "unable", "broken"}
    assert fast.source and fast.l2 == "cold" and fast.why == "default"
    assert "SIGSEGV" in segfaults.failed and "wrong" in lies.failed
    assert unserved.failed == "nothing serves it" and unserved.implementation is None
    assert refuses.config == {"kind": "fast"} and refuses.ratio > 1.4
    assert [segfaults.ratio, lies.ratio, unserved.ratio] == [0, 0, 0]
    assert races.geometric_mean == races.low_percentile == 0
    assert summary(races).endswith("worst 0.000 (number 1), 3 failed")


def test_only_the_peers_that_are_named_race(monkeypatch, planted) -> None:
    [race] = race_planted(monkeypatch, planted, ["fast"], peers=["host"]).races
    assert race.best_peer == "host" and set(race.skipped_peers.values()) == {NOT_ASKED}
    with pytest.raises(UnknownName, match="no peer 'nobody'; it has: host"):
        race_planted(monkeypatch, planted, ["fast"], peers=["nobody"])


def test_first_problems_race_with_the_choice_of_a_tune_that_leaves_no_trace(
    monkeypatch, planted, tmp_path
) -> None:
    good = planted.Backend().implementations("planted")[:1]
    monkeypatch.setattr(planted.Backend, "implementations", lambda self, name: good)
    monkeypatch.setenv("KERNELCAT_DB", str(tmp_path / "own.sqlite"))
    path, seen = tmp_path / "races.jsonl", []
    kinds = ["slow", "fast", "good"]
    untuned = race_planted(monkeypatch, planted, kinds[:2], path=path)
    assert untuned.regret is None and not any(race.has_tune for race in untuned.races)
    races = race_planted(monkeypatch, planted, kinds, path=path, tunes=2, report=seen.append)
    slow, fast, plain = races.races
    assert slow.tuned == "planted/cuda/honest" and slow.tuned_config == {"kind": "fast"}
    assert 4 < slow.slowdown < 8 and fast.slowdown == 1 and plain.slowdown is None
    assert races.regret == pytest.approx(slow.slowdown**0.5 - 1)
    assert [race.number for race in seen] == [0, 1, 2] and read(path) == races
    assert set(slow.peers) == {"host"}
    assert "tunes" in summary(races) and f"tuned {slow.tuned_us:.1f}" in line(slow)
    again = race_planted(monkeypatch, planted, kinds, path=path, tunes=2)
    assert again == races
    assert sorted(file.name for file in tmp_path.iterdir()) == ["races.jsonl"]


def test_a_tune_gets_the_memory_of_the_device(monkeypatch, planted, tmp_path) -> None:
    """A process that raced a large problem would leave no memory for the tune of the next one."""
    good = planted.Backend().implementations("planted")[:1]
    monkeypatch.setattr(planted.Backend, "implementations", lambda self, name: good)
    monkeypatch.setenv("PLANTED_MEMORY", str(tmp_path / "owner"))
    races = race_planted(monkeypatch, planted, ["fast", "fast"], tunes=2)
    assert [race.tuned for race in races.races] == ["planted/cuda/honest"] * 2


def test_a_tune_without_a_result_says_why_and_costs_no_race(monkeypatch, planted) -> None:
    broken = (planted.implementation("honest", ("refuses",), 0),)
    monkeypatch.setattr(planted.Backend, "implementations", lambda self, name: broken)
    races = race_planted(monkeypatch, planted, ["fast"], tunes=1)
    [race] = races.races
    assert race.tuned_us is None and race.has_tune and race.ratio > 1.4
    monkeypatch.setattr(catalog, "entry", lambda name: planted.ENTRY)
    assert f"0 has no tune: {race.untuned}" in sheet(races).notes


def test_a_short_tune_that_finds_less_is_no_gain() -> None:
    race = RandomRace(0, {}, us=10.0, tuned_us=20.0)
    assert race.slowdown == 1 and replace(race, tuned_us=8.0).slowdown == 1.25
    assert replace(race, us=None).slowdown is replace(race, tuned_us=None).slowdown is None


def test_a_budget_is_shared_by_tunes_and_races(monkeypatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    assert tune_seconds(math.inf, 3) == SHORT_TUNE_S
    assert tune_seconds(160.0, 3) == 60 * TUNE_SHARE / 3
    assert tune_seconds(math.inf, 0) == tune_seconds(math.inf, -2) == 0


def test_a_loss_has_what_served_and_what_bounds_it() -> None:
    entry, h200 = catalog.entry("gemm"), SKUS["h200"]
    problem = product(64, 32, 2880).values
    lost = RandomRace(0, problem, "gemm/cuda/wgmma", {}, "nearest", product(64, 64, 2880).values,
                      [1], us=13.8, peers={"cublas": 8.0})  # fmt: skip
    assert reason(lost, "gemm", h200) == "nearest (N=64); launches 14% of the time; 0.01 waves"
    large = product(4096, 4096, 4096).values
    full = RandomRace(1, large, "gemm/cuda/wgmma", {}, "default", None, [132], us=300.0)
    share = h200.roofline_us(2 * 4096**3, 0, "bfloat16") / 300
    assert reason(full, "gemm", h200) == f"default; arithmetic {share:.0%} of the time"
    streams = product(1, 8192, 8192).values
    uneven = replace(full, problem=streams, grids=[66, 140])
    share = h200.roofline_us(0, entry.bytes_moved(product(1, 8192, 8192)), "bfloat16") / 300
    expected = f"default; bytes {share:.0%} of the time; 1.06 waves"
    assert reason(uneven, "gemm", h200) == expected
    races = RandomRaces("gemm", "h200", SEED, races=(lost, full), **COMMON)
    notes = sheet(races).notes
    assert any(note.startswith("0 lost: gemm/cuda/wgmma, nearest (N=64)") for note in notes)
    assert not any(note.startswith("1 lost") for note in notes)


def test_a_file_keeps_races_which_are_not_run_again_but_only_of_the_same_code(
    monkeypatch, planted, tmp_path
) -> None:
    path, seen = tmp_path / "races.jsonl", []
    first = race_planted(monkeypatch, planted, ["fast"], path=path)
    assert read(path) == first
    more = race_planted(
        monkeypatch, planted, ["hangs", "good", "good"], path=path, report=seen.append, budget_s=1e9
    )
    assert more.races[0] == first.races[0] and [race.number for race in seen] == [0, 1, 2]
    assert read(path) == more and more.geometric_mean > 0
    assert race_planted(monkeypatch, planted, ["fast"] * 4, path=path, budget_s=1e-9) == more
    monkeypatch.setattr(planted.Backend, "digest", lambda self, i: "another")
    with pytest.raises(InvalidArgument, match="other code"):
        race_planted(monkeypatch, planted, ["fast"], path=path)
    replace(first, seed="f" * 40).write(path)
    with pytest.raises(InvalidArgument, match=f"seed={'f' * 40}"):
        race_planted(monkeypatch, planted, ["fast"], path=path)
    path.write_text("[]")
    with pytest.raises(InvalidArgument, match="no random races"):
        read(path)


def test_the_command_prints_a_line_for_each_race_and_the_table(monkeypatch, planted) -> None:
    def run(*words: str):
        return CliRunner().invoke(main, ["regret", "moe_mlp", "--random", "2", *words])

    problems = draw(catalog.entry("moe_mlp"), SEED, 2)
    races = tuple(
        RandomRace(number, problem.values, "moe_mlp/cuda/stream", {}, "default", us=10.0,
                   peers={"humming": 10.0 + number, "torch": 30.0})
        for number, problem in enumerate(problems)
    )  # fmt: skip

    def raced(entry, seed, *, count, unusual, tunes, peers, report, device, budget_s, path):
        assert (entry, seed, count, device) == ("moe_mlp", SEED, 2, 0)
        unusual_asked.append(unusual)
        assert (tunes, peers, budget_s, path) in (
            (0, (), None, None), (1, ("humming",), 600.0, Path("races.jsonl"))
        )  # fmt: skip
        for race in races:
            report(race)
        return RandomRaces("moe_mlp", "h200", seed, races=races, **COMMON)

    unusual_asked = []
    monkeypatch.setattr("kernelcat.tune.random_races.race_random", raced)
    text = run("--seed", SEED, "--unusual", "--tune", "1", "--peer", "humming", "--budget", "10m",
               "--out", "races.jsonl").output  # fmt: skip
    assert "1: moe_mlp/cuda/stream (default) 10.0, humming 11.0 1.100" in text
    assert "geometric mean 1.049, 5% percentile 1.005, worst 1.000 (number 0)" in text
    shown = CliRunner().invoke(main, ["regret", "moe_mlp", "--random", "2", "--seed", SEED,
                                      "--json"])  # fmt: skip
    values = json.loads(shown.stdout)
    assert values["races"][1]["ratio"] == 1.1 and values["low_percentile"] == pytest.approx(1.005)
    assert values["regret"] is None and values["races"][0]["slowdown"] is None
    assert unusual_asked == [True, False]
    assert "--random" not in CliRunner().invoke(main, ["bench", "--help"]).output


def test_random_problems_are_tuned_under_a_seed_that_is_no_commit(monkeypatch) -> None:
    tuned = []
    monkeypatch.setattr("kernelcat.tune.tune", lambda entry, **options: tuned.append(options))
    monkeypatch.setattr("kernelcat.cli.tuning._show_report", lambda report, as_json: None)
    entry = catalog.entry("gemm")
    for more, seed in (([], "tune"), (["--seed", "again"], "again")):
        result = CliRunner().invoke(main, ["tune", "gemm", "--random", "3", "--no-peers", *more])
        assert result.exit_code == 0, result.output
        assert list(tuned[-1]["problems"]) == draw(entry, seed, 3) and not tuned[-1]["peers"]
    CliRunner().invoke(main, ["tune", "gemm", "--random", "3", "--unusual"])
    assert list(tuned[-1]["problems"]) == draw(entry, "tune", 3, unusual=True)
    with pytest.raises(InvalidArgument):
        checked_seed("tune")  # so the races of `regret` are on other problems
    for command, message in (
        (["gemm", "--random", "3", "--problem", "M=1,N=2,K=3"], "does not go with --random"),
        (["all_reduce", "--random", "3"], "entry of several ranks"),
        (["--random", "3", "--workload", "w.jsonl"], "does not go with --workload"),
        (["gemm", "--random", "3", "--audit"], "no use for these options: random"),
        (["gemm", "--seed", "x"], "--seed is for --random"),
        (["--seed", "x", "--workload", "w.jsonl"], "--seed is for --random"),
    ):
        result = CliRunner().invoke(main, ["tune", *command])
        assert result.exit_code and message in result.output, result.output


def test_shipped_races_are_shown_seed_by_seed_and_all_together(monkeypatch, tmp_path) -> None:
    def run(*words: str):
        return CliRunner().invoke(main, ["regret", "gemm", "--shipped", *words])

    monkeypatch.setattr(paths, "data", lambda name: tmp_path / name)
    assert "No races of gemm" in run().output
    for seed, us in (("a" * 40, 5.0), ("b" * 40, 20.0)):
        race = RandomRace(0, product(64, 32, 2880).values, "gemm/cuda/wgmma", {}, "nearest", us=us,
                          peers={"cublas": 10.0}, tuned="gemm/cuda/tma", tuned_us=4.0)  # fmt: skip
        races = RandomRaces("gemm", "h200", seed, races=(race,), **COMMON)
        races.write(tmp_path / "tuning_db" / "random" / f"gemm-h200-{seed[:8]}.jsonl")
    shown = run().output
    assert "geometric mean 2.000" in shown and "geometric mean 0.500" in shown
    assert "gemm on h200, 2 seeds of random problems: 2 problems, geometric mean 1.000" in shown
    assert f"regret {6.25**0.5 - 1:.1%} in the mean of 2 tunes, 400.0% at worst" in shown
    assert [each["seed"][0] for each in json.loads(run("--json").stdout)] == ["a", "b"]
    assert shipped("moe_mlp") == [] and len(shipped()) == 2


def test_a_percentile_is_interpolated_and_a_race_without_a_peer_has_no_ratio() -> None:
    assert percentile([1.0, 2.0, 3.0], 0.05) == pytest.approx(1.1)
    assert percentile([4.0], 0.05) == 4.0 and percentile([], 0.05) is None
    alone = RandomRace(0, {}, us=1.0)
    assert alone.ratio is None and alone.best_peer is None
    lonely = RandomRaces("moe_mlp", "h200", SEED, races=(alone,), **COMMON)
    assert lonely.geometric_mean is lonely.low_percentile is None
    assert summary(lonely) == "1 problems, 1 without a peer"


def test_a_problem_follows_from_seed_and_number_alone() -> None:
    entry = catalog.entry("moe_mlp")
    assert draw(entry, SEED, 5)[:3] == draw(entry, SEED, 3) != draw(entry, "f" * 40, 3)
    with pytest.raises(Unsupported, match="no random_problem"):
        draw(catalog.entry("tma_copy"), SEED, 1)
    with pytest.raises(Unsupported, match="no unusual_problem"):
        draw(catalog.entry("tma_copy"), SEED, 1, unusual=True)
    for seed in ("", "main", SEED[1:], SEED.upper()):
        with pytest.raises(InvalidArgument, match="git rev-parse HEAD"):
            checked_seed(seed)


def test_the_default_seed_is_the_commit_of_clean_sources(tmp_path, monkeypatch) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        done = subprocess.run(["git", "-C", tmp_path, *identity, *words], capture_output=True,
                              text=True, check=True)  # fmt: skip
        return done.stdout.strip()

    monkeypatch.setattr(paths, "data", lambda name: tmp_path / name)
    with pytest.raises(InvalidArgument, match="--seed"):
        checkout.commit()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.cu").write_text("")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message=first")
    (tmp_path / "notes").write_text("")
    assert checkout.commit() == git("rev-parse", "HEAD") == checked_seed(checkout.commit())
    (tmp_path / "kernels" / "a.cu").write_text("int a;")
    with pytest.raises(InvalidArgument, match=r"kernels/a.cu differs"):
        checkout.commit()
    monkeypatch.setattr(paths, "data", lambda name: tmp_path / "kernels" / name)
    with pytest.raises(InvalidArgument, match="no checkout"):
        checkout.commit()


@pytest.mark.filterwarnings("ignore:there is no tuning database")
@pytest.mark.parametrize("name", DRAWING)
def test_random_problems_differ_are_served_and_fit_into_memory(name: str) -> None:
    entry, backend, h200 = catalog.entry(name), Cuda(), SKUS["h200"]
    limit = 64e9 if name == "moe_mlp" else 22e9
    problems = draw(entry, SEED, 40)
    assert len(set(problems)) == 40
    for problem in problems:
        assert not entry.problem_name(problem)
        shapes = ((t.shape_of(problem), t.dtype_of(problem)) for t in entry.present(problem))
        assert 5 * sum(math.prod(shape) * dtypes.itemsize(kind) for shape, kind in shapes) < limit
        assert entry.flops(problem) < 2e13
    for problem in problems[:8]:
        assert backend.decide(entry, problem, h200, {}).implementation.serves(h200.arch)


UNUSUAL = [name for name in catalog.names() if catalog.entry(name).unusual_problem]


@pytest.mark.filterwarnings("ignore:there is no tuning database")
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_problems_differ_and_naive_kernels_serve_where_no_other_can(name: str) -> None:
    entry, backend, h200 = catalog.entry(name), Cuda(), SKUS["h200"]
    problems = draw(entry, SEED, 40, unusual=True)
    assert len(set(problems)) == 40 and not any(map(entry.problem_name, problems))
    others = [i for i in catalog.implementations(name) if i.variant != NAIVE]
    for problem in problems:
        if backend.decide(entry, problem, h200, {}).implementation.variant == NAIVE:
            assert not any(next(each.promising(problem, h200), None) for each in others)


def test_unusual_products_have_rows_of_any_alignment() -> None:
    for name in ("gemm", "nvfp4_matmul"):
        problems = draw(catalog.entry(name), SEED, 60, unusual=True)
        for axes in ("N", "K") if name == "gemm" else ("N",):
            assert {math.gcd(problem[axes], 8) for problem in problems} == {1, 2, 4, 8}


ONCE_FITTED = "2026-11-29"
"""Since then a random cache has the pages that its ragged lengths need: docs/decisions.md."""


def with_first_pages(problem: Problem) -> Problem:
    """``problem`` as older races have it: with the pages that its lengths need with one page."""
    if problem.values.get("lengths") != "ragged":
        return problem
    one = Problem.of(problem.entry, **{**problem.values, "pages": 1})
    return Problem.of(problem.entry, **{**problem.values, "pages": pages_needed(one)})


@pytest.mark.parametrize("races", shipped(), ids=lambda races: f"{races.entry}-{races.gpu}")
def test_shipped_races_are_of_the_problems_that_their_seed_draws(races: RandomRaces) -> None:
    entry = catalog.entry(races.entry)
    assert checked_seed(races.seed) and len(races.races) >= 20
    count = len(races.races)
    assert [race.number for race in races.races] == list(range(count))
    raced = [Problem.of(entry.name, **race.problem) for race in races.races]
    drawn = draw(entry, races.seed, count)
    if races.created_at < ONCE_FITTED:
        drawn = [with_first_pages(problem) for problem in drawn]
    assert raced == drawn
    assert races.low_percentile is not None and races.environment["sku"] == races.gpu
    assert not [line(race) for race in races.races if race.us is not None and race.source is None]
    assert sheet(races).lines

"""Tunes of the planted entry, whose candidates fail in every known way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from campaign import seeds

from kernelcat.bench import BLOCKS
from kernelcat.errors import (
    InvalidArgument,
    LaunchError,
    MissingDependency,
    UnknownName,
    Unsupported,
)
from kernelcat.store import SCREEN, Store, decisive
from kernelcat.tune import Interrupted, Limits, Quiet, ladder, race_best_known, tune
from kernelcat.tune import progress as progresses
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.channel import Stopped
from kernelcat.tune.measure import SCREENING_SHARE, Queue, largest_first
from kernelcat.tune.messages import Built
from kernelcat.tune.pool import CompilePool
from kernelcat.tune.progress import Bar, Lines
from kernelcat.tune.supervisor import Supervisor

PLANTED = Path(__file__).parent / "planted"
QUICK = Limits(candidate_s=1.0, compile_s=1.5, peer_s=5)


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Makes the planted backend importable here and in the processes of a tune; its module."""
    paths = [str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("PLANTED_LOG", str(tmp_path / "loads"))
    monkeypatch.syspath_prepend(str(PLANTED))
    import planted

    return planted


@pytest.fixture
def store():
    with Store.open() as opened:
        yield opened


def loads(tmp_path: Path) -> list[str]:
    """Kinds that workers loaded, in order."""
    return [kind for kind, _, _ in load_log(tmp_path)]


def load_log(tmp_path: Path) -> list[tuple[str, int, int]]:
    """Kind, size of the problem and device of each load, in order."""
    log = tmp_path / "loads"
    return (
        [tuple(json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []
    )


def run(store, **options):
    """Tunes the planted problem ``small`` in a burst, unless ``options`` say otherwise."""
    options = {"problems": ["small"], "limits": QUICK, "processes": 1, "progress": Quiet(),
               "states": ["burst"], **options}  # fmt: skip
    return tune("planted", backend="planted:Backend", store=store, **options)


def winner_of(report, state="burst"):
    """The winner for the first problem of a report."""
    return report.problems[0].winners["eager", state]


def kinds(rows, status=None) -> Counter[str]:
    """Kind (of a peer: its name) -> number of rows with ``status``."""
    selected = (row for row in rows if status is None or row.status == status)
    return Counter(row.config.get("kind", row.variant) for row in selected)


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


def start_tune(*devices: str) -> subprocess.Popen[str]:
    """A tune in a process group that Ctrl-C reaches, also where this process ignores SIGINT."""
    command = [sys.executable, str(PLANTED / "drive.py"), *devices]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for_rows(count: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        path = Path(os.environ["KERNELCAT_DB"])
        if path.exists():
            with Store.open() as store:
                if len(store.rows()) >= count:
                    return
        time.sleep(0.2)
    raise AssertionError("the tune wrote nothing")


@seeds(20)
def test_a_killed_tune_loses_nothing_and_the_next_tune_goes_on(seed: int) -> None:
    tuning = start_tune()
    wait_for_rows(5)
    time.sleep(seed * 0.15)
    os.killpg(tuning.pid, signal.SIGKILL)
    tuning.wait()
    with Store.open() as store:
        kept = {row.digest for row in store.rows()}
        known = {row.config["kind"] for row in store.rows()}
        report = run(store)
        rows = store.rows()
    assert kept <= {row.digest for row in rows}
    screened = kinds(r for r in rows if r.protocol["state"] == SCREEN)
    late = {"tires", "neglects"}  # pass screening, fail in the race
    for kind in late:
        del screened[kind]
    assert set(screened.values()) == {1}, "something was screened twice"
    assert len(known) >= 5 and not known & set(kinds(report.rows, "wrong")) - late
    assert winner_of(report).candidate.config["kind"] == "fast"


@pytest.mark.parametrize("devices", [["0"], ["0", "1"]], ids=" ".join)
def test_control_c_keeps_all_rows_and_prints_how_to_go_on(planted, devices) -> None:
    tuning = start_tune(*devices)
    wait_for_rows(3)
    os.killpg(tuning.pid, signal.SIGINT)
    output, _ = tuning.communicate(timeout=20)
    assert tuning.returncode == 130
    again = "".join(f" --device {number}" for number in devices)
    assert f"go on with: kernelcat tune planted{again} --problem small" in output
    with Store.open() as store:
        rows = store.rows()
    assert f"{len(rows)} measurements are kept" in output
    for row in rows:
        assert row.status in ("passed", planted.STATUS.get(row.config["kind"])), row


def test_an_orphaned_worker_dies_even_in_an_endless_loop(tmp_path) -> None:
    code = (
        "import os, signal, planted\n"
        "from kernelcat.tune.supervisor import Supervisor\n"
        "s = Supervisor('planted:Backend'); s.place(planted.ENTRY.named('small'))\n"
        "print(s.channel.process.pid, flush=True)\n"
        "from kernelcat.tune.candidate import Candidate\n"
        "s.screen(Candidate('cuda', 'bad', {'kind': 'hangs'}), 1e4, None)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    while "hangs" not in loads(tmp_path):
        time.sleep(0.02)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 5
    while running(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not running(worker)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_interrupted_is_a_keyboard_interrupt() -> None:
    assert issubclass(Interrupted, KeyboardInterrupt)


def test_a_failure_that_the_candidate_did_not_cause_is_not_recorded(planted, store, monkeypatch):
    monkeypatch.setenv("PLANTED_FULL", "fast")
    report = run(store, variants=["honest"], peers=False)
    assert kinds(report.rows)["fast"] == 0
    assert "kind=fast was left out: device memory is full" in report.notes[0]
    monkeypatch.delenv("PLANTED_FULL")
    report = run(store, variants=["honest"], peers=False)
    assert report.problems[0].tried["passed"] == 1
    assert winner_of(report).candidate.config["kind"] in ("fast", "good")


def test_a_worker_that_cannot_start_is_an_error_with_the_reason(store, monkeypatch) -> None:
    monkeypatch.setenv("PLANTED_ABSENT", "1")
    with pytest.raises(MissingDependency, match="pip install planted"):
        run(store)
    assert not store.rows()


def test_a_gpu_that_does_not_start_is_an_error_before_another_one_measures(
    store, monkeypatch
) -> None:
    hello = Supervisor.hello

    def absent(self, *tries):
        if self.index == 1:
            raise MissingDependency("pip install planted")
        return hello(self, *tries)

    monkeypatch.setattr(Supervisor, "hello", absent)
    with pytest.raises(MissingDependency, match="pip install planted"):
        run(store, **BOTH)
    assert not store.rows()


BOTH = {"problems": ["small", "large"], "devices": "all", "variants": ["honest"], "peers": False}


def test_two_gpus_share_a_tune(store, tmp_path) -> None:
    report = run(store, processes=2, **BOTH)
    assert [problem.name for problem in report.problems] == ["small", "large"]
    assert all(problem.winners for problem in report.problems)
    assert {row.run for row in report.rows} == {report.run} and report.restarts == 0
    assert {row.digest for row in store.rows()} == {row.digest for row in report.rows}
    screened = Counter((row.config["kind"], row.problem_name) for row in report.rows
                       if row.state == SCREEN)  # fmt: skip
    assert len(screened) == 8 and set(screened.values()) == {1}
    places = {(size, device) for _, size, device in load_log(tmp_path)}
    assert len(places) == 2 and {device for _, device in places} == {0, 1}

    again = run(store, **BOTH)
    assert not any(problem.tried for problem in again.problems)
    before = [problem.winners["eager", "burst"].candidate for problem in report.problems]
    assert [problem.winners["eager", "burst"].candidate for problem in again.problems] == before


def test_a_hang_on_one_gpu_does_not_affect_the_other(store, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PLANTED_HANG", "good on 1")
    report = run(store, processes=2, **BOTH)
    where = {device: size for _, size, device in load_log(tmp_path)}
    status = {row.problem["n"]: row.status for row in report.rows if row.config["kind"] == "good"}
    assert status == {where[0]: "passed", where[1]: "timeout"}
    assert all(problem.winners for problem in report.problems) and report.restarts == 2


def test_a_lost_gpu_is_an_error_after_the_other_gpu_has_tuned_all(store, monkeypatch) -> None:
    place = Supervisor.place

    def lost(self, problem, seed):
        if self.index == 1:
            raise LaunchError("the GPU does not recover")
        return place(self, problem, seed)

    monkeypatch.setattr(Supervisor, "place", lost)
    with pytest.raises(LaunchError, match="does not recover"):
        run(store, **BOTH)
    assert len(store.winners(gpu="planted", regime="eager")) == 2


def test_gpus_of_two_skus_are_not_tuned_together(planted, store, monkeypatch) -> None:
    gpu = staticmethod(lambda index: replace(planted.GPU, sku=f"planted{index}"))
    monkeypatch.setattr(planted.Backend, "gpu", gpu)
    with pytest.raises(InvalidArgument, match="GPU 0 is a planted0 and GPU 1 a planted1"):
        run(store, **BOTH)
    with pytest.raises(InvalidArgument, match="at least one"):
        run(store, devices=())


def test_the_largest_problems_come_first_and_shares_of_the_budget_are_equal(planted) -> None:
    problems = list(planted.ENTRY.problems.values())
    assert largest_first(planted.ENTRY, problems, planted.GPU) == problems[::-1]
    queue, shares = Queue(problems * 2, 2, 100.0), []
    for problem, deadline in iter(queue.take, None):
        with queue.turn(problem):
            shares.append(round((deadline - time.monotonic()) / SCREENING_SHARE))
    assert shares == [
        50,
        67,
        100,
        100,
    ]  # of 100 s, with 4, 3, 2, 1 problems for two GPUs
    _, deadline = Queue(problems[:1], 2, None).take()
    assert deadline == float("inf")


def test_closing_a_worker_is_no_failure_of_the_candidate(planted, tmp_path) -> None:
    supervisor = Supervisor("planted:Backend")
    supervisor.place(planted.ENTRY.named("small"))
    closing = threading.Thread(target=close_when_loaded, args=(supervisor, "hangs", tmp_path))
    closing.start()
    with pytest.raises(Stopped):
        supervisor.screen(Candidate("cuda", "bad", {"kind": "hangs"}), 1e4, None)
    closing.join()
    with pytest.raises(Stopped):
        supervisor.hello()


def close_when_loaded(supervisor: Supervisor, kind: str, tmp_path: Path) -> None:
    while kind not in loads(tmp_path):
        time.sleep(0.02)
    supervisor.close()


def test_closing_the_compile_pool_is_no_failure_of_a_candidate(planted) -> None:
    pool = CompilePool("planted:Backend", planted.GPU, 1)
    threading.Timer(0.5, pool.close).start()
    candidates = [Candidate("cuda", "bad", {"kind": kind}) for kind in ("never_compiles", "lies")]
    with pytest.raises(Stopped):
        list(pool.build(planted.ENTRY.named("small"), candidates))


def test_problems_share_the_compiling_processes(planted, monkeypatch) -> None:
    built = []

    def build(self, problem, candidate):
        built.append(problem)
        time.sleep(0.01)
        return Built()

    monkeypatch.setattr(CompilePool, "_build", build)
    pool = CompilePool("planted:Backend", planted.GPU, 1)
    small, large = planted.ENTRY.problems.values()
    many = [Candidate("cuda", "honest", {"kind": i}) for i in range(50)]
    first, second = pool.build(small, many), pool.build(large, many)
    next(first)
    next(second)
    assert built.count(small) <= 4
    assert len([*first, *second]) == 2 * (50 - 1) and Counter(built) == {small: 50, large: 50}
    pool.close()


@pytest.mark.parametrize("host_timed", [(), ("eager",)])
def test_the_next_problem_is_compiled_while_one_is_raced(store, monkeypatch, host_timed) -> None:
    """Not beside a race whose times are the host's."""
    events: list[tuple[str, int | None]] = []
    build, place, race = CompilePool.build, Supervisor.place, Supervisor.race

    def building(self, problem, candidates):
        events.append(("build", problem["n"]))
        return build(self, problem, candidates)

    def placing(self, problem, *args):
        events.append(("place", problem["n"]))
        return place(self, problem, *args)

    def racing(self, *args):
        events.append(("race", None))
        return race(self, *args)

    monkeypatch.setattr(sys.modules[Queue.__module__], "HOST_TIMED", host_timed)
    monkeypatch.setattr(CompilePool, "build", building)
    monkeypatch.setattr(Supervisor, "place", placing)
    monkeypatch.setattr(Supervisor, "race", racing)
    report = run(store, problems=["small", "large"], variants=["honest"], peers=False, processes=2)
    assert [problem.known for problem in report.problems] == [0, 0]
    assert all(problem.winners for problem in report.problems)
    _, large = (number for kind, number in events if kind == "place")
    is_ahead = events.index(("build", large)) < events.index(("place", large))
    assert is_ahead == (not host_timed)
    assert events.count(("build", large)) == 1 + is_ahead


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

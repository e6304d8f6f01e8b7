"""Worker processes, compile pools and GPUs of tunes of the planted entry: killed, lost, shared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import planted_tunes
import pytest
from campaign import seeds
from planted_tunes import (
    PLANTED,
    kinds,
    load_log,
    loads,
    run,
    winner_of,
)
from processes import hear_ctrl_c, is_running

from kernelcat.errors import (
    InvalidArgument,
    LaunchError,
    MissingDependency,
)
from kernelcat.store import SCREEN, Store
from kernelcat.tune import Interrupted, Limits
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.channel import Stopped
from kernelcat.tune.measure import SCREENING_SHARE, Queue, largest_first
from kernelcat.tune.messages import Built
from kernelcat.tune.pool import CompilePool
from kernelcat.tune.supervisor import Supervisor

planted, store = planted_tunes.planted, planted_tunes.store


def start_tune(*devices: str) -> subprocess.Popen[str]:
    """A tune in a process group that Ctrl-C reaches, also where this process ignores SIGINT."""
    command = [sys.executable, str(PLANTED / "drive.py"), *devices]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_ctrl_c,
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
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(worker)


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
    limits = Limits(candidate_s=4.0)  # on a busy machine a kernel that works may take a second
    report = run(store, processes=2, limits=limits, **BOTH)
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

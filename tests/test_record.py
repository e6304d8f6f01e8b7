"""``kernelcat.record``: every call counts once, in whatever thread or process it is made.

`host_machine.py` replaces the GPU, as in `test_dispatch.py`.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import timeit
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from host_machine import Host, HostLauncher, choice, half, installed, kernel

import kernelcat
from kernelcat import catalog, store
from kernelcat.call import recording
from kernelcat.call.choice import Decision, choose
from kernelcat.catalog.implementation import Config
from kernelcat.errors import LaunchError, StoreError
from kernelcat.runtime import gpu
from kernelcat.store import workload
from kernelcat.store.workload import Use

TESTS = Path(__file__).parent
B = half(6, 8)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with installed(monkeypatch) as host:
        yield host


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "workload.jsonl"


def counts(path: Path) -> dict[int, tuple[int, int]]:
    """M of the problem -> (calls, captured calls)."""
    return {use.problem["M"]: (use.calls, use.captured) for use in workload.read(path)}


# ---- what is counted ---------------------------------------------------------------------------


def test_a_block_writes_the_problems_that_it_calls(host: Host, path: Path) -> None:
    host.rows = (choice(4, median_us=2.0), choice(5, median_us=6.0))
    op = kernelcat.get("gemm")
    op(half(4, 8), B)
    with kernelcat.record(path):
        for _ in range(3):
            op(half(4, 8), B)
            op(half(4, 8), B, out=half(4, 6))
        op(half(5, 8), B)
    op(half(5, 8), B)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    problem = {"M": 4, "N": 6, "K": 8, "dtype": "float16"}
    assert first["entry"] == "gemm" and problem.items() <= first["problem"].items()
    assert (first["calls"], first["us"], first["basis"], first["why"]) == (
        6,
        2.0,
        "measured",
        "exact",
    )
    assert (first["served"], first["why"]) == ("gemm/triton/tiled", "exact")
    assert first["config"] == {"tile": 64}
    assert (second["problem"]["M"], second["calls"]) == (5, 1)
    assert (first["share"], second["share"]) == (round(12 / 18, 4), round(6 / 18, 4))


def test_counts_are_added_to_those_of_the_file(host: Host, path: Path) -> None:
    op = kernelcat.get("gemm")
    for _ in range(2):
        with kernelcat.record(path):
            op(half(4, 8), B)
            op(half(4, 8), B)
    assert counts(path) == {4: (4, 0)}
    host.rows = (choice(4),)
    kernelcat.reload()
    with kernelcat.record(path):
        op(half(4, 8), B)
    assert sorted((use.why, use.calls) for use in workload.read(path)) == [
        ("default", 4),
        ("exact", 1),
    ]


def test_calls_cost_the_same_before_and_after_a_block(host: Host, path: Path) -> None:
    host.rows = (choice(4),)
    op, a, d = kernelcat.get("gemm"), half(4, 8), half(4, 6)
    bound = op.bind(a, B, out=d)
    with kernelcat.record(path):
        op(a, B, out=d)
        inside = op.bind(a, B, out=d)
        assert not any(type(call.launch) is HostLauncher for call in op._fast_calls.values())
    op(a, B, out=d)
    op(a, B, out=d)
    [call], loads = op._fast_calls.values(), len(host.loads)
    assert type(call.launch) is HostLauncher and loads == 1
    assert [recent for recent in op._onto if recent] == [[call]]
    assert type(bound._launch) is type(inside._launch) is HostLauncher


def test_bound_calls_count_wherever_they_were_bound(host: Host, path: Path) -> None:
    op, a, d = kernelcat.get("gemm"), half(4, 8), half(4, 6)
    before = op.bind(a, B, out=d)
    with kernelcat.record(path):
        before()
        inside = op.bind(a, B, out=d)
        inside()
        op.plan(M=4, N=6, K=8, dtype="float16")(a, B)
    before()
    inside()
    assert counts(path) == {4: (3, 0)}


def test_captured_calls_are_counted_apart(host: Host, path: Path) -> None:
    op = kernelcat.get("gemm")
    with kernelcat.record(path):
        op(half(4, 8), B)
        host.capturing = True
        op(half(4, 8), B)
        op(half(4, 8), B)
    [use] = workload.read(path)
    assert (use.calls, use.captured) == (1, 2)
    assert (use.cost_us(), use.cost_us(replays=100)) == (3 * use.us, 201 * use.us)


def test_a_launch_that_fails_does_not_count(host: Host, path: Path, monkeypatch) -> None:
    op = kernelcat.get("gemm")

    def fail(*_: Any) -> None:
        raise LaunchError("refused")

    with kernelcat.record(path):
        op(half(4, 8), B)
        monkeypatch.setattr(HostLauncher, "__call__", fail)
        with pytest.raises(LaunchError):
            op(half(4, 8), B)
    assert counts(path) == {4: (1, 0)}


def test_unaligned_arrays_and_operators_of_torch_count_once(host: Host, path: Path) -> None:
    op = kernelcat.get("gemm")
    with kernelcat.record(path), pytest.warns(UserWarning, match="copied"):
        op(half(4, 8, offset=1), B)
    assert counts(path) == {4: (1, 0)}


def test_blocks_may_overlap(host: Host, path: Path, tmp_path: Path) -> None:
    op, other = kernelcat.get("gemm"), tmp_path / "other.jsonl"
    with kernelcat.record(path):
        op(half(4, 8), B)
        with kernelcat.record(other):
            op(half(4, 8), B)
        op(half(5, 8), B)
    assert counts(path) == {4: (2, 0), 5: (1, 0)} and counts(other) == {4: (1, 0)}


def test_what_was_called_before_an_exception_is_written(host: Host, path: Path) -> None:
    with pytest.raises(KeyError), kernelcat.record(path):
        kernelcat.get("gemm")(half(4, 8), B)
        raise KeyError
    assert counts(path) == {4: (1, 0)}


# ---- times -------------------------------------------------------------------------------------


def test_times_are_measured_scaled_or_predicted() -> None:
    h200 = gpu.SKUS["h200"]
    linear = kernel(
        "triton", "tiled", 1,
        estimate=lambda problem, config, where: problem["M"] * config["tile"] / where.bandwidth,
    )  # fmt: skip
    row, here = choice(4, tile=64, median_us=5.0), choice(8).problem

    def time_of(problem: Any, why: str, evidence: Any) -> Any:
        decision = Decision(linear, Config(tile=16), why, evidence)
        return recording.time_of(problem, h200, decision)

    assert time_of(row.problem, "exact", row) == (5.0, "measured")
    us, basis = time_of(here, "nearest", row)
    assert (us, basis) == (pytest.approx(5.0 * 8 * 16 / (4 * 64)), "scaled")
    prediction = (8 * 16 / h200.bandwidth, "predicted")
    assert time_of(here, "default", None) == prediction
    assert time_of(here, "predicted", choice(8, kind="predicted")) == prediction
    sibling = choice(8, tile=16, gpu="h100", median_us=6.0)
    us, _ = time_of(here, "borrowed", sibling)
    assert us == pytest.approx(6.0 * gpu.SKUS["h100"].bandwidth / h200.bandwidth)


@pytest.mark.parametrize("name", catalog.names())
@pytest.mark.filterwarnings("ignore:there is no tuning database")
def test_every_problem_that_is_served_has_a_time(name: str) -> None:
    """With the shipped results of the H200; a scaled time of a problem's own row is that row's."""
    entry, h200, known = catalog.entry(name), gpu.SKUS["h200"], store.snapshot()
    for problem in [*entry.problems.values()][::4]:
        decision = choose(entry, problem, h200, known.choices(name))
        us, basis = recording.time_of(problem, h200, decision)
        assert 0 < us < 1e7 and (basis == "measured") == (decision.why == "exact")
        if basis == "measured":
            scaled = recording.time_of(problem, h200, replace(decision, why="nearest"))
            assert scaled == (pytest.approx(us), "scaled")


# ---- threads and processes ---------------------------------------------------------------------


def test_threads_lose_no_count(host: Host, path: Path, monkeypatch) -> None:
    monkeypatch.setattr(HostLauncher, "__call__", lambda *_: None)
    monkeypatch.setattr(recording, "FLUSH_S", 0.001)
    op, a, d = kernelcat.get("gemm"), half(4, 8), half(4, 6)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with kernelcat.record(path):
            threads = [
                threading.Thread(target=lambda: [op(a, B, out=d) for _ in range(2000)])
                for _ in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert counts(path) == {4: (16_000, 0)}


def test_blocks_begin_and_end_while_threads_call(host: Host, path: Path, monkeypatch) -> None:
    """No call stays wrapped after the last block, and no call within a block is lost."""
    monkeypatch.setattr(HostLauncher, "__call__", lambda *_: None)
    host.rows = (choice(4),)
    op, a, d, done = kernelcat.get("gemm"), half(4, 8), half(4, 6), threading.Event()
    bounds: list[Any] = []

    def work() -> None:
        while not done.is_set():
            op(a, B, out=d)
            bounds[:] = [op.bind(a, B, out=d), *bounds[:20]]

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        with kernelcat.record(path):
            op(a, B, out=d)
    done.set()
    for thread in threads:
        thread.join()
    for _ in range(2):
        op(a, B, out=d)
    assert all(type(call.launch) is HostLauncher for call in op._fast_calls.values())
    recent = [call for calls in op._onto for call in calls]
    assert all(type(call.launch) is HostLauncher for call in recent)
    assert all(type(bound._launch) is HostLauncher for bound in bounds)
    assert counts(path)[4][0] >= 20


HEAD = f"""
import os, sys, time, threading, multiprocessing
sys.path.insert(0, {str(TESTS)!r})
import pytest
from host_machine import *
import kernelcat
from kernelcat.call import recording
with installed(pytest.MonkeyPatch()) as host:
    op, a, b = kernelcat.get('gemm'), half(4, 8), half(6, 8)
"""


def script(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """A process with the host machine, ``op``, ``a`` and ``b``, that runs ``code``."""
    return process(HEAD + textwrap.indent(code, "    "), *arguments, **environment)


def process(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors


def test_the_variable_records_whole_processes_and_their_forks(path: Path) -> None:
    """Two processes; each calls 10 times, and forks children of three kinds."""
    code = """
for _ in range(10): op(a, b)
context = multiprocessing.get_context("fork")
workers = [context.Process(target=lambda: [op(a, b) for _ in range(100)]) for _ in range(2)]
for worker in workers: worker.start()
for worker in workers: worker.join()
child = os.fork()
if not child:
    for _ in range(1000): op(a, b)
    op(half(5, 8), b)
    sys.exit(0)
os.waitpid(child, 0)
"""
    finish(script(code, KERNELCAT_RECORD=str(path)), script(code, KERNELCAT_RECORD=str(path)))
    assert counts(path) == {4: (2 * (10 + 200 + 1000), 0), 5: (2, 0)}


def test_a_worker_that_imports_kernelcat_itself_is_recorded(path: Path) -> None:
    """Such a worker of multiprocessing ends without ``atexit``."""
    code = (
        f"import multiprocessing\nworker = {HEAD + '    op(a, b)'!r}\n"
        "p = multiprocessing.get_context('fork').Process(target=exec, args=(worker, {}))\n"
        "p.start()\np.join()\nassert p.exitcode == 0\n"
    )
    finish(process(code, KERNELCAT_RECORD=str(path)))
    assert counts(path) == {4: (1, 0)}


def test_a_relative_path_is_that_of_the_start(tmp_path: Path) -> None:
    code = "with kernelcat.record('here.jsonl'):\n    os.chdir('/')\n    op(a, b)"
    running = script(f"os.chdir({str(tmp_path)!r})\n{code}")
    finish(running)
    assert counts(tmp_path / "here.jsonl") == {4: (1, 0)}


def test_a_killed_program_loses_only_the_last_seconds(path: Path) -> None:
    code = """
recording.FLUSH_S = 0.05
with kernelcat.record(sys.argv[1]):
    for _ in range(7): op(a, b)
    time.sleep(100)
"""
    running = script(code, path)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (path.exists() and counts(path)):
        time.sleep(0.05)
    time.sleep(0.3)  # longer than a write
    running.send_signal(signal.SIGKILL)
    running.communicate()
    assert counts(path) == {4: (7, 0)}


def test_a_recorder_whose_file_cannot_be_written_tries_again(
    host: Host, path: Path, monkeypatch
) -> None:
    recorder, add = recording.Recorder(path), workload.add
    recorder.start()
    kernelcat.get("gemm")(half(4, 8), B)

    def fail(*_: Any) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(workload, "add", fail)
    with pytest.warns(UserWarning, match="not recorded: the disk is full"):
        recorder._flush_or_warn()
    monkeypatch.setattr(workload, "add", add)
    recorder.stop()
    assert counts(path) == {4: (1, 0)}


def test_a_file_that_is_no_workload_stays_as_it_is(host: Host, path: Path) -> None:
    path.write_text("my notes\n")
    refused = pytest.raises(StoreError, match=r"workload.jsonl:1 is no line of a workload")
    with refused, kernelcat.record(path):
        raise AssertionError("the block must not begin")
    assert path.read_text() == "my notes\n"
    running = script("op(a, b)", KERNELCAT_RECORD=str(path))
    _, errors = running.communicate()
    assert running.returncode == 0 and "KERNELCAT_RECORD: calls are not recorded" in errors
    assert path.read_text() == "my notes\n"


# ---- cost --------------------------------------------------------------------------------------


def test_recording_costs_less_than_2_us_a_call(host: Host, path: Path, monkeypatch) -> None:
    """The best of several runs, which take turns: a busy machine is slow for seconds. The driver's
    query is replaced by a call of C of the same form."""
    from ctypes import CDLL

    from kernelcat.runtime import driver

    library = SimpleNamespace(cuStreamIsCapturing=CDLL(None).abs, cuLaunchKernelEx=None)
    opened = driver.Driver(library)
    monkeypatch.setattr(driver, "opened", lambda: opened)
    monkeypatch.setattr(HostLauncher, "__call__", lambda *_: None)
    host.rows = (choice(4),)
    op, a, d = kernelcat.get("gemm"), half(4, 8), half(4, 6)

    def best_us() -> float:
        call = timeit.Timer(lambda: op(a, B, out=d), timer=time.thread_time)
        return min(call.repeat(4, 1000)) / 1000 * 1e6

    plain = recorded = math.inf
    op(a, B, out=d)
    for _ in range(8):
        plain = min(plain, best_us())
        with kernelcat.record(path):
            op(a, B, out=d)
            recorded = min(recorded, best_us())
    assert recorded - plain < 2.0


# ---- files -------------------------------------------------------------------------------------


def use(**fields: Any) -> Use:
    problem = catalog.entry("gemm").problem(M=4, N=6, K=8, dtype="float16")
    default = Use(
        "gemm", problem.values, "h200", "gemm/cuda/wgmma", {"tile": 1}, "nearest", 2.0, "scaled"
    )
    return Use(**{**vars(default), **fields})


def test_lines_are_merged_by_all_that_identifies_them(path: Path) -> None:
    workload.add(path, [use(calls=3), use(calls=1, gpu="h100")])
    workload.add(path, [use(calls=4, captured=1, us=3.0, basis="measured")])
    first, second = workload.read(path)
    assert first == use(calls=7, captured=1, us=3.0, basis="measured")
    assert second == use(calls=1, gpu="h100")
    assert workload.shares([first, second]) == [1.0, 1.0]
    assert list(path.parent.glob("*.tmp")) == []


@pytest.mark.parametrize(
    "line",
    ["{}", "[]", "{", '{"entry": 1}', json.dumps({**vars(use()), "calls": -1}),
     json.dumps({**vars(use()), "us": float("inf")}), json.dumps({**vars(use()), "problem": [1]}),
     json.dumps({**vars(use()), "gpu": None}), json.dumps({**vars(use()), "calls": "3"})],
)  # fmt: skip
def test_lines_that_are_none_are_refused(path: Path, line: str) -> None:
    path.write_text(f"{line}\n")
    with pytest.raises(StoreError, match=r"workload.jsonl:1 is no line"):
        workload.read(path)


def test_a_missing_file_and_a_folder_are_refused_in_one_line(path: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot read the workload .*No such file"):
        workload.read(path)
    with pytest.raises(StoreError, match="Is a directory"):
        workload.add(tmp_path, [])

"""A hang or a crash counts only if it repeats in a fresh process, and not for ever."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from campaign import seeds, share
from processes import children, is_running

from kernelcat.catalog.implementation import Config
from kernelcat.jit import cache
from kernelcat.store import Store
from kernelcat.store.measurement import Measurement
from kernelcat.tune import Limits, Quiet, tune
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.failure import tried_again
from kernelcat.tune.messages import SKIPPED, Failed, Passed
from kernelcat.tune.rows import DOUBT_ENDS, History
from kernelcat.tune.supervisor import Supervisor

PLANTED = Path(__file__).parent.parent / "planted"
SAMPLE = Path(__file__).parent.parent / "measurement.json"
KILLS = max(6, share(30))
"""Processes killed in one trial. A campaign has 10 trials: 300 kills."""


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    paths = [str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("PLANTED_LOG", str(tmp_path / "loads"))
    monkeypatch.syspath_prepend(str(PLANTED))
    import planted

    return planted


CRASH, KILLED = Failed("crashed", "SIGSEGV", fatal=True), Failed(
    SKIPPED, "killed by SIGKILL", fatal=True, outside=True
)  # fmt: skip


def replies(*outcomes):
    """The reply to a request that is answered with ``outcomes``, and how often it was sent."""
    waiting = list(outcomes)
    reply = tried_again(lambda patience: waiting.pop(0))
    return reply, len(outcomes) - len(waiting)


def test_a_crash_counts_if_it_repeats_and_says_what_it_saw() -> None:
    passed = Passed(0.0, None)
    assert replies(CRASH, passed) == (passed, 2)
    reply, tries = replies(CRASH, CRASH, passed)
    assert reply.status == "crashed" and tries == 2
    assert reply.detail.startswith("twice, in fresh processes: SIGSEGV; load ")


def test_a_process_that_others_end_proves_nothing() -> None:
    passed = Passed(0.0, None)
    assert replies(KILLED, CRASH, KILLED, passed) == (passed, 4)
    reply, _ = replies(KILLED, KILLED, KILLED, KILLED)
    assert reply.status == SKIPPED


def test_a_worker_that_is_killed_is_no_failure_of_the_candidate(planted) -> None:
    supervisor = Supervisor("planted:Backend")
    supervisor.place(planted.ENTRY.named("small"))
    os.kill(supervisor.channel.process.pid, signal.SIGKILL)
    timing = supervisor.screen(Candidate("cuda", "honest", Config(kind="fast")), 1e4, None)
    supervisor.close()
    assert timing.samples and supervisor.restarts == 1


def test_where_the_cache_cannot_be_written_a_candidate_has_time_to_compile(monkeypatch) -> None:
    monkeypatch.setattr(cache, "folder", lambda: Path("/dev/null/kernelcat"))
    limits, notes = Limits(candidate_s=20, compile_s=180).for_cache()
    assert limits.candidate_s == 200 and "/dev/null/kernelcat" in notes[0]
    monkeypatch.undo()
    assert Limits().for_cache() == (Limits(), [])


@pytest.mark.parametrize(("status", "counts"), [("crashed", False), ("timeout", False),
                                                ("wrong", True)])  # fmt: skip
def test_a_doubtful_verdict_expires(status: str, counts: bool) -> None:
    row = replace(
        Measurement.from_line(SAMPLE.read_text().replace("\n", "")),
        status=status, median_us=None, ci_us=None, samples=0, winner=False,
    )  # fmt: skip
    owner = (row.language, row.variant)
    for age, failed in ((timedelta(), True), (DOUBT_ENDS * 1.1, counts)):
        then = (datetime.now(UTC) - age).isoformat()
        history = History.of([replace(row, created_at=then)], {}, {owner: row.source}, row.regime)
        assert bool(history.failed) == failed


@seeds(10)
def test_killed_processes_leave_no_orphan_no_innocent_verdict_and_the_same_winner(seed) -> None:
    dice, known, started = random.Random(seed), set[str](), set[int]()
    code = (
        "from kernelcat.tune import Limits, Quiet, tune\n"
        "tune('planted', backend='planted:Backend', problems=['small'], variants=['honest'],\n"
        "     processes=1, progress=Quiet(), peers=False, states=['burst'], limits=Limits())\n"
    )
    tuning = subprocess.Popen([sys.executable, "-c", code])
    for _ in range(KILLS):
        if tuning.poll() is not None:
            tuning = subprocess.Popen([sys.executable, "-c", code])
        time.sleep(dice.uniform(0.0, 1.5))
        victims = [*children(tuning.pid), tuning.pid]
        started |= set(victims)
        kill(dice.choice(victims))
        with Store.open() as store:
            rows = {row.digest for row in store.rows()}
        assert known <= rows, "a row is lost"
        known = rows
    tuning.kill()
    tuning.wait()
    deadline = time.monotonic() + 10
    while any(map(is_running, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, started)), "an orphan runs"
    with Store.open() as store:
        report = tune("planted", backend="planted:Backend", store=store, problems=["small"],
                      variants=["honest"], progress=Quiet(), peers=False, states=["burst"],
                      processes=1, limits=Limits())  # fmt: skip
        assert {row.status for row in store.rows()} == {"passed"}, "an innocent verdict"
    assert report.problems[0].winners["eager", "burst"].candidate.config["kind"] == "fast"


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

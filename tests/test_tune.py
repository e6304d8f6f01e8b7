"""The tuner against a planted language in which everything that can go wrong does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from kernelcat.bench import BLOCKS
from kernelcat.errors import InvalidArgument, MissingDependency, UnknownName, Unsupported
from kernelcat.store import SCREEN, Store, decisive
from kernelcat.tune import Interrupted, Limits, Quiet, bench, ladder, tune
from kernelcat.tune.candidate import Candidate

PLANTED = Path(__file__).parent / "planted"
QUICK = Limits(candidate_s=1.5, compile_s=2.5, peer_s=5)


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The planted backend's module, importable here and in the tuner's processes."""
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
    """Kinds that a worker loaded, in order."""
    log = tmp_path / "loads"
    return [json.loads(line)[0] for line in log.read_text().splitlines()] if log.exists() else []


def run(store, **options):
    options = {"problems": ["small"], "limits": QUICK, "processes": 1, "progress": Quiet(),
               "states": ["burst"], **options}  # fmt: skip
    return tune("planted", backend="planted:Backend", store=store, **options)


def won(report, state="burst"):
    """Who won the first problem."""
    return report.problems[0].winners["eager", state]


def kinds(rows, status=None) -> Counter[str]:
    chosen = (row for row in rows if status is None or row.status == status)
    return Counter(row.config.get("kind", row.variant) for row in chosen)


def test_every_planted_failure_is_recorded_and_none_stops_the_tune_wins_or_is_tried_again(
    planted, store, tmp_path
) -> None:
    report = run(store, processes=2)
    found = {row.config["kind"]: row for row in report.rows if row.variant == "bad"}
    assert {kind: row.status for kind, row in found.items()} == planted.STATUS
    assert all(row.detail and row.median_us is None for row in found.values())
    assert "wrote outside of dst" in found["overruns"].detail
    assert "SIGSEGV" in found["segfaults"].detail
    assert "after the timed runs" in found["tires"].detail
    problem = report.problems[0]
    assert won(report).candidate == Candidate("cuda", "honest", {"kind": "fast"})
    assert set(problem.skipped_peers) == {"absent", "unable", "broken"}
    assert won(report).peer == "host"
    assert won(report).vs_peer[1] > 1.5
    assert report.restarts == 2  # the endless one and the segmentation fault
    [race] = store.winners(gpu="planted", entry="planted", regime="eager")
    assert race.winner.config == {"kind": "fast"}
    assert [peer.variant for peer in race.peers] == ["host"]
    assert race.winner.samples == BLOCKS and race.winner.protocol["l2"] == "cold"
    assert {row.digest for row in store.rows()} == {row.digest for row in report.rows}

    (tmp_path / "loads").unlink()
    again = run(store)
    assert again.problems[0].known == 12 and not again.problems[0].tried
    assert not set(loads(tmp_path)) & set(planted.STATUS)
    assert again.restarts == 0
    assert won(again).candidate == won(report).candidate
    assert not kinds(again.rows) & kinds(again.rows, "wrong")


def test_an_incumbent_loses_its_place_by_a_race_only(store) -> None:
    """A tune of other variants races it all the same."""
    first = run(store, peers=False).problems[0].winners["eager", "burst"].candidate
    assert first.variant == "honest"
    again = run(store, variants=["bad"], peers=False)
    raced = {row.variant for row in again.rows if row.protocol["state"] != SCREEN}
    assert "honest" in raced
    assert won(again).candidate == first


def test_a_changed_source_is_tried_again(planted, store, monkeypatch) -> None:
    honest = {"variants": ["honest"], "peers": False}
    assert run(store, **honest).problems[0].known == 0
    monkeypatch.setattr(planted.Backend, "digest", lambda self, i: "another")
    assert run(store, **honest).problems[0].known == 0
    assert run(store, fresh=True, **honest).problems[0].tried["passed"] == 4


def test_halving_finds_the_same_winner_and_a_budget_cuts_short(store) -> None:
    honest = {"variants": ["honest"], "peers": False, "fresh": True}
    report = run(store, strategy="halving", **honest)
    assert won(report).candidate.config["kind"] == "fast"
    assert kinds(r for r in report.rows if r.protocol["state"] == SCREEN) == Counter(
        slow=1, good=2, close=1, fast=3
    )
    report = run(store, budget_s=0.0, **honest)
    assert report.problems[0].cut_short and report.problems[0].tried["passed"] == 1
    assert won(report).median_us > 0


def test_bench_races_the_best_known_or_the_default(store) -> None:
    options = {"backend": "planted:Backend", "store": store, "problems": ["small"],
               "limits": QUICK, "progress": Quiet(), "variants": ["honest"],
               "states": ["burst"]}  # fmt: skip
    before = bench("planted", **options)
    assert won(before).candidate.config["kind"] == "slow"
    run(store, variants=["honest"])
    after = bench("planted", **options)
    raced = [row for row in after.rows if row.protocol["state"] != SCREEN]
    assert kinds(raced) == Counter(fast=1, host=1)


def test_each_state_has_a_race_a_winner_and_an_incumbent_of_its_own(store) -> None:
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


def test_a_ladder_races_every_variant_however_slow(planted, store, monkeypatch) -> None:
    """And decides nothing where a tune has raced."""
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


def test_without_the_gpu_it_predicts_and_says_so(store, tmp_path) -> None:
    report = run(store, gpu="h100", variants=["honest"])
    assert report.kind == "predicted" and "nothing ran" in report.notes[0]
    assert {row.kind for row in report.rows} == {"predicted"}
    assert not loads(tmp_path)
    slow = next(row for row in report.rows if row.config["kind"] == "slow")
    assert slow.status == "compile_error" and "spills 64 bytes" in slow.detail
    winner = report.problems[0].winners["graph", "predicted"]
    assert winner.candidate.config["kind"] == "fast"
    assert not store.rows(kind="measured")
    json.dumps(report.to_json())


def test_a_compiler_that_fails_costs_a_prediction_only(planted, store) -> None:
    report = run(store, gpu="b200", variants=["bad"])
    assert report.problems[0].skipped == "nothing compiles and fits on b200"
    report = run(store, gpu="h100", variants=["bad"])
    status = {row.config["kind"]: row.status for row in report.rows}
    assert status["refuses"] == "compile_error" and status["never_compiles"] == "timeout"
    assert set(status) == set(planted.STATUS)


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
def test_bad_options_are_one_clear_line(store, options, error) -> None:
    with pytest.raises(error) as caught:
        tune("planted", **{"backend": "planted:Backend", "store": store, "progress": Quiet(),
                           **options})  # fmt: skip
    assert "\n" not in str(caught.value)


def test_without_a_gpu_and_without_a_name_it_says_what_to_do(planted, store, monkeypatch) -> None:
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
    assert won(report).candidate.config["kind"] in ("good", "close")


def start(**more) -> subprocess.Popen[str]:
    command = [sys.executable, str(PLANTED / "drive.py")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True,
                            **more)  # fmt: skip


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


def test_killed_in_the_middle_nothing_is_lost_and_the_next_run_goes_on() -> None:
    tuning = start()
    wait_for_rows(5)
    os.killpg(tuning.pid, signal.SIGKILL)
    tuning.wait()
    with Store.open() as store:
        kept = {row.digest for row in store.rows()}
        known = {row.config["kind"] for row in store.rows()}
        report = run(store)
        rows = store.rows()
    assert kept <= {row.digest for row in rows}
    screened = kinds(r for r in rows if r.protocol["state"] == SCREEN)
    del screened["tires"]  # believed when screened, found out when raced
    assert set(screened.values()) == {1}, "something was screened twice"
    assert len(known) >= 5 and not known & set(kinds(report.rows, "wrong")) - {"tires"}
    assert won(report).candidate.config["kind"] == "fast"


def test_control_c_keeps_everything_and_says_how_to_go_on() -> None:
    tuning = start()
    wait_for_rows(3)
    os.killpg(tuning.pid, signal.SIGINT)
    said, _ = tuning.communicate(timeout=20)
    assert tuning.returncode == 130
    assert "go on with: kernelcat tune planted" in said
    with Store.open() as store:
        assert f"{len(store.rows())} measurements are kept" in said


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


def test_what_is_not_the_candidates_fault_is_not_held_against_it(planted, store, monkeypatch):
    monkeypatch.setenv("PLANTED_FULL", "fast")
    report = run(store, variants=["honest"], peers=False)
    assert kinds(report.rows)["fast"] == 0
    assert "kind=fast was left out: device memory is full" in report.notes[0]
    monkeypatch.delenv("PLANTED_FULL")
    report = run(store, variants=["honest"], peers=False)
    assert report.problems[0].tried["passed"] == 1
    assert won(report).candidate.config["kind"] in ("fast", "good")


def test_a_worker_that_cannot_start_says_why(store, monkeypatch) -> None:
    monkeypatch.setenv("PLANTED_ABSENT", "1")
    with pytest.raises(MissingDependency, match="pip install planted"):
        run(store)
    assert not store.rows()

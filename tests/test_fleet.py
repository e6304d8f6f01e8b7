"""Tunes on a local Ray cluster whose machines die, hang, and differ."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import postgres
import pytest
from click.testing import CliRunner
from processes import hear_ctrl_c, next_line

from kernelcat.cli import main
from kernelcat.errors import (
    InvalidArgument,
    LaunchError,
    MissingDependency,
    UnknownName,
    Unsupported,
)
from kernelcat.store import SCREEN, Store
from kernelcat.tune import Limits, Quiet, TuneReport, ray_connection, relay, tune
from kernelcat.tune.admission import Admission
from kernelcat.tune.candidate import Candidate

PLANTED = Path(__file__).parent / "planted"
LIMITS = Limits(candidate_s=1.5, peer_s=5)
SMALL, LARGE = 1000, 4000
"""Sizes of the problems ``small`` and ``large``."""


class Fleet:
    """A cluster without a GPU: a head, and two machines with a stand-in GPU each."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        self.folder = folder
        health = {"initial_delay_ms": 0, "period_ms": 500, "timeout_ms": 2000,
                  "failure_threshold": 3}  # fmt: skip
        system = {f"health_check_{name}": value for name, value in health.items()}
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "num_gpus": 0, "include_dashboard": False,
                            "object_store_memory": 80 << 20, "_system_config": system},
        )  # fmt: skip
        self.address = self.cluster.address
        for name in ("a", "b"):
            self.add(name)

    def add(self, name: str) -> None:
        self.cluster.add_node(
            num_cpus=1, num_gpus=1, resources={"accelerator_type:planted": 1},
            object_store_memory=80 << 20, env_vars={"FLEET_NODE": name},
        )  # fmt: skip

    def tell(self, name: str, text: str) -> None:
        """Write a file that the backend ``fleet`` looks for."""
        (self.folder / name).write_text(text)

    def tune(self, **options) -> TuneReport:
        options = {"problems": ["small", "large"], "states": ["burst"], "peers": False,
                   "variants": ["honest"], "limits": LIMITS, "processes": 1, "gpu": "planted",
                   "progress": Quiet(), "address": self.address, **options}  # fmt: skip
        return tune("planted", backend="fleet:Backend", executor="ray", **options)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The cluster that all tests of this module share."""
    postgres.require("ray")
    folder = tmp_path_factory.mktemp("fleet")
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv("FLEET", str(folder))
        patch.setenv("RAY_DEDUP_LOGS", "0")
        patch.syspath_prepend(str(PLANTED))
        fleet = Fleet(folder)
        yield fleet
        fleet.cluster.shutdown()


@pytest.fixture
def fleet(started: Fleet) -> Iterator[Fleet]:
    yield started
    for path in started.folder.iterdir():
        path.unlink()


def screened(rows) -> Counter[tuple[str, int]]:
    """(kind, size) -> number of rows from screening."""
    found = [row for row in rows if row.protocol["state"] == SCREEN]
    return Counter((row.config["kind"], row.problem["n"]) for row in found)


def check(report: TuneReport, sizes: tuple[int, ...] = (SMALL, LARGE)) -> None:
    """Every honest candidate was screened once for each size, and every problem has a winner."""
    kinds = ("slow", "fast", "good", "close")
    assert screened(report.rows) == Counter((kind, size) for kind in kinds for size in sizes)
    assert len(report.problems) == len(sizes)
    for problem in report.problems:
        winner = problem.winners["eager", "burst"].candidate
        assert winner == Candidate("cuda", "honest", {"kind": "fast"})
    raced = [row for row in report.rows if row.protocol["state"] != SCREEN]
    assert len({(row.problem["n"], row.config["kind"]) for row in raced}) == len(raced)
    with Store.open() as store:
        assert Counter(r.digest for r in store.rows()) == Counter(r.digest for r in report.rows)


def test_failures_of_candidates_are_recorded_as_on_one_machine(fleet: Fleet) -> None:
    import fleet as backend
    import planted

    fleet.tell(f"trap-good-{SMALL}", "worker SIGKILL")  # from outside: no candidate's fault
    report = fleet.tune(problems=["small"], variants=None, peers=True)
    bad = {row.config["kind"]: row.status for row in report.rows if row.variant == "bad"}
    assert bad == {kind: planted.STATUS[kind] for kind in backend.FAILURES}
    assert not (fleet.folder / f"trap-good-{SMALL}").exists()
    assert report.restarts >= 5  # two for "hangs", two for "segfaults", and one for the trap
    assert report.problems[0].winners["eager", "burst"].peer == "host"
    assert set(screened(report.rows).values()) == {1}


def test_a_machine_that_hangs_costs_its_unfinished_work_only(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(relay, "BEAT_S", 0.5)
    monkeypatch.setattr(relay, "PATIENCE_S", 6.0)  # a busy machine's answer may take 2 s
    fleet.tell(f"trap-good-{LARGE}", "relay SIGSTOP")
    report = fleet.tune(fresh=True)
    check(report)
    assert len(report.notes) == 1, report.notes
    [note] = report.notes
    assert "is lost" in note and note.endswith("its work goes to another GPU")
    assert not capsys.readouterr().out  # --json prints nothing else there


def test_a_problem_that_takes_down_every_machine_is_given_up(fleet: Fleet) -> None:
    fleet.tell(f"trap-good-{LARGE}", "relay SIGKILL always")
    with pytest.raises(LaunchError, match=r"1 of 2 problems are not tuned: .* is lost"):
        fleet.tune()
    with Store.open() as store:
        races = store.winners(gpu="planted", regime="eager")
        assert {r.winner.problem["n"] for r in races if r.key.state == "burst"} == {SMALL}


def test_a_machine_with_another_driver_is_refused(fleet: Fleet) -> None:
    fleet.tell("driver-b", "999.1")
    report = fleet.tune()
    check(report)
    [driver] = {row.environment["driver"] for row in report.rows}
    [other] = {"none", "999.1"} - {driver}
    [note] = report.notes
    assert note.endswith(f" has driver {other}, not {driver}; its work goes to another GPU")


def test_the_environment_of_most_machines_counts() -> None:
    most, other = {"driver": "580.1", "sms": 132}, {"driver": "590.2", "sms": 132}
    admission, refusals = Admission(3), {}

    def start(name: str, environment: dict) -> None:
        refusals[name] = admission.refusal(environment)

    threads = [
        threading.Thread(target=start, args=each)
        for each in (("other", other), ("first", most), ("second", most))
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert refusals == {"first": None, "second": None, "other": "has driver 590.2, not 580.1"}
    assert admission.refusal(other) == "has driver 590.2, not 580.1"


def test_a_machine_with_other_code_is_refused(fleet: Fleet) -> None:
    fleet.tell("digest-a", "another")
    report = fleet.tune()
    check(report)
    assert "has other code of planted/cuda/honest: install the same" in " ".join(report.notes)


def test_control_c_keeps_all_rows_and_frees_the_gpus_and_the_next_tune_goes_on(
    fleet: Fleet,
) -> None:
    fleet.tell(f"trap-close-{LARGE}", "worker SIGSTOP")
    tuning = start_tune(fleet, "small", "large")
    assert next_line(tuning) == "begun\n"
    tuning.send_signal(signal.SIGINT)
    output, _ = tuning.communicate(timeout=20)
    assert tuning.returncode == 130
    again = f"kernelcat tune planted --executor ray --address {fleet.address} --gpu planted"
    assert f"go on with: {again} --problem small --problem large" in output
    with Store.open() as store:
        before = store.rows()
    assert before and f"{len(before)} measurements are kept" in output
    report = fleet.tune()  # has both GPUs again
    assert all(problem.winners for problem in report.problems)
    both = screened(before) + screened(report.rows)
    assert len(both) == 2 * 4 and set(both.values()) == {1}


def start_tune(fleet: Fleet, *problems: str) -> subprocess.Popen[str]:
    """A process that submits a tune, and does not ignore Ctrl-C."""
    return subprocess.Popen(
        [sys.executable, str(PLANTED / "drive_ray.py"), fleet.address, *problems],
        stdout=subprocess.PIPE, text=True,
        preexec_fn=hear_ctrl_c,
    )  # fmt: skip


def test_two_submitting_processes_and_a_restarted_server_lose_nothing(
    fleet: Fleet, own_server: postgres.Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("KERNELCAT_DB", own_server.database("tuning"))
    both = [start_tune(fleet, "small") for _ in range(2)]  # a GPU each
    firsts = [next_line(tuning) for tuning in both]
    assert "begun\n" in firsts  # one that comes late finds what the other has measured
    for number in (signal.SIGINT, signal.SIGQUIT):
        own_server.stop(number)
        time.sleep(0.3)
        own_server.start()
    ends = [first + tuning.communicate(timeout=120)[0]
            for first, tuning in zip(firsts, both, strict=True)]  # fmt: skip
    assert [tuning.returncode for tuning in both] == [0, 0]
    kept: dict[str, list[str]] = dict(json.loads(end.splitlines()[-1]) for end in ends)
    with Store.open() as store:
        rows = store.rows()
    assert len(kept) == 2 and all(kept.values())
    assert Counter(row.digest for row in rows) == Counter(d for ds in kept.values() for d in ds)
    for run, first in zip(kept, firsts, strict=True):
        counts = set(screened(row for row in rows if row.run == run).values())
        assert counts == {1} or (first != "begun\n" and not counts)
    assert not list(tmp_path.rglob("*.journal.jsonl"))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"gpu": None}, InvalidArgument, r"with --gpu: the cluster has planted \(\d GPUs\)"),
        ({"gpu": "b200"}, Unsupported, r"has no b200: it has planted \(\d GPUs\)"),
        ({"gpu": "voodoo2"}, UnknownName, "voodoo2"),
        ({"devices": "all"}, InvalidArgument, "leave out --device"),
    ],
)
def test_a_wrong_option_is_one_line(fleet: Fleet, options, error, text) -> None:
    with pytest.raises(error, match=text) as caught:
        fleet.tune(**options)
    assert "\n" not in str(caught.value)


def test_a_machine_that_goes_away_costs_its_unfinished_work_only(fleet: Fleet) -> None:
    fleet.tell(f"trap-close-{LARGE}", "node SIGKILL")  # the last test of the whole cluster
    report = fleet.tune()
    check(report)
    assert "is lost" in report.notes[0]


def test_the_reason_for_a_loss_is_one_line_without_a_traceback() -> None:
    died = (
        "The actor died because of an error raised in its creation task, ray::Relay.__init__()\n"
        "RuntimeError: The actor with name Relay failed to import on the worker. This may be:\n\n"
        "ray::Relay.__init__()\n  ^^^^\nModuleNotFoundError: No module named 'kernelcat'"
    )
    assert relay.reason(ValueError(died)) == (
        "ValueError: ModuleNotFoundError: No module named 'kernelcat'"
    )
    killed = "The actor died.\n\tpid: 7\nThe actor is dead because its process has died. Exit"
    assert relay.reason(ValueError(killed)).startswith("ValueError: The actor is dead because its")
    assert relay.reason(ValueError()) == "ValueError: "
    assert len(relay.reason(ValueError("x" * 999))) == relay.MAX_REASON


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "auto"])
def test_a_closed_port_is_an_error_within_seconds(
    form: str, closed_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    postgres.require("ray")
    monkeypatch.setattr(ray_connection, "ANSWER_S", 0.5)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{closed_port}")
    started = time.monotonic()
    with pytest.raises(MissingDependency, match=f"no Ray cluster answers at .*:{closed_port} "):
        ray_connection.connect(form.format(closed_port))
    assert time.monotonic() - started < 5


def test_a_cluster_that_is_starting_is_waited_for(closed_port: int) -> None:
    def listen() -> None:
        time.sleep(0.7)
        with socket.create_server(("127.0.0.1", closed_port)) as server:
            server.accept()

    thread = threading.Thread(target=listen)
    thread.start()
    ray_connection.probe(f"127.0.0.1:{closed_port}")
    thread.join()


@pytest.mark.parametrize(
    "address", ["local", "http://head:8265", "ray://head:10001", "head", "head:port", ":6379"]
)
def test_an_address_of_another_form_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgument, match=r"write HOST:6379"):
        ray_connection.probe(address)


def test_the_command_names_executor_and_address(
    closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_connection, "ANSWER_S", 0.1)
    where = f"127.0.0.1:{closed_port}"
    words = ["tune", "gemm", "--gpu", "h200", "--executor", "ray", "--address", where]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1 and f"no Ray cluster answers at {where} " in done.output
    assert "Traceback" not in done.output


def test_an_address_without_the_executor_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="--address is for --executor ray"):
        tune("gemm", address="head:6379", progress=Quiet())
    with pytest.raises(UnknownName, match="unknown executor 'slurm'"):
        tune("gemm", executor="slurm", progress=Quiet())


def test_without_ray_the_error_names_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match=r"pip install 'kernelcat\[ray\]'"):
        ray_connection.connect("head:6379")

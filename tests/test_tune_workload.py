"""Tunes of workloads: order, budget, what is left out, and how an interrupted one goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from processes import hear_ctrl_c

from kernelcat import catalog
from kernelcat import tune as tuning
from kernelcat.cli import main
from kernelcat.errors import InvalidArgument, StoreError
from kernelcat.runtime import gpu
from kernelcat.store import Store, workload
from kernelcat.store.workload import Use
from kernelcat.tune import Limits, Quiet, backends, race_best_known, tune
from kernelcat.tune import workload as workloads
from kernelcat.tune.workload import jobs_of, tune_workload

PLANTED = Path(__file__).parent / "planted"


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the planted backend importable here and in the processes of a tune; its module."""
    paths = [str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.syspath_prepend(str(PLANTED))
    import planted

    return planted


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.open() as opened:
        yield opened


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "workload.jsonl"


def use(n: int = 1000, **fields: Any) -> Use:
    """A use of the planted entry by one call of 1 us."""
    default = {
        "entry": "planted", "problem": {"n": n, "dtype": "float32"}, "gpu": "planted",
        "served": "planted/cuda/honest", "config": {"kind": "fast"}, "why": "default", "us": 1.0,
        "basis": "predicted", "calls": 1,
    }  # fmt: skip
    return Use(**{**default, **fields})


def run(path: Path, store: Store, **options: Any) -> workloads.WorkloadReport:
    limits = Limits(candidate_s=1.0, compile_s=1.5)
    options = {"limits": limits, "processes": 1, "peers": False, "variants": ["honest"],
               "states": ["burst"], "progress": Quiet(), **options}  # fmt: skip
    return tune_workload(path, backend="planted:Backend", store=store, **options)


def names(report: workloads.WorkloadReport) -> list[str]:
    return [problem.name for tuned in report.tunes for problem in tuned.problems]


# ---- order -------------------------------------------------------------------------------------


def gemm(m: int, **fields: Any) -> Use:
    problem = catalog.entry("gemm").problem(M=m, N=64, K=64, dtype="bfloat16").values
    return use(entry="gemm", problem=problem, **fields)


def test_problems_of_all_entries_are_sorted_by_cost() -> None:
    copy = next(iter(catalog.entry("tma_copy").problems.values())).values
    uses = [
        gemm(1, us=3.0, calls=2),
        use(entry="tma_copy", problem=copy, us=10.0, calls=1),
        gemm(2, us=1.0, calls=5, gpu="h200"),
        gemm(2, us=2.0, calls=1, gpu="h100"),
        gemm(3, us=100.0, calls=100, why="forced"),
        use(entry="gone", us=50.0),
        gemm(4, us=0.1, calls=0, captured=1),
        use(entry="gemm", problem={"M": 1, "X": 2}, us=8.0),
    ]
    jobs, refused = jobs_of(uses, catalog.entry)
    assert [(job.entry.name, job.problem.values.get("M"), job.cost_us) for job in jobs] == [
        ("tma_copy", None, 10.0), ("gemm", 2, 7.0), ("gemm", 1, 6.0), ("gemm", 4, 0.1),
    ]  # fmt: skip
    assert {name.split()[0] for name in refused} == {"gone", "gemm"}
    assert any("unknown entry 'gone'" in why for why in refused.values())
    assert any("has no axis 'X'" in why for why in refused.values())
    jobs, refused = jobs_of(uses, catalog.entry, replays=1000, only="gemm")
    assert [job.problem["M"] for job in jobs] == [4, 2, 1] and len(refused) == 1


# ---- tunes -------------------------------------------------------------------------------------


def test_what_costs_most_is_tuned_first_and_is_known_afterwards(path: Path, store: Store) -> None:
    workload.add(path, [use(1000), use(2000, calls=5), use(1500, calls=3)])
    seen: list[str] = []
    report = run(path, store, done=lambda report: seen.append(report.problems[0].name))
    assert names(report) == seen == ["dtype=float32 n=2000", "dtype=float32 n=1500", "small"]
    assert (report.known, report.waiting) == (0, [])
    assert report.refused == {}
    assert all(tuned.problems[0].winners for tuned in report.tunes)
    again = run(path, store)
    assert (names(again), again.known) == ([], 3)
    assert "0 problems were tuned, 3 were measured before" in again.lines()
    workload.add(path, [use(500)])
    assert names(run(path, store)) == ["dtype=float32 n=500"]


def test_only_races_of_todays_code_in_the_states_asked_for_count(
    planted: Any, path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload.add(path, [use()])
    assert names(run(path, store)) == ["small"]
    assert run(path, store).known == 1
    assert names(run(path, store, fresh=True)) == ["small"]
    both = {"states": ["burst", "sustained"]}
    assert names(run(path, store, **both)) == ["small"]
    assert run(path, store, **both).known == 1
    monkeypatch.setattr(planted.Backend, "digest", lambda self, i: "another")
    assert names(run(path, store)) == ["small"]


@pytest.mark.parametrize(
    ("raced", "is_overtaken"), [({"triton"}, True), ({"cuda", "cute", "triton"}, False)]
)
def test_a_race_without_kernels_that_should_win_is_not_enough(
    store: Store, monkeypatch: pytest.MonkeyPatch, raced: set[str], is_overtaken: bool
) -> None:
    """A router of 64 tokens, as if its race were older than most of its kernels."""
    entry, h200 = catalog.entry("gemm"), gpu.find("h200")
    problem = entry.problem(M=64, N=32, K=2880, dtype="bfloat16")
    rows = [row for row in tuning.shipped_rows(entry, h200) if row.language in raced]
    monkeypatch.setattr(workloads, "shipped_rows", lambda *_: rows)
    asked = tuning.Options(states=("burst",), regimes=("graph",))
    known = workloads._Known(store, backends.load(asked.backend), h200, asked, True)
    job = workloads.Job(entry, problem, 1.0)
    assert known.is_overtaken(job) == is_overtaken
    assert known(job) == (not is_overtaken)


def test_the_budget_is_shared_by_cost_and_ends_the_tune(
    path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, shares = [0.0], []
    workload.add(path, [use(10, us=600.0), use(20, us=300.0), use(30, us=60.0), use(40), use(50)])

    def tuned(entry: str, **options: Any) -> Any:
        shares.append((options["problems"][0]["n"], options["budget_s"]))
        clock[0] += options["budget_s"]
        return workloads.TuneReport(entry, "planted", "measured", "run")

    monkeypatch.setattr(workloads.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(workloads, "tune", tuned)
    report = run(path, store, budget_s=100.0)
    assert [n for n, _ in shares] == [10, 20, 30]
    assert [s for _, s in shares] == pytest.approx([100 * 600 / 962, 37.63 * 300 / 362, 6.45], 0.01)
    assert report.waiting == ["planted dtype=float32 n=40", "planted dtype=float32 n=50"]
    assert report.lines()[-1].endswith("2 are left: run the command again")


def test_a_problem_that_nothing_serves_does_not_stop_the_others(path: Path, store: Store) -> None:
    workload.add(path, [use(2000, calls=5), use(1000)])
    report = run(path, store, languages=["triton"])
    assert len(report.refused) == 2 and "no implementation" in report.lines()[0]


def test_another_gpu_is_predicted_once(path: Path, store: Store) -> None:
    workload.add(path, [use()])
    report = run(path, store, gpu="h100")
    assert (report.kind, names(report)) == ("predicted", ["small"])
    assert run(path, store, gpu="h100").known == 1


def test_several_gpus_and_a_missing_file_are_refused(path: Path, store: Store) -> None:
    with pytest.raises(InvalidArgument, match="on one GPU"):
        run(path, store, devices=[0, 1])
    with pytest.raises(StoreError, match="cannot read the workload"):
        run(path, store)


def test_control_c_tells_how_to_go_on(path: Path) -> None:
    workload.add(path, [use(2000, calls=5), use(1000)])
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from kernelcat.tune import Interrupted, Limits, Quiet\n"
        "from kernelcat.tune.workload import tune_workload\n"
        "try:\n    tune_workload(Path(sys.argv[1]), backend='planted:Backend', processes=2,\n"
        "        progress=Quiet(), replays=7, limits=Limits(candidate_s=1.5, compile_s=2.5))\n"
        "except Interrupted as stopped:\n    print(stopped)\n    sys.exit(130)\n"
    )
    tuning = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
        preexec_fn=hear_ctrl_c,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    rows = 0
    while time.monotonic() < deadline and not rows and tuning.poll() is None:
        time.sleep(0.2)
        if Path(os.environ["KERNELCAT_DB"]).exists():
            with Store.open() as store:
                rows = len(store.rows())
    os.killpg(tuning.pid, signal.SIGINT)
    output, _ = tuning.communicate(timeout=30)
    assert tuning.returncode == 130 and rows
    assert f"go on with: kernelcat tune --workload {path} --replays 7" in output


def test_a_race_of_the_best_known_is_no_stranger_to_earlier_results(store: Store) -> None:
    """``Past`` of one problem: a tune's times and incumbent serve the next race."""
    options = {"backend": "planted:Backend", "store": store, "problems": ["small"], "peers": False,
               "processes": 1, "states": ["burst"], "progress": Quiet()}  # fmt: skip
    tune("planted", variants=["honest"], **options)
    raced = race_best_known("planted", variants=["honest"], **options)
    assert raced.problems[0].winners["eager", "burst"].candidate.config["kind"] == "fast"


# ---- command line ------------------------------------------------------------------------------


def command(*words: str) -> Any:
    return CliRunner().invoke(main, list(words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tune"], "Missing argument 'ENTRY'"),
        (["tune", "gemm", "--replays", "3"], "--replays is for --workload"),
        (["tune", "--workload", "w.jsonl", "--problem", "x"], "--problem does not go with"),
        (["bench"], "Missing argument 'ENTRY'"),
        (["db", "misses"], "name a --workload"),
        (["tune", "--workload", "none.jsonl", "--gpu", "b200"], "cannot read the workload"),
    ],
)
def test_wrong_uses_are_one_line(words: list[str], message: str) -> None:
    result = command(*words)
    assert result.exit_code in (1, 2) and message in result.output
    assert "Traceback" not in result.output


MEASURED = "4096x4096x4096"


@pytest.fixture
def called(path: Path) -> Path:
    """A workload with two misses, a measured problem, one measured since, and a pinned call."""
    large = catalog.entry("gemm").problems[MEASURED].values
    workload.add(
        path,
        [
            gemm(7, gpu="h200", served="gemm/cuda/wgmma", why="nearest", us=30.0),
            gemm(9, gpu="h200", served="gemm/cuda/wgmma", why="bucket", us=5.0, captured=1),
            gemm(9, gpu="b200", served="gemm/triton/tiled", why="predicted", us=5.0),
            gemm(7, gpu="h200", why="forced", us=10.0),
            use(entry="gemm", problem=large, gpu="h200", why="exact", us=30.0),
            use(entry="gemm", problem=large, gpu="h200", why="nearest", us=20.0),
        ],
    )
    return path


@pytest.mark.filterwarnings("ignore:there is no tuning database")
def test_misses_are_what_ran_unmeasured_and_still_is(called: Path) -> None:
    result = command("db", "misses", "--workload", str(called), "--gpu", "h200", "--json")
    first, second = json.loads(result.output)
    assert (first["problem"]["M"], first["why"], first["served"]) == (
        7,
        "nearest",
        "gemm/cuda/wgmma",
    )
    assert (second["problem"]["M"], second["why"], second["captured"]) == (9, "bucket", 1)
    assert (first["share"], second["share"]) == (0.3, 0.1)
    everywhere = json.loads(command("db", "misses", "--workload", str(called), "--json").output)
    assert [(row["gpu"], row["share"]) for row in everywhere][-1] == ("b200", 1.0)


@pytest.mark.filterwarnings("ignore:there is no tuning database")
def test_misses_are_shown_as_a_table(called: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELCAT_RECORD", str(called))
    result = command("db", "misses", "--gpu", "h200")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert "M=7,N=64,K=64,dtype=bfloat16" in lines[2] and lines[2].rstrip().endswith("30.0%")
    assert "2 of 5 uses" in result.output and MEASURED not in result.output


def test_a_workload_is_predicted_from_the_command_line(path: Path) -> None:
    workload.add(path, [gemm(64, gpu="h200"), gemm(128, gpu="h200", calls=3)])
    words = ["tune", "--workload", str(path), "--gpu", "b200", "--budget", "3s",
             "--language", "triton"]  # fmt: skip
    result = command(*words)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("gemm ") and "M=128" in result.output.splitlines()[0]
    assert result.output.count("nothing ran: there is no") == 1, "notes are told once"
    report = json.loads(command(*words, "--json").stdout)
    assert report["kind"] == "predicted" and report["known"] + len(report["tunes"]) <= 2

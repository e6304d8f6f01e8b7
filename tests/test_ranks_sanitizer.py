"""compute-sanitizer over ranks: a stand-in for the tool, around ranks of `ranks_machine`."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kernelcat import catalog
from kernelcat.cli.correctness import _show
from kernelcat.cli.correctness import check as check_verb
from kernelcat.errors import KernelcatError, MissingDependency, RankFailed
from kernelcat.ranks import check, processes, sanitize
from kernelcat.ranks.rendezvous import Rendezvous
from kernelcat.reference.all_reduce import summed
from kernelcat.verify import certify, sanitizer
from kernelcat.verify.sanitizer import EXAMPLE, MAPPED, Output, Report, parse_all

HERE = Path(__file__).parent
COMBINE = catalog.implementation("moe_combine", "cuda", "tiles")
FUZZING = check.Fuzzing(2, random_seed=1, limit=20, kernels=1, mirrored=True)

TOOL = """\
#!{python}
import json, os, pathlib, subprocess, sys
words, here = sys.argv[1:], pathlib.Path({here!r})
command = words[words.index({python!r}):]
tool, rank = words[words.index("--tool") + 1], command[command.index("ranks_worker") + 1]
print("========= COMPUTE-SANITIZER", flush=True)
code = subprocess.call(command)
with (here / "runs").open("a") as runs:
    runs.write(json.dumps([tool, rank, os.environ.get("CUDA_MODULE_LOADING"), words]) + "\\n")
found = here / f"{{tool}}.{{rank}}"
print(found.read_text() if found.exists() else "========= ERROR SUMMARY: 0 errors")
sys.exit(code)
"""
"""As NVIDIA's: prints before and after the command on its output, and ends like the command."""

INVALID = """\
========= Invalid __global__ write of size 16 bytes
=========     at moe_combine_tiles+0x70
=========     by thread ({thread},0,0) in block (0,0,0)
=========     Access to {address} is out of bounds
=========
========= ERROR SUMMARY: {errors} errors
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ranks without a GPU, and a folder with a fake compute-sanitizer on the path.

    The file ``runs`` there gets a line for each process under the tool. A file ``memcheck.1`` is
    what the tool prints at the end of rank 1.
    """
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL.format(python=sys.executable, here=str(tmp_path)))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    folders = [str(HERE), str(HERE.parent)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    monkeypatch.setattr(processes, "WORKER", "ranks_worker")
    return tmp_path


def job(implementation: Any = COMBINE, **more: Any) -> dict[str, Any]:
    return {**check._job(implementation, [], FUZZING), **more}


def runs(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "runs").read_text().splitlines()]


def found(folder: Path, tool: str, rank: int, errors: int, address: str = "0x40") -> None:
    text = INVALID.format(thread=rank, address=address, errors=errors)
    (folder / f"{tool}.{rank}").write_text(text)


@pytest.mark.parametrize(
    ("entry", "variant"),
    [("all_reduce", "two_shot"), ("moe_dispatch", "ll"), ("moe_combine", "tiles"),
     ("kv_transfer", "vectors")],
)  # fmt: skip
def test_copied_arrays_are_right_on_every_rank(entry: str, variant: str, machine: Path) -> None:
    """The arrays that are judged are others than those that kernels write to."""
    ended = processes.run_under(
        (), job(catalog.implementation(entry, "cuda", variant)), [0, 0], 200
    )
    assert [each.result["value"]["examples"] for each in ended] == [2, 2]
    assert [each.result["value"]["failure"] for each in ended] == [None, None]
    for each in ended:
        starts = [line.split(" on ")[0].split(": ")[0] for line in each.text.splitlines()]
        assert starts[:2] == [EXAMPLE.rstrip(": "), MAPPED.split(":")[0]]
        shared = 2 if entry == "kv_transfer" else 0
        mapped = [line for line in each.text.splitlines() if line.startswith(MAPPED)]
        assert all(len(sanitizer._MAPPED.findall(line)) >= 2 + shared for line in mapped)


def test_every_rank_runs_under_every_tool_and_the_receipt_has_the_errors_of_all(
    machine: Path,
) -> None:
    found(machine, "memcheck", 0, errors=3)
    found(machine, "memcheck", 1, errors=2)
    sanitizing = check.Sanitizing(2, sanitizer.SANITIZERS)
    problem = catalog.entry("all_reduce").problem_name(summed(1, 2880))
    all_reduce = catalog.implementation("all_reduce", "cuda", "ll")
    (checked,) = check.run([all_reduce], [str(problem)], [0], None, sanitizing)
    outcome = checked.outcome
    assert not outcome.failures
    assert outcome.right
    assert not outcome.passed
    assert checked.receipt().sanitizer == {"memcheck": 5, "racecheck": 0, "synccheck": 0}
    assert outcome.left_out == sanitize.LEFT_OUT
    (finding,) = outcome.findings
    assert finding.startswith("memcheck: Invalid __global__ write of size 16 bytes, at moe_combine")
    assert "; rank 0, cuda/ll " in finding
    assert finding.endswith("(first of 2)")
    done = runs(machine)
    assert sorted(each[:3] for each in done) == sorted(
        [tool, rank, "EAGER"] for tool in sanitize.TOOLS for rank in "01"
    )
    for _, _, _, words in done:
        fuzzing = json.loads(words[-1])["fuzzing"]
        assert (fuzzing["limit"], fuzzing["kernels"], fuzzing["examples"]) == (160, 6, 2)
        assert fuzzing["mirrored"]
        assert words[words.index("--show-backtrace") + 1] == "no"


def test_no_tool_runs_after_a_run_that_failed_without_one(machine: Path) -> None:
    with pytest.raises(
        KernelcatError, match=r"^fuzz before the sanitizer: .* rank 1: seed "
    ) as wrong:
        sanitize.sanitize(job(fault="breaks"), [0, 0])
    assert str(wrong.value).startswith("fuzz before the sanitizer: moe_combine/cuda/tiles ")
    assert len(str(wrong.value).splitlines()) == 1
    assert not (machine / "runs").exists()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("dies", "^compute-sanitizer --tool racecheck: rank 1: exit status 7"),
        ("misses", "rank 0 did not answer a kernel of rank 1 in time"),
        ("breaks", "rank 1: seed "),
    ],
)
def test_a_run_that_fails_without_an_error_of_the_tool_is_one_line(
    fault: str, message: str, machine: Path
) -> None:
    with pytest.raises(KernelcatError, match=message) as failed:
        sanitize.run("racecheck", job(fault=fault), [0, 0])
    assert len(str(failed.value).splitlines()) == 1


def test_errors_of_the_tool_explain_a_rank_that_dies(machine: Path) -> None:
    found(machine, "memcheck", 1, errors=1)
    report = sanitize.run("memcheck", job(fault="dies"), [0, 0])
    assert report.errors == 1
    assert "; rank 1, cuda/tiles " in report.findings[0]


def test_a_rank_that_does_not_end_is_named_with_its_reason(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanitize, "SANITIZED_S", 12)
    with pytest.raises(KernelcatError, match=r"did not end within 12 s; .*no memory is left"):
        sanitize.run("synccheck", job(fault="lingers"), [0, 0])


def test_without_compute_sanitizer_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(processes, "run", None)  # not called
    with pytest.raises(MissingDependency, match="install the CUDA toolkit"):
        sanitize.sanitize(job(), [0, 0])


CLEAN = Output("========= ERROR SUMMARY: 0 errors", 0)
SILENT = Output("Killed", 137)


def one_error(before: str = "", address: str = "0x7f001010") -> Output:
    return Output(before + INVALID.format(thread=1, address=address, errors=1), 1)


def test_a_silent_rank_is_an_error_unless_another_one_explains_it() -> None:
    assert parse_all("memcheck", {"rank 0": SILENT, "rank 1": one_error()}).errors == 1
    assert parse_all("memcheck", {"rank 0": CLEAN, "rank 1": CLEAN}) == Report(0)
    for outputs in ({"rank 0": CLEAN, "rank 1": SILENT}, {"rank 1": SILENT, "rank 2": CLEAN}):
        with pytest.raises(
            KernelcatError, match=r"^rank 1: compute-sanitizer .*: exit 137: Killed"
        ):
            parse_all("memcheck", outputs)


def test_a_launch_that_the_tool_did_not_watch_is_an_error() -> None:
    untracked = "========= Internal Sanitizer Error: didn't track the launch.\n" + CLEAN.text
    with pytest.raises(KernelcatError, match=r"^rank 1: .*Internal Sanitizer Error: didn't track"):
        parse_all("memcheck", {"rank 0": CLEAN, "rank 1": Output(untracked, 0)})
    with pytest.raises(KernelcatError, match=r"^compute-sanitizer .*Internal Sanitizer Error"):
        sanitizer.parse("memcheck", untracked, 0)


WINDOWS = f"{MAPPED}0:0x7f000000-0x7f000fff 1:0x7f001000-0x7f001fff\n"


@pytest.mark.parametrize("words", ["Access to", "Address"])
def test_memory_of_another_rank_that_memcheck_does_not_know_is_no_finding(words: str) -> None:
    output = one_error(WINDOWS)
    output = replace(output, text=output.text.replace("Access to", words))
    with pytest.raises(KernelcatError, match="takes the memory that rank 1 shares for out of bo"):
        parse_all("memcheck", {"rank 0": output, "rank 1": CLEAN})


@pytest.mark.parametrize(
    ("before", "address"),
    [
        (WINDOWS, "0x7f002000"),
        (WINDOWS + f"{MAPPED}0:0x10-0x1f\n", "0x7f001010"),
        ("", "0x7f001010"),
    ],
)
def test_an_access_outside_of_what_is_mapped_now_is_a_finding(before: str, address: str) -> None:
    report = parse_all("memcheck", {"rank 0": CLEAN, "rank 1": one_error(before, address)})
    assert report.errors == 1
    assert f"Access to {address}" in report.findings[0]


@pytest.mark.parametrize("slowness", [1, 20])
def test_slow_ranks_wait_longer(slowness: int, tmp_path: Path) -> None:
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            meeting = Rendezvous(rank, 2, tmp_path / "s", join_s=0.4 * 20, slowness=slowness)
            if rank:
                time.sleep(1)
            results[rank] = meeting.gather(rank, limit_s=0.4)[0]
        except RankFailed as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results[0] == ([0, 1] if slowness > 1 else "rank 1 did not answer in time")


def test_a_tool_that_cannot_judge_ranks_is_refused_by_name_and_else_shown() -> None:
    done = CliRunner().invoke(check_verb, ["all_reduce", "--tool", "initcheck"])
    assert str(done.exception) == (
        "--tool initcheck is not for an entry of several ranks: initcheck takes memory that "
        "another process writes for uninitialized"
    )


def test_what_was_left_out_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = certify.Outcome("moe_combine/cuda/tiles", problems=["p"])
    outcome.add({"memcheck": Report(0)})
    outcome.left_out = sanitize.LEFT_OUT
    _show(outcome)
    assert "memcheck 0" in (shown := capsys.readouterr().out)
    assert "left out: initcheck takes memory that another process writes" in shown

"""The command line: help, JSON output, and one-line error messages of every command."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from kernelcat import catalog
from kernelcat.cli import main
from kernelcat.report import show
from kernelcat.runtime import driver, gpu
from kernelcat.runtime.devices import VISIBLE
from kernelcat.store.lines import read_all
from kernelcat.verify import certify
from kernelcat.verify.sanitizer import Report

needs_no_gpu = pytest.mark.skipif(
    driver.count() > 0, reason="tests the messages of a machine without a GPU"
)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


COMMANDS = list(commands(main))


@pytest.mark.parametrize("command_path", COMMANDS, ids=" ".join)
def test_the_help_of_every_command_has_an_example_that_parses(
    command_path: tuple[str, ...],
) -> None:
    text = run(*command_path, "--help").output
    example = re.search(r"Example:\n\s+kernelcat (.*)", text)
    assert example, text
    arguments = shlex.split(example[1])
    command: click.Command = main
    context = click.Context(main)
    while isinstance(command, click.Group):
        subcommand = command.get_command(context, arguments.pop(0))
        assert subcommand is not None
        command = subcommand
    command.make_context(
        command_path[-1], arguments
    )  # raises on an unknown option or a missing argument


@pytest.mark.parametrize("command_path", COMMANDS, ids=" ".join)
def test_every_command_has_the_option_json(command_path: tuple[str, ...]) -> None:
    assert "--json" in run(*command_path, "--help").output


def test_list_and_show_agree_on_every_entry() -> None:
    rows = json.loads(run("list", "--json").output)
    assert {"gemm", "tma_copy"} <= {row["entry"] for row in rows}
    for row in rows:
        card = json.loads(run("show", row["entry"], "--json").output)
        assert card["summary"] == row["summary"]
        assert {i["language"] for i in card["implementations"]} == set(row["languages"])
        assert show.text(card).startswith(row["entry"])
    assert (
        run("show", "gemm").output
        == show.text(json.loads(run("show", "gemm", "--json").output)) + "\n"
    )


def test_inspect_proves_techniques_by_instructions() -> None:
    arguments = ("inspect", "gemm", "--language", "cuda", "--variant", "wgmma", "--gpu", "h200")
    (report,) = json.loads(run(*arguments, "--json").output)
    assert all(report["techniques"].values()) and report["techniques"]
    text = run(*arguments).output
    for line in ("wgmma by HGMMA", "tma by UTMALDG", "register reallocation by USETMAXREG"):
        assert f"  proven  {line}\n" in text
    assert "HGMMA" in run(*arguments, "--sass").output


def test_doctor_names_a_remedy_for_everything_missing() -> None:
    findings = {f["what"]: f for f in json.loads(run("doctor", "--json").output)}
    assert {"GPU", "CuPy", "Triton", "CuTe DSL", "torch", "entry gemm"} <= set(findings)
    for finding in findings.values():
        assert finding["found"] or finding["remedy"], finding


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "gem"), "unknown entry 'gem'; did you mean gemm"),
        (("check", "gem"), "did you mean gemm"),
        (("check", "gemm", "--language", "tritn"), "did you mean triton?"),
        (("check", "gemm", "--variant", "nothing"), "no implementation is called"),
        (("check", "gemm", "--device", "first"), "--device first: write a GPU's number, or all"),
        (("tune", "gemm", "--device", "-1"), "--device -1: write a GPU's number, or all"),
        (("inspect", "gemm", "--gpu", "h20o"), "did you mean h200"),
        (("inspect", "gemm", "--problem", "4096"), "has no problem '4096'"),
        (("tune", "gemm", "--gpu", "b20"), "did you mean b200"),
        (("tune", "gemm", "--gpu", "b200", "--budget", "ten"), "budget 'ten' is not a time"),
        (("tune", "gemm", "--gpu", "b200", "--problem", "x"), "has no problem 'x'"),
        (("tune", "gemm", "--gpu", "b200", "--strategy", "x"), "unknown strategy 'x'"),
        (("leaderboard", "gem"), "did you mean gemm"),
        (("ladder", "gem"), "did you mean gemm"),
        (("profile", "gem"), "did you mean gemm"),
        (("profile", "gemm", "--problem", "x"), "has no problem 'x'"),
        (("profile", "gemm", "--variant", "nothing"), "no implementation is called"),
        (("ladder", "gemm", "--problem", "x"), "has no problem 'x'"),
        (("leaderboard", "gemm", "--problem", "x*"), "no result is of a problem called"),
        (("ladder", "gemm", "--measure"), "name a --problem to measure"),
        (("inspect", "gemm", "--problem", "M=1,N=2"), "gemm also needs K"),
        (("inspect", "gemm", "--problem", "M=1,N=2,K=x"), "K='x' must be an integer"),
        (("inspect", "gemm", "--problem", "M=1,N=2,K=8,Q=1"), "gemm has no axis 'Q'"),
        (("inspect", "gemm", "--problem", "M=1,,K=8"), "'' is not AXIS=VALUE"),
        (("explain", "gemm", "--problem", "M=1,N=2,K=8,bias=maybe", "--gpu", "h200"), "bias="),
        (("tune", "gemm", "--gpu", "b200", "--device", "0"), "leave out --device to predict"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_argument_is_a_one_line_error(arguments: tuple[str, ...], message: str) -> None:
    one_line(run(*arguments), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("leaderbord",), "no command is called 'leaderbord'; did you mean leaderboard"),
        (("db", "merg"), "no command is called 'merg'; did you mean merge?"),
        (("fuzz", "gemm", "--examples", "-3"), "-3 is not in the range x>=1"),
        (("check", "gemm", "--fuzz", "-1"), "-1 is not in the range x>=0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_misuse_is_explained_after_the_usage(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2 and done.output.startswith("Usage: ")
    assert message in done.output.rstrip().splitlines()[-1]


@pytest.mark.parametrize("option", ["--html", "--readme"])
def test_a_file_in_a_folder_that_is_not_there_is_a_one_line_error(option: str) -> None:
    one_line(run("leaderboard", option, "/nowhere/file"), "/nowhere/file: No such file")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_output_is_a_one_line_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "kernelcat", "list"], stdout=full,
                              stderr=subprocess.PIPE, text=True, check=False)  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "Error: standard output: No space left on device\n"


def test_problems_of_ones_own_are_explained_inspected_and_predicted() -> None:
    name = "M=100,N=512,K=640,dtype=float16,bias=TRUE"
    problem = {"M": 100, "N": 512, "K": 640, "dtype": "float16", "bias": True,
               "activation": "none", "residual": False}  # fmt: skip
    explained = json.loads(
        run("explain", "gemm", "--problem", name, "--gpu", "h200", "--json").output
    )
    assert explained["problem"] == problem and explained["implementation"] in explained["text"]
    arguments = ("gemm", "--problem", name, "--language", "triton", "--variant", "naive")
    (report,) = json.loads(run("inspect", *arguments, "--gpu", "h200", "--json").output)
    assert report["steps"][0]["registers"] > 0
    predicted = json.loads(run("tune", *arguments, "--gpu", "a100", "--json").stdout)
    assert str(problem["K"]) in json.dumps(predicted)


def test_the_cache_of_kernels_is_shown_and_emptied(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KERNELCAT_CACHE", str(tmp_path))
    (tmp_path / "notes.txt").write_text("not a kernel")
    run("cache", "clear")  # also of what earlier tests left in memory
    run("inspect", "tma_copy", "--language", "cuda", "--variant", "vectorized", "--gpu", "h200")
    shown = json.loads(run("cache", "size", "--json").output)
    assert shown["folder"] == str(tmp_path) and shown["kernels"] >= 1 and shown["bytes"] > 1000
    assert f"{shown['kernels']} kernels" in run("cache", "size").output
    assert json.loads(run("cache", "clear", "--json").output)["deleted"] == shown["kernels"]
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert json.loads(run("cache", "size", "--json").output)["kernels"] == 0


@needs_no_gpu
def test_without_a_gpu_check_runs_triton_kernels_in_the_interpreter() -> None:
    """Runs in a separate process: kernels decorated for the interpreter can never be compiled."""
    arguments = ("check", "tma_copy", "--language", "triton", "--variant", "vectorized", "--json")
    command = [sys.executable, "-m", "kernelcat", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (outcome,) = json.loads(done.stdout)
    assert outcome["fuzz_examples"] > 0 and not outcome["failures"]


@needs_no_gpu
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tune", "gemm"), "no NVIDIA driver in this machine: install one, or name a GPU"),
        (("bench", "gemm"), "no NVIDIA driver"),
        (("ladder", "gemm", "--measure", "--problem", "4096x4096x4096"), "no NVIDIA driver"),
        (("profile", "gemm"), "no NVIDIA driver"),
        (("check", "gemm", "--language", "cuda"), "without a GPU only Triton kernels run"),
        (("check", "gemm", "--receipt"), "a receipt needs a GPU"),
        (("check", "gemm", "--device", "all"), "no NVIDIA driver"),
        (("tune", "gemm", "--device", "all"), "no NVIDIA driver"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_commands_that_need_a_gpu_are_refused_without_one(
    arguments: tuple[str, ...], message: str
) -> None:
    one_line(run(*arguments), message)


def test_check_uses_all_gpus_and_each_process_sees_one(monkeypatch) -> None:
    """With ``jobs=1``, a GPU never runs two processes at a time."""
    busy, used, implementations = set(), set(), catalog.implementations("gemm")[:5]

    def checks(command, env, **_) -> subprocess.CompletedProcess[str]:
        assert env[VISIBLE] not in busy
        busy.add(env[VISIBLE])
        used.add(env[VISIBLE])
        time.sleep(0.02)
        busy.remove(env[VISIBLE])
        entry, _, language, _, variant = command[command.index("check") + 1 :][:5]
        name = f"{entry}/{language}/{variant}"
        outcome = {"implementation": name, "problems": ["p"]}
        return subprocess.CompletedProcess(command, 0, json.dumps([outcome]), "")

    monkeypatch.setattr(certify.children, "run", checks)
    monkeypatch.setenv(VISIBLE, "3,GPU-5,6")
    done = certify.run(implementations, None, (), 0, 0, jobs=1, devices=(0, 1))
    assert {outcome.implementation for _, outcome in done} == {i.name for i in implementations}
    assert used == {"3", "GPU-5"}
    [(_, single)] = certify.run(implementations[:1], None, (), 0, 0, jobs=1, devices=(2,))
    assert single.right and "6" in used


def test_check_reports_the_findings_of_the_sanitizer(monkeypatch) -> None:
    reports = {"memcheck": Report(0), "racecheck": Report(2, ("WAR hazard at kernel+0x10",))}
    calls = []

    def sanitize(implementation, examples, tools):
        calls.append((examples, tools))
        return reports

    monkeypatch.setattr(certify, "sanitize", sanitize)
    right = certify.Outcome("", problems=["p"])
    monkeypatch.setattr(certify, "certify", lambda *_: right)
    implementations = catalog.implementations("tma_copy")[:1]
    [(_, outcome)] = certify.run(implementations, None, (), 0, 8, jobs=1, tools=("racecheck",))
    assert calls == [(8, ("racecheck",))]
    assert outcome.sanitizer == {"memcheck": 0, "racecheck": 2} and not outcome.passed
    assert outcome.findings == ["racecheck: WAR hazard at kernel+0x10"]


def test_a_receipt_takes_every_tool() -> None:
    result = run("check", "tma_copy", "--receipt", "--tool", "racecheck")
    assert result.exit_code == 2 and "a receipt takes every tool" in result.output


def test_receipts_of_two_kinds_of_gpus_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(driver, "count", lambda: 2)
    monkeypatch.setattr(gpu, "detect", lambda index: gpu.find(("h100", "h200")[index]))
    one_line(run("check", "gemm", "--device", "all"), "GPU 0 is a h100 and GPU 1 a h200")


def one_line(result: Result, message: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.output.startswith("Error: ") and result.output.count("\n") == 1, result.output
    assert message in result.output


def test_the_database_is_exported_imported_and_merged(tmp_path: Path, monkeypatch) -> None:
    database, file = tmp_path / "a.sqlite3", tmp_path / "rows.jsonl"
    tuned = run("tune", "tma_copy", "--gpu", "b200", "--problem", "64KB", "--language", "cuda",
                "--variant", "vectorized", "--db", str(database))  # fmt: skip
    assert tuned.exit_code == 0, tuned.output
    assert run("db", "path", "--db", str(database)).output.strip() == str(database)
    exported = json.loads(run("db", "export", str(file), "--db", str(database), "--json").output)
    assert exported["rows"] == len(read_all(file)) > 0
    other = str(tmp_path / "b.sqlite3")
    added = json.loads(run("db", "import", str(file), "--db", other, "--json").output)
    assert added["added"] == exported["rows"] and not added["refused"]
    again = json.loads(run("db", "merge", str(database), "--db", other, "--json").output)
    assert again["conflicts"] == []


def test_a_malformed_import_names_the_line_and_adds_nothing(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"entry": "gemm"}\n')
    result = run("db", "import", str(file), "--db", str(tmp_path / "a.sqlite3"))
    assert result.exit_code == 1 and "bad.jsonl:1: " in result.output
    assert "nothing was added" in result.output and "Traceback" not in result.output


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.sqlite3"
    file.write_text("not a database, but long enough to look at " * 40)
    one_line(run("db", "export", str(tmp_path / "x.jsonl"), "--db", str(file)), "not a SQLite")


def test_a_warning_is_one_line_without_its_place_in_the_sources(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kernelcat", "explain", "gemm", "--gpu", "h200",
               "--problem", "4096x4096x4096"]  # fmt: skip
    missing = os.environ | {"KERNELCAT_DB": str(tmp_path / "none.sqlite3")}
    done = subprocess.run(command, capture_output=True, text=True, env=missing, timeout=60)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 0 and line.startswith("Warning: there is no tuning database at ")

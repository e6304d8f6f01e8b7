"""The command line: every verb has an example that parses, and every mistake one clear line."""

from __future__ import annotations

import json
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
from kernelcat.runtime import driver, gpu
from kernelcat.runtime.devices import VISIBLE
from kernelcat.store.lines import read_all
from kernelcat.verify import certify
from kernelcat.verify.sanitizer import Report

needs_no_gpu = pytest.mark.skipif(driver.count() > 0, reason="tells what is said without a GPU")


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


VERBS = list(commands(main))


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_help_has_an_example_that_parses(verb: tuple[str, ...]) -> None:
    text = run(*verb, "--help").output
    example = re.search(r"Example:\n\s+kernelcat (.*)", text)
    assert example, text
    words = shlex.split(example[1])
    command: click.Command = main
    context = click.Context(main)
    while isinstance(command, click.Group):
        found = command.get_command(context, words.pop(0))
        assert found is not None
        command = found
    command.make_context(verb[-1], words)  # raises on an unknown option or a missing argument


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_has_json(verb: tuple[str, ...]) -> None:
    assert "--json" in run(*verb, "--help").output


def test_list_and_show_tell_the_same_entries() -> None:
    rows = json.loads(run("list", "--json").output)
    assert {"gemm", "tma_copy"} <= {row["entry"] for row in rows}
    for row in rows:
        card = json.loads(run("show", row["entry"], "--json").output)
        assert card["summary"] == row["summary"]
        assert {i["language"] for i in card["implementations"]} == set(row["languages"])
        assert row["entry"] in run("show", row["entry"]).output


def test_inspect_proves_what_it_says() -> None:
    arguments = ("inspect", "gemm", "--language", "cuda", "--variant", "wgmma", "--gpu", "h200")
    (report,) = json.loads(run(*arguments, "--json").output)
    assert all(report["techniques"].values()) and report["techniques"]
    text = run(*arguments).output
    for line in ("wgmma by HGMMA", "tma by UTMALDG", "register reallocation by USETMAXREG"):
        assert f"  proven  {line}\n" in text
    assert "HGMMA" in run(*arguments, "--sass").output


def test_doctor_names_the_line_that_installs_what_is_missing() -> None:
    findings = {f["what"]: f for f in json.loads(run("doctor", "--json").output)}
    assert {"GPU", "CuPy", "Triton", "CuTe DSL", "torch", "entry gemm"} <= set(findings)
    for finding in findings.values():
        assert finding["found"] or finding["remedy"], finding


@pytest.mark.parametrize(
    ("arguments", "words"),
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
        (("ladder", "gemm", "--measure"), "name a --problem to measure"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_answered_with_one_line(arguments: tuple[str, ...], words: str) -> None:
    one_line(run(*arguments), words)


@needs_no_gpu
def test_without_a_gpu_check_runs_triton_kernels_in_the_interpreter() -> None:
    """In a process of its own: what Triton decorated for the interpreter never compiles again."""
    arguments = ("check", "tma_copy", "--language", "triton", "--variant", "vectorized", "--json")
    command = [sys.executable, "-m", "kernelcat", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (outcome,) = json.loads(done.stdout)
    assert outcome["fuzz_examples"] > 0 and not outcome["failures"]


@needs_no_gpu
@pytest.mark.parametrize(
    ("arguments", "words"),
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
def test_without_a_gpu_it_says_so(arguments: tuple[str, ...], words: str) -> None:
    one_line(run(*arguments), words)


def test_check_spreads_over_the_gpus_and_each_process_sees_one(monkeypatch) -> None:
    """With ``--jobs 1``: never two processes on a GPU at a time."""
    busy, seen, found = set(), set(), catalog.implementations("gemm")[:5]

    def checks(command, env, **_) -> subprocess.CompletedProcess[str]:
        assert env[VISIBLE] not in busy
        busy.add(env[VISIBLE])
        seen.add(env[VISIBLE])
        time.sleep(0.02)
        busy.remove(env[VISIBLE])
        name = f"{command[4]}/{command[6]}/{command[8]}"
        outcome = {"implementation": name, "problems": ["p"]}
        return subprocess.CompletedProcess(command, 0, json.dumps([outcome]), "")

    monkeypatch.setattr(certify.subprocess, "run", checks)
    monkeypatch.setenv(VISIBLE, "3,GPU-5,6")
    done = certify.run(found, None, (), 0, 0, jobs=1, devices=(0, 1))
    assert {outcome.implementation for _, outcome in done} == {i.name for i in found}
    assert seen == {"3", "GPU-5"}
    [(_, alone)] = certify.run(found[:1], None, (), 0, 0, jobs=1, devices=(2,))
    assert alone.right and "6" in seen


def test_check_says_what_the_sanitizer_found(monkeypatch) -> None:
    reports = {"memcheck": Report(0), "racecheck": Report(2, ("WAR hazard at kernel+0x10",))}
    asked = []

    def sanitize(implementation, examples, tools):
        asked.append((examples, tools))
        return reports

    monkeypatch.setattr(certify, "sanitize", sanitize)
    right = certify.Outcome("", problems=["p"])
    monkeypatch.setattr(certify, "certify", lambda *_: right)
    found = catalog.implementations("tma_copy")[:1]
    [(_, outcome)] = certify.run(found, None, (), 0, 8, jobs=1, tools=("racecheck",))
    assert asked == [(8, ("racecheck",))]
    assert outcome.sanitizer == {"memcheck": 0, "racecheck": 2} and not outcome.passed
    assert outcome.findings == ["racecheck: WAR hazard at kernel+0x10"]


def test_a_receipt_takes_every_tool() -> None:
    result = run("check", "tma_copy", "--receipt", "--tool", "racecheck")
    assert result.exit_code == 2 and "a receipt takes every tool" in result.output


def test_receipts_of_two_kinds_of_gpus_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(driver, "count", lambda: 2)
    monkeypatch.setattr(gpu, "detect", lambda index: gpu.find(("h100", "h200")[index]))
    one_line(run("check", "gemm", "--device", "all"), "GPU 0 is a h100 and GPU 1 a h200")


def one_line(result: Result, words: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.output.startswith("Error: ") and result.output.count("\n") == 1, result.output
    assert words in result.output


def test_the_database_goes_out_and_comes_in(tmp_path: Path, monkeypatch) -> None:
    database, file = tmp_path / "a.sqlite3", tmp_path / "rows.jsonl"
    tuned = run("tune", "tma_copy", "--gpu", "b200", "--problem", "64KB", "--language", "cuda",
                "--db", str(database))  # fmt: skip
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


def test_a_file_that_is_no_database_is_said_to_be_none(tmp_path: Path) -> None:
    file = tmp_path / "a.sqlite3"
    file.write_text("not a database, but long enough to look at " * 40)
    one_line(run("db", "export", str(tmp_path / "x.jsonl"), "--db", str(file)), "not a SQLite")

"""compute-sanitizer: exact allocations on a GPU, and the parsed output of each tool."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kernelcat import catalog
from kernelcat.errors import KernelcatError, MissingDependency
from kernelcat.verify import sanitizer
from kernelcat.verify.sanitizer import Report, parse, sanitize, sanitizer_path

COPY = """
extern "C" __global__ void copy(const char* src, char* dst, int n) {
  const int i = threadIdx.x;
  if (i < n) dst[i] = src[i];
}
"""
RACE = """
extern "C" __global__ void copy(const char* src, char* dst, int n) {
  __shared__ char tile[128];
  const int i = threadIdx.x;
  if (i < n) tile[i] = src[i];
  const int j = (i + 32) % n;  // written by another warp
  if (i < n) dst[j] = tile[j];
}
"""

RUN = """
import sys
from dataclasses import replace
from kernelcat import catalog
from kernelcat.verify import gate
from kernelcat.runtime.device import MirroredDevice
from kernelcat.catalog.implementation import Config, Int32, Pointer, Program, Step
from kernelcat.jit.cuda import CudaSource

source = CudaSource(sys.argv[1], "copy")
params = (Pointer("src"), Pointer("dst"), Int32(100 + int(sys.argv[2])))
device = MirroredDevice()
planted = replace(
    catalog.in_language("tma_copy", "cuda")[0],
    program=lambda problem, config, gpu: Program((Step(source, (1, 1, 1), params, 128),)),
)
entry = catalog.entry("tma_copy")
problem = entry.problem(rows=1, cols=100, src_stride=100, dst_stride=100, dtype="uint8")
prepared = gate.prepare(entry, problem, device)
assert prepared.verify(device.load(planted, problem, Config())).passed
"""

RACES = """\
========= COMPUTE-SANITIZER
kernelcat example: triton/gluon tile=128 on K=64 M=9
========= Error: Race reported between Write access at gemm+0x430
=========     and Read access at gemm+0x770 [248 hazards]
=========     and Read access at gemm+0x7a0 [248 hazards]
=========
kernelcat example: triton/gluon tile=128 on K=96 M=9
========= Error: Race reported between Write access at gemm+0x430
=========     and Read access at gemm+0x770 [1,024 hazards]
=========     and Read access at gemm+0x7a0 [512 hazards]
=========
========= Warning: Detected overflow of tracked cuda::barrier structures. Results might be \
incorrect. Try using --num-cuda-barriers to fix the issue
gemm/triton/gluon: 8 passed
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""

HAZARDS = """\
========= COMPUTE-SANITIZER
kernelcat example: triton/gluon tile=128 on K=64 M=9
========= Error: Potential WAR hazard detected at __shared__ 0x410 in block (11,0,0) :
=========     Read Thread (127,0,0) at gemm+0x860
=========     Write Thread (0,0,0) at gemm+0x9d0
=========     Current Value : 0, Incoming Value : 181
=========
========= Error: Potential WAR hazard detected at __shared__ 0x411 in block (11,0,0) :
=========     Read Thread (126,0,0) at gemm+0x860
=========     Write Thread (0,0,0) at gemm+0x9d0
=========
========= Warning: Maximum number of hazards reached. Environment variable \
NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS can be used to increase this count.
========= RACECHECK SUMMARY: 10000 hazards displayed (10000 errors, 0 warnings)
"""

INVALID = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 1 bytes
=========     at copy+0x70
=========     by thread (100,0,0) in block (0,0,0)
=========     Access to 0x7f1c2fa00064 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f1c2fa00000 of size 100 bytes
=========
========= Program hit CUDA_ERROR_LAUNCH_FAILED (error 719) due to "unspecified launch failure" \
on CUDA API call to cuCtxSynchronize.
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""


def copy_command(tmp_path: Path, kernel: str, beyond: int = 0) -> list[str]:
    """The command of a process that copies 100 bytes and ``beyond`` bytes past their end."""
    source = tmp_path / "copy.cu"
    source.write_text(kernel)
    return [sys.executable, "-c", RUN, str(source), str(beyond)]


@pytest.mark.gpu
@pytest.mark.skipif(sanitizer_path() is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("beyond", [0, 1])
def test_one_byte_out_of_bounds_is_reported(tmp_path: Path, beyond: int) -> None:
    report = sanitizer.run("memcheck", copy_command(tmp_path, COPY, beyond))
    assert (report.errors > 0) == (beyond > 0), report
    assert any("Invalid __global__ " in f and "at copy+0x" in f for f in report.findings) == beyond


@pytest.mark.gpu
@pytest.mark.skipif(sanitizer_path() is None, reason="compute-sanitizer is not installed")
def test_a_race_is_reported_with_its_threads(tmp_path: Path) -> None:
    races = sanitizer.run("racecheck", copy_command(tmp_path, RACE))
    assert races.errors > 0
    for part in ("hazard detected at __shared__ 0x", "Thread (", " at copy+0x"):
        assert part in races.findings[0]


def test_errors_come_from_the_summary_and_a_failure_without_one_raises() -> None:
    assert parse("memcheck", "========= ERROR SUMMARY: 3 errors", 1) == Report(3)
    assert parse("racecheck", "= RACECHECK SUMMARY: 0 hazards displayed (0 errors)", 0).errors == 0
    with pytest.raises(KernelcatError, match="exit 1"):
        parse("memcheck", "Traceback\n========= ERROR SUMMARY: 0 errors", 1)
    with pytest.raises(KernelcatError, match="exit 9"):
        parse("synccheck", "killed", 9)


def test_a_finding_is_one_line_with_its_example_and_the_number_of_similar_findings() -> None:
    race, overflow = parse("racecheck", RACES, 0).findings
    assert race == (
        "Error: Race reported between Write access at gemm+0x430, and Read access at gemm+0x770 "
        "[248 hazards], and Read access at gemm+0x7a0 [248 hazards]; triton/gluon tile=128 on "
        "K=64 M=9 (first of 2)"
    )
    assert overflow.startswith("Warning: Detected overflow of tracked cuda::barrier structures")
    [hazard] = parse("racecheck", HAZARDS, 0).findings
    assert hazard == (
        "Error: Potential WAR hazard detected at __shared__ 0x410 in block (11,0,0), Read Thread "
        "(127,0,0) at gemm+0x860, Write Thread (0,0,0) at gemm+0x9d0; triton/gluon tile=128 on "
        "K=64 M=9 (first of 2)"
    )
    access, error = parse("memcheck", INVALID, 1).findings
    assert access.startswith("Invalid __global__ write of size 1 bytes, at copy+0x70, by thread (1")
    assert access.endswith("1 bytes after the nearest allocation at 0x7f1c2fa00000 of size 100 byt"
                           "es")  # fmt: skip
    assert error.startswith("Program hit CUDA_ERROR_LAUNCH_FAILED")


def test_the_first_five_distinct_findings_are_reported() -> None:
    record = "========= Error: Race reported between Write access at gemm+0x{:x}\n"
    many = "".join(record.format(16 * i) for i in range(20)) + RACES
    findings = parse("racecheck", many, 0).findings
    assert [f.rpartition("+")[2] for f in findings] == ["0x0", "0x10", "0x20", "0x30", "0x40"]


TOOL = """\
kind = 'hazard' if 'hazard' in words else words[1]
clean = '========= ERROR SUMMARY: 0 errors'
print((here / kind).read_text() if (here / kind).exists() else clean)
"""
KERNELCAT = """\
print("8 passed, or not")
sys.exit((here / "failing").exists())
"""


@pytest.fixture
def fake_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake compute-sanitizer, and a fake kernelcat.

    Returns the file that gets one line for each run: the program's name and its arguments.
    """
    for name, text in {"hazard": HAZARDS, "memcheck": INVALID}.items():
        (tmp_path / name).write_text(text)
    for name, body in {"compute-sanitizer": TOOL, "kernelcat": KERNELCAT}.items():
        script = tmp_path / name
        script.write_text(
            f"#!{sys.executable}\nimport sys, pathlib, json\n"
            f"here, words = pathlib.Path({str(tmp_path)!r}), sys.argv[1:]\n"
            "with (here / 'runs').open('a') as runs:\n"
            f"    runs.write(json.dumps([{name!r}, *words]) + '\\n')\n{body}"
        )
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(
        sanitizer.children, "python", lambda _, *words: [str(tmp_path / "kernelcat"), *words]
    )
    return tmp_path / "runs"


def test_kernels_are_compiled_before_a_tool_runs(fake_runs: Path) -> None:
    sanitize(catalog.implementation("moe_route", "cute", "bitmask"), 8, ["memcheck"])
    plain, tool = (json.loads(line) for line in fake_runs.read_text().splitlines())
    assert plain[:2] == ["kernelcat", "fuzz"] and "--mirrored" not in plain
    assert tool[0] == "compute-sanitizer" and tool[-len(plain) - 1 :] == [
        str(fake_runs.with_name("kernelcat")), *plain[1:], "--mirrored",
    ]  # fmt: skip


def test_no_tool_runs_after_a_run_that_failed_without_one(fake_runs: Path) -> None:
    fake_runs.with_name("failing").touch()
    with pytest.raises(KernelcatError, match="exit status 1: 8 passed, or not"):
        sanitize(catalog.implementation("moe_route", "cute", "bitmask"), 8)
    assert len(fake_runs.read_text().splitlines()) == 1


REFUSED = """\
========= COMPUTE-SANITIZER
========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API \
call to {function}.
=========
========= Target application returned an error
========= ERROR SUMMARY: 1 error
"""


@pytest.mark.parametrize("function", ["cuGetProcAddress_v2", "cuLaunchKernelEx"])
def test_every_refused_call_of_the_driver_is_an_error(function: str) -> None:
    report = parse("memcheck", REFUSED.format(function=function), 0)
    assert report.errors == 1 and report.findings[0].endswith(f"API call to {function}.")


def test_each_tool_runs_once_over_small_problems(fake_runs: Path) -> None:
    reports = sanitize(catalog.implementation("gemm", "triton", "gluon"), 8)
    assert {tool: report.errors for tool, report in reports.items()} == {
        "memcheck": 2, "racecheck": 10000, "synccheck": 0, "initcheck": 0,
    }  # fmt: skip
    _, *runs = [" ".join(json.loads(line)) for line in fake_runs.read_text().splitlines()]
    assert len(runs) == 4
    for tool, run in zip(sanitizer.SANITIZERS, runs, strict=True):
        assert f"--tool {tool} " in run
        assert ("--racecheck-report hazard" in run) == (tool == "racecheck")
        assert ("--num-cuda-barriers 1024" in run) == (tool == "synccheck")
        assert "fuzz gemm --language triton --variant gluon --examples 8 --limit 160" in run
        assert run.endswith("--mirrored") and "--show-backtrace no" in run


TABLE = """\
kernelcat ordered: gemm+0x5a70>gemm+0x100 gemm+0x5a80>gemm+0x100
kernelcat example: triton/gluon tile=128 on K=64 M=9
========= Error: Potential {kind} hazard detected at __shared__ 0x344d3 in block (0,0,0) :
=========     Write Thread (31,0,0) at gemm+{write} in device.py:63
=========     Read Thread (224,0,0) at gemm+{read} in device.py:63
=========     Current Value : 2
=========
kernelcat example: triton/gluon tile=64 on K=64 M=9
========= Error: Potential RAW hazard detected at __shared__ 0x344d3 in block (0,0,0) :
=========     Write Thread (31,0,0) at gemm+0x5a70 in device.py:63
=========     Read Thread (224,0,0) at gemm+0x100 in device.py:63
=========     Current Value : 2
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


@pytest.mark.parametrize(
    ("write", "read", "kind", "errors"),
    [
        ("0x5a70", "0x100", "RAW", 1),
        ("0x5a80", "0x100", "RAW", 1),
        ("0x5a90", "0x100", "RAW", 2),
        ("0x5a70", "0x110", "RAW", 2),
        ("0x5a70", "0x100", "WAR", 2),
    ],
)
def test_a_hazard_listed_as_ordered_is_no_error_in_its_example(
    write: str, read: str, kind: str, errors: int
) -> None:
    report = parse("racecheck", TABLE.format(write=write, read=read, kind=kind), 0)
    assert (report.errors, report.ordered) == (errors, 2 - errors)
    assert any("tile=64" in finding for finding in report.findings)


def test_only_the_requested_tools_run(fake_runs: Path) -> None:
    implementation = catalog.implementation("gemm", "cuda", "wgmma")
    assert set(sanitize(implementation, 8, ["synccheck"])) == {"synccheck"}
    tools = [line for line in fake_runs.read_text().splitlines() if "--tool" in line]
    assert len(tools) == 1


def test_the_error_of_a_missing_compute_sanitizer_names_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(MissingDependency, match="install the CUDA toolkit"):
        sanitize(catalog.implementation("gemm", "cuda", "wgmma"), 8)

"""Profiles: the parsed output of Nsight Compute, its error messages, and the shipped profiles."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kernelcat import catalog
from kernelcat.catalog.digest import digest, digest_of
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.cli import profiling
from kernelcat.errors import InvalidArgument, KernelcatError, MissingDependency, Unsupported
from kernelcat.report import traffic
from kernelcat.report.readme import render_readme
from kernelcat.runtime import children, gpu
from kernelcat.store import Measurement, Store
from kernelcat.verify import profiler, profiles
from kernelcat.verify.profiles import Counts, Profile

H200 = gpu.find("h200")
PROBLEM = catalog.entry("tma_copy").named("16MB")

PRINTED = """\
==PROF== Connected to process 4242 (/usr/bin/python3.12)
==PROF== Profiling "copy_rows" - 0: 0%....50%....100% - 2 passes
==PROF== Profiling "void finish<__nv_bfloat16, 4>(...)" - 1: 0%....50%....100% - 2 passes
==PROF== Disconnected from process 4242
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",\
"Grid Size","Device","CC","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum",\
"l1tex__m_xbar2l1tex_read_bytes.sum","lts__t_bytes.sum","lts__t_sectors_srcunit_tex_op_read.sum"
"","","","","","","","","","","","byte","byte","ns","byte","byte","sector"
"0","4242","python3.12","127.0.0.1","copy_rows","1","7","(256, 1, 1)","(264, 1, 1)","0","9.0",\
"16,777,216","8,388,608","9,504","33,554,432","50,331,648","524,288"
"1","4242","python3.12","127.0.0.1","void finish<__nv_bfloat16, 4>(int *, ""x"")","1","7",\
"(256, 1, 1)","(1, 1, 1)","0","9.0","1,024","0","1,496","n/a","2,048","32"
"""
"""Output of ``ncu --csv --page raw --print-units base``: progress, the names of the metrics, their
units, and one line for each launch."""

DENIED = """\
==PROF== Connected to process 4242 (/usr/bin/python3.12)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance \
Counters on the target device 0. For instructions on enabling permissions and to get more \
information see https://developer.nvidia.com/ERR_NVGPUCTRPERM
==PROF== Disconnected from process 4242
==WARNING== No kernels were profiled.
"""


def implementation() -> Implementation:
    return catalog.implementation("tma_copy", "cuda", "vectorized")


def test_the_launches_of_a_call_are_summed() -> None:
    counts = profiler.parse(PRINTED)
    assert counts == Counts(
        launches=2,
        duration_us=11.0,
        dram_read_bytes=16_778_240,
        dram_write_bytes=8_388_608,
        l2_bytes=50_333_696,
        l2_read_bytes=32 * 524_320,
        sm_read_bytes=None,  # the second launch has no count
    )


def test_units_are_read_from_the_output() -> None:
    scaled = PRINTED.replace('"byte","byte","ns"', '"Kbyte","byte","usecond"')
    counts = profiler.parse(scaled)
    assert counts.dram_read_bytes == 16_778_240_000
    assert counts.duration_us == 11_000.0
    with pytest.raises(KernelcatError, match=r"does not count \['dram__bytes_read.sum'\]"):
        profiler.parse(PRINTED.replace('"16,777,216"', '"n/a"'))


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (DENIED, MissingDependency, "may not read this GPU's counters: run as root, or load"),
        ("==WARNING== No kernels were profiled.\n", MissingDependency, "found no launch"),
        (
            "==ERROR== The application returned an error code (1).\n"
            "==WARNING== No kernels were profiled.\nTraceback (most recent call last):\n"
            "kernelcat.errors.LaunchError: the driver refused\n",
            KernelcatError,
            "nothing was profiled: kernelcat.errors.LaunchError: the driver refused",
        ),
        ("==ERROR== Failed to find metric x\n", KernelcatError, "==ERROR== Failed to find metric"),
        ("", KernelcatError, "ncu printed nothing"),
    ],
)
def test_every_failure_of_ncu_is_a_one_line_error(
    output: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        profiler.parse(output)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake ``ncu`` that prints PRINTED. Returns the file to which ncu writes its arguments."""
    (tmp_path / "printed").write_text(PRINTED)
    script = tmp_path / "ncu"
    script.write_text(
        f"#!{sys.executable}\nimport sys, pathlib, json\nhere = pathlib.Path({str(tmp_path)!r})\n"
        "if '--version' in sys.argv: sys.exit(print('Version 2025.3.0.0 (build 36273991)'))\n"
        "(here / 'arguments').write_text(json.dumps(sys.argv[1:]))\n"
        "print((here / 'printed').read_text())\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "arguments"


def test_a_profile_measures_one_cold_launch_and_records_its_origin(ncu: Path) -> None:
    profile = profiler.profile(implementation(), PROBLEM, H200)
    assert (profile.entry, profile.variant, profile.gpu) == ("tma_copy", "vectorized", "h200")
    assert profile.source == digest(implementation()) and not profile.stale
    assert profile.profiler == "2025.3.0.0" and profile.problem_name == "16MB"
    assert profile.overhead == pytest.approx((16_778_240 + 8_388_608) / (32 << 20), rel=0.01)
    arguments = " ".join(json.loads(ncu.read_text()))
    for flags in ("--profile-from-start off", "--cache-control all", "--clock-control none",
                  "--page raw",
                  "child.py kernelcat.verify.profiler tma_copy cuda vectorized {"):  # fmt: skip
        assert flags in arguments
    assert Profile.from_json(profile.to_json()) == profile


def test_the_best_measured_configuration_is_profiled_else_the_default() -> None:
    vectorized, problem = (
        implementation(),
        catalog.entry("tma_copy").problem(
            rows=64, cols=4096, src_stride=4096, dst_stride=4096, dtype="bfloat16"
        ),
    )
    default = vectorized.default(problem, H200)
    assert profiler.best(vectorized, problem, H200) == default
    other = next(c for c in vectorized.configs(problem, H200) if c != default)
    row = json.loads(Path(__file__).with_name("measurement.json").read_text())
    row |= {"entry": "tma_copy", "variant": "vectorized", "problem": problem.values,
            "problem_name": None, "config": dict(other), "max_error": 0.0}  # fmt: skip
    with Store.open() as store:
        store.add([Measurement.from_json(row)])
    assert profiler.best(vectorized, problem, H200) == Config(other)


def test_requested_parameters_replace_those_of_the_best_configuration(ncu: Path) -> None:
    vectorized = implementation()
    best = profiler.best(vectorized, PROBLEM, H200)
    other = next(c for c in vectorized.configs(PROBLEM, H200) if c != best)
    requested = {name: str(value) for name, value in other.items() if value != best[name]}
    assert profiler.configuration(vectorized, PROBLEM, H200, {}) == best
    assert profiler.configuration(vectorized, PROBLEM, H200, requested) == other
    profile = profiler.profile(vectorized, PROBLEM, H200, requested)
    assert profile.config == other and profile.asked
    assert json.loads(ncu.read_text())[-1] == other.key
    assert not profiler.profile(vectorized, PROBLEM, H200).asked
    assert Profile.from_json(profile.to_json()) == profile
    name, value = next(iter(best.items()))
    with pytest.raises(Unsupported, match=r"vectorized has no tiel=4; there is: unroll, streaming"):
        profiler.configuration(vectorized, PROBLEM, H200, {"tiel": 4})
    with pytest.raises(Unsupported, match=rf"has no {name}=x; there is: .*{value}"):
        profiler.configuration(vectorized, PROBLEM, H200, {name: "x"})
    picky = replace(vectorized, illegal=lambda c, p, g: None if c == best else "not that one")
    with pytest.raises(Unsupported, match="not that one"):
        profiler.configuration(picky, PROBLEM, H200, requested)


def test_the_command_takes_parameters_one_by_one_or_as_json() -> None:
    words = ("tile=128x256", '{"stages": 4, "split": true}', "where=a=b")
    assert profiling._parameters(words) == {
        "tile": "128x256", "stages": 4, "split": True, "where": "a=b",
    }  # fmt: skip
    for wrong in ("tile", "{tile}", "{"):
        with pytest.raises(InvalidArgument, match="--config"):
            profiling._parameters((wrong,))


def test_profiling_an_illegal_configuration_is_unsupported() -> None:
    rejecting = replace(implementation(), illegal=lambda config, problem, gpu: "not today")
    with pytest.raises(Unsupported, match="tma_copy/cuda/vectorized: not today"):
        profiler.best(rejecting, PROBLEM, H200)


def test_without_ncu_the_error_names_the_command_that_installs_ncu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(MissingDependency, match="apt-get install cuda-nsight-compute"):
        profiler.profile(implementation(), PROBLEM, H200)


def a_profile(variant: str = "vectorized", **changes: object) -> Profile:
    profile = Profile("tma_copy", "cuda", variant, digest_of("tma_copy", "cuda", variant), "h200",
                    PROBLEM.values, "16MB", {}, profiler.parse(PRINTED), {}, "2025.3.0.0",
                    "2026-11-20T00:00:00+00:00")  # fmt: skip
    return replace(profile, **changes)


def test_writing_keeps_the_newest_profile_of_each_implementation_and_problem(
    tmp_path: Path,
) -> None:
    first, bulk = a_profile(), a_profile("bulk")
    profiles.write(tmp_path, [first, bulk])
    newer = replace(first, created_at="2026-11-21T00:00:00+00:00")
    profiles.write(tmp_path, [newer, replace(newer, gpu="h100")])
    assert profiles.read(tmp_path) == [replace(newer, gpu="h100"), bulk, newer]


def test_a_requested_configuration_has_a_separate_line_with_its_parameters(tmp_path: Path) -> None:
    best = a_profile(config={"threads": 256})
    requested = replace(best, asked=True)
    other = replace(best, asked=True, config={"unroll": 2, "threads": 128})
    profiles.write(tmp_path, [best, requested, other])
    profiles.write(tmp_path, [replace(best, config={"threads": 512})])
    stored = profiles.read(tmp_path)
    assert [(p.asked, dict(p.config)) for p in stored] == [
        (False, {"threads": 512}), (True, other.config), (True, {"threads": 256}),
    ]  # fmt: skip
    cells = [line[0] for line in traffic.sheet(stored).lines]
    assert cells == ["cuda/vectorized", "cuda/vectorized threads=128 unroll=2",
                     "cuda/vectorized threads=256"]  # fmt: skip
    without_asked = json.loads(best.to_json())
    del without_asked["asked"]
    assert Profile.from_json(json.dumps(without_asked)) == best


def test_the_readme_shows_shipped_profiles_in_the_order_of_the_ladder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "shipped_folder", lambda: tmp_path)
    text = "<!-- profile:tma_copy:h200 -->\n<!-- /profile -->"
    assert "Nothing measured yet." in render_readme(text, [])
    profiles.write(tmp_path, [a_profile("bulk", source="0" * 16), a_profile()])
    lines = render_readme(text, []).splitlines()
    assert lines[1].startswith("| variant | problem | DRAM read | DRAM written | × least |")
    assert lines[3].startswith("| cuda/vectorized | 16MB | 16.8 | 8.4 | 0.75 | 16.8 |  | 50.3 |")
    assert lines[4].startswith("| cuda/bulk† |")
    assert lines[6].startswith("`kernelcat profile tma_copy`: MB of one call with cold caches")


def test_shipped_profiles_are_not_stale() -> None:
    stale = {p.key for p in profiles.read(profiles.shipped_folder()) if p.stale}
    assert not stale, f"profile again: {sorted(stale)}"


@pytest.mark.gpu
def test_the_profiled_process_also_runs_without_ncu() -> None:
    config = implementation().default(PROBLEM, gpu.detect())
    words = ["tma_copy", "cuda", "vectorized", PROBLEM.key, config.key]
    subprocess.run(children.python("kernelcat.verify.profiler", *words), check=True)

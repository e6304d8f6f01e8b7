"""``kernelcat build`` and ``kernelcat.prepare``: compiled here, run where there is no compiler."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from driver_recorder import Recorder

import kernelcat
from kernelcat import catalog
from kernelcat.call import ahead
from kernelcat.call.choice import Pin
from kernelcat.catalog import discovery
from kernelcat.catalog.implementation import Config
from kernelcat.cli import main
from kernelcat.errors import InvalidArgument, MissingDependency
from kernelcat.jit import bundle, cache, cuda
from kernelcat.runtime import code, driver, gpu, launcher
from kernelcat.store import workload
from kernelcat.store.workload import Use

H200 = gpu.SKUS["h200"]
pytestmark = pytest.mark.filterwarnings("ignore:there is no tuning database")
PROBLEM = catalog.entry("rms_norm").named(next(iter(catalog.entry("rms_norm").problems)))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of one recorded problem, with its digest in the file ``digest`` beside it."""
    root = tmp_path_factory.mktemp("bundles")
    recorded = Use("rms_norm", PROBLEM.values, "h200", "rms_norm/cuda/x", {}, "default", 1.0,
                   "predicted", 3)  # fmt: skip
    workload.add(root / "workload.jsonl", [recorded])
    arguments = ["build", "--gpu", "h200", "--language", "cuda", "--json", "--workload",
                 str(root / "workload.jsonl"), "-o", str(root / "kernels")]  # fmt: skip
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["kernels"] >= 1 and len(report["served"]) == 1 and not report["refused"]
    (root / "digest").write_text(report["sha256"])
    return root / "kernels"


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "kernels"))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without NVRTC, its headers and anything in the cache."""

    def missing(*_: object) -> None:
        raise MissingDependency(f"CUDA C++ needs NVRTC: {cuda.INSTALL}")

    for name in ("_nvrtc", "_nvrtc_version", "header_folders"):
        monkeypatch.setattr(cuda, name, missing)
    monkeypatch.setenv("KERNELCAT_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "prepared", {})
    monkeypatch.setattr(discovery, "ahead", set())
    yield
    assert not (tmp_path / "empty").exists(), "something was compiled"


def test_a_machine_without_a_compiler_launches_what_the_bundle_has(
    folder: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    decision, _ = decide_with_compiler(folder)
    chosen = (decision.implementation, PROBLEM, decision.config, H200)
    with pytest.raises(MissingDependency, match="NVRTC"):
        launcher.load(*chosen, 0)
    kernelcat.prepare(folder)
    recorder = Recorder()
    monkeypatch.setattr(driver, "opened", lambda: recorder)
    monkeypatch.setattr(code, "_functions", {})
    monkeypatch.setattr(code, "_of_sources", {})
    loaded = launcher.load(*chosen, 0)
    assert len(loaded._program.kernels) == len(recorder.loaded) >= 1
    assert all(code.startswith(b"\x7fELF") for code, _, _ in recorder.loaded)


def decide_with_compiler(folder: Path):
    """What the building machine chose, from the bundle's own artifacts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "prepared", bundle.read(folder))
        [asked], _ = ahead.recorded(workload.read(folder_workload(folder)), language="cuda")
        return ahead.decide(asked, H200, ahead.store.snapshot())


def folder_workload(folder: Path) -> Path:
    path = folder.with_name("workload.jsonl")
    if not path.exists():
        use = Use("rms_norm", PROBLEM.values, "h200", "x", {}, "default", 1.0, "predicted", 1)
        workload.add(path, [use])
    return path


def test_a_kernel_that_the_bundle_lacks_is_named_with_the_missing_compiler(
    folder: Path, no_compiler: None
) -> None:
    kernelcat.prepare(folder)
    chosen = catalog.in_language("tma_copy", "cuda")[0]
    problem = next(iter(catalog.entry("tma_copy").problems.values()))
    with pytest.raises(MissingDependency, match=r"no prepared folder has .*\.cu for sm_90a.*NVRTC"):
        launcher.load(chosen, problem, chosen.default(problem, H200), H200, 0)


def test_what_changes_with_the_compiler_is_not_in_the_portable_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = catalog.in_language("rms_norm", "cuda")[0]
    config = chosen.default(PROBLEM, H200)
    [source] = {step.source for step in chosen.program(PROBLEM, config, H200).steps}
    before = cache.portable_key(source, "sm_90a"), cache.key(source, "sm_90a")
    monkeypatch.setattr(cuda, "_nvrtc_version", lambda: "99.0")
    after = cache.portable_key(source, "sm_90a"), cache.key(source, "sm_90a")
    assert after[0] == before[0] != cache.portable_key(source, "sm_100a") and after[1] != before[1]


@pytest.mark.parametrize("name", ["SHA256SUMS", "bundle.json", "artifact"])
def test_one_byte_anywhere_refuses_the_whole_bundle(
    folder: Path, no_compiler: None, name: str
) -> None:
    is_artifact = name == "artifact"
    path = max(folder.iterdir(), key=lambda p: p.stat().st_size) if is_artifact else folder / name
    data = path.read_bytes()
    for position in {0, len(data) // 2, len(data) - 1}:
        path.write_bytes(bytes([*data[:position], data[position] ^ 1, *data[position + 1 :]]))
        with pytest.raises(InvalidArgument, match="is refused: ") as error:
            kernelcat.prepare(folder)
        assert "\n" not in str(error.value) and not cache.prepared
    path.write_bytes(data)
    kernelcat.prepare(folder)
    assert cache.prepared


def test_missing_and_added_files_and_other_digests_refuse_it(
    folder: Path, no_compiler: None, built: Path, tmp_path: Path
) -> None:
    digest = built.with_name("digest").read_text()
    assert digest == hashlib.sha256((folder / "SHA256SUMS").read_bytes()).hexdigest()
    kernelcat.prepare(folder, sha256=digest.upper())
    with pytest.raises(InvalidArgument, match=f"it is {digest}, not 00"):
        kernelcat.prepare(folder, sha256="00")
    (folder / "more").write_bytes(b"")
    with pytest.raises(InvalidArgument, match="more is not listed in SHA256SUMS"):
        kernelcat.prepare(folder)
    (folder / "more").unlink()
    (folder / "bundle.json").unlink()
    with pytest.raises(InvalidArgument, match=r"bundle\.json is missing"):
        kernelcat.prepare(folder)
    with pytest.raises(InvalidArgument, match="cannot read the bundle"):
        kernelcat.prepare(tmp_path / "nowhere")


def test_a_bundle_goes_into_a_new_folder_only(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(InvalidArgument, match="is not empty"):
        ahead.build_bundle([], H200, tmp_path)
    with pytest.raises(InvalidArgument, match="nothing was built for h200"):
        ahead.build_bundle([], H200, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_pinned_calls_are_built_as_pinned_and_foreign_lines_are_told() -> None:
    chosen = catalog.in_language("rms_norm", "cuda")[0]
    config = chosen.default(PROBLEM, H200)
    pinned = Use("rms_norm", PROBLEM.values, "h200", chosen.name, dict(config), "forced", 1.0,
                 "predicted", 1)  # fmt: skip
    foreign = Use("no_entry", {"M": 1}, "h200", "no_entry/cuda/x", {}, "exact", 1.0, "measured", 1)
    asked, refused = ahead.recorded([pinned, pinned, foreign])
    [(problem, pin, _)] = asked
    assert problem == PROBLEM
    assert (pin.language, pin.variant, pin.config) == ("cuda", chosen.variant, Config(config))
    assert list(refused.values()) and "no_entry" in next(iter(refused))


WITHOUT_LANGUAGES = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "cutlass"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
sys.path.insert(0, sys.argv[2])

import kernelcat
from driver_recorder import Recorder
from kernelcat import catalog, jit
from kernelcat.errors import MissingDependency
from kernelcat.jit import cache
from kernelcat.runtime import driver, gpu, launcher

found = cache._versions
hidden = ("triton", "nvidia_cutlass_dsl")
cache._versions = lambda path: {k: v for k, v in found(path).items() if k not in hidden}
h200 = gpu.SKUS["h200"]

for language in ("triton", "cute"):
    try:
        catalog.in_language("fp8_quantize", language)
    except MissingDependency:
        continue
    raise SystemExit(f"{language} is not missing")
kernelcat.prepare(sys.argv[1])
recorder = Recorder()
driver.opened = lambda: recorder
problem = next(iter(catalog.entry("fp8_quantize").problems.values()))
for language in ("triton", "cute"):
    op = kernelcat.get("fp8_quantize", language=language)
    chosen = op.explain(**problem.values, gpu="h200")
    program = chosen.implementation.program(problem, chosen.config, h200)
    for step in program.steps:
        assert jit.build(step.source, h200.arch).language == language
    if language == "triton":
        launcher.load(chosen.implementation, problem, chosen.config, h200, 0)
        assert recorder.loaded
assert not {"triton", "cutlass"} & sys.modules.keys()
other = next(iter(catalog.entry("tma_copy").problems.values()))
op = kernelcat.get("tma_copy", language="triton")
chosen = op.explain(**other.values, gpu="h200")
try:
    launcher.load(chosen.implementation, other, chosen.config, h200, 0)
except MissingDependency as error:
    assert "no prepared folder has" in str(error) and "kernelcat[triton]" in str(error), error
    print("right")
"""


def test_kernels_in_triton_and_cute_run_without_the_packages_of_the_languages(
    tmp_path: Path,
) -> None:
    entry = catalog.entry("fp8_quantize")
    problem = next(iter(entry.problems.values()))
    asked = [ahead.Asked(problem, Pin(language)) for language in ("triton", "cute")]
    ahead.build_bundle(asked, H200, tmp_path / "kernels")
    arguments = [
        sys.executable,
        "-c",
        WITHOUT_LANGUAGES,
        tmp_path / "kernels",
        Path(__file__).parent,
    ]
    done = subprocess.run(
        arguments, env={**os.environ, "KERNELCAT_CACHE": str(tmp_path / "empty")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "right", done.stderr
    assert not (tmp_path / "empty").exists()

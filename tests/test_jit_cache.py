"""The artifact cache: one compilation for each key, damaged files, and full disks."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kernelcat.jit import Artifact, build, cache


@dataclass
class Fake:
    """A source whose compiler records the architectures that it compiled for."""

    text: str = "kernel"
    language: str = "cuda"
    version: str = "nvrtc 13.0"
    cubin: bytes = b"\x7fELF machine code"
    compiled: list[str] = field(default_factory=list)
    paths: tuple[Path, ...] = ()

    def files(self) -> list[Path]:
        return list(self.paths)

    def digest(self) -> str:
        return f"digest of {self.text}"

    def toolchain(self) -> str:
        return self.version

    def compile(self, arch: str) -> Artifact:
        self.compiled.append(arch)
        metadata = {"registers": 40, "cluster": (2, 1, 1)}
        return Artifact(
            self.language, arch, self.text, b"\x7fELF machine code", self.cubin, metadata
        )


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on disk and in memory."""
    monkeypatch.setenv("KERNELCAT_CACHE", str(tmp_path / "artifacts"))
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "artifacts"


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize(("age", "is_stored"), [(3600, True), (-3600, False)])
def test_what_was_edited_while_the_process_ran_is_not_stored(
    folder: Path, tmp_path: Path, age: float, is_stored: bool
) -> None:
    file = tmp_path / "kernel.py"
    file.write_text("")
    os.utime(file, (cache._STARTED - age,) * 2)
    build(Fake(paths=(file,)), "sm_90a")
    assert folder.exists() == is_stored


def test_a_source_is_compiled_once_and_then_comes_from_memory() -> None:
    source = Fake()
    assert build(source, "sm_90a") is build(source, "sm_90a")
    assert source.compiled == ["sm_90a"]


@pytest.mark.parametrize("cubin", [b"\x7fELF machine code", b"another", b""])
def test_an_artifact_is_read_back_unchanged_from_the_disk(cubin: bytes) -> None:
    first = build(Fake(cubin=cubin), "sm_90a")
    cache._memory.clear()
    second = Fake(cubin=cubin)
    assert build(second, "sm_90a") == first
    assert second.compiled == []
    assert (first.cubin, first.metadata["cluster"]) == (cubin, [2, 1, 1])


@pytest.mark.parametrize(
    ("change", "arch"),
    [
        ({}, "sm_100a"),
        ({"text": "other"}, "sm_90a"),
        ({"language": "triton"}, "sm_90a"),
        ({"version": "nvrtc 13.1"}, "sm_90a"),
    ],
)
def test_architecture_source_language_and_compiler_are_in_the_key(
    change: dict[str, Any], arch: str
) -> None:
    build(Fake(), "sm_90a")
    other = replace(Fake(), **change)
    build(other, arch)
    assert other.compiled == [arch]


def test_find_never_compiles() -> None:
    source = Fake()
    assert cache.find(source, "sm_90a") is None
    artifact = build(source, "sm_90a")
    cache._memory.clear()
    assert cache.find(source, "sm_90a") == artifact
    assert source.compiled == ["sm_90a"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: data[:-1],
        lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
        lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
        lambda data: b"not an artifact at all\n" * 9,
    ],
)
def test_a_damaged_file_is_compiled_again_with_a_warning(folder: Path, damage: Any) -> None:
    expected = build(Fake(), "sm_90a")
    path = only_file(folder)
    intact = path.read_bytes()
    path.write_bytes(damage(intact))
    cache._memory.clear()
    source = Fake()
    with pytest.warns(RuntimeWarning, match="unreadable cached kernel"):
        assert build(source, "sm_90a") == expected
    assert source.compiled == ["sm_90a"]
    assert path.read_bytes() == intact


def test_a_folder_that_cannot_be_written_causes_one_warning(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    with pytest.warns(RuntimeWarning, match=f"cannot write to {folder}") as caught:
        assert build(Fake("a"), "sm_90a").kernel == "a"
        assert build(Fake("b"), "sm_90a").kernel == "b"
    assert len(caught) == 1


def test_a_full_disk_causes_one_warning_and_leaves_no_partial_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert build(Fake(), "sm_90a").kernel == "kernel"
    assert list(folder.iterdir()) == []


PROCESS = """
import sys, time
sys.path.insert(0, sys.argv[1])
from test_jit_cache import Fake
from kernelcat.jit import build
while time.time() < float(sys.argv[2]):
    pass
for number in range(30):
    assert build(Fake(str(number), cubin=b"x" * 100_000), "sm_90a").kernel == str(number)
"""


def test_concurrent_processes_can_compile_equal_sources(folder: Path) -> None:
    import time

    start = str(time.time() + 1.5)
    command = [sys.executable, "-W", "error", "-c", PROCESS, str(Path(__file__).parent), start]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(4)]
    errors = [process.communicate(timeout=60)[1].decode() for process in running]
    assert errors == [""] * 4
    assert len(list(folder.iterdir())) == 30
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build(Fake("7", cubin=b"x" * 100_000), "sm_90a").cubin == b"x" * 100_000


@pytest.mark.parametrize(
    "distribution", ["numpy", "cuda-bindings", "nvidia-cuda-nvrtc", "SQLAlchemy"]
)
def test_versions_equal_those_of_the_package_metadata(distribution: str) -> None:
    assert cache.version_of(distribution) == importlib.metadata.version(distribution)


def test_a_missing_distribution_has_no_version() -> None:
    assert cache.version_of("no-such-distribution") is None


def test_the_default_folder_is_in_the_user_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KERNELCAT_CACHE")
    assert cache.folder().parts[-2:] == ("kernelcat", "artifacts")


def test_a_file_under_the_name_of_another_key_is_compiled_again(folder: Path) -> None:
    build(Fake("honest"), "sm_90a")
    honest = only_file(folder)
    planted = Fake("planted", cubin=b"planted")
    build(planted, "sm_90a")
    (other,) = (path for path in folder.iterdir() if path != honest)
    other.replace(honest)
    cache._memory.clear()
    source = Fake("honest")
    with pytest.warns(RuntimeWarning, match="its content belongs to another key"):
        assert build(source, "sm_90a").cubin == source.cubin
    assert source.compiled == ["sm_90a"]


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_may_write_to_is_compiled_again(folder: Path, mode: int) -> None:
    build(Fake(), "sm_90a")
    only_file(folder).chmod(mode)
    cache._memory.clear()
    source = Fake()
    with pytest.warns(RuntimeWarning, match=f"other users may write to it .mode {mode:o}"):
        build(source, "sm_90a")
    assert source.compiled == ["sm_90a"]
    assert only_file(folder).stat().st_mode & 0o777 == 0o644


def test_a_file_of_another_user_is_compiled_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(Fake(), "sm_90a")
    owner = only_file(folder).stat().st_uid
    if owner == 0:  # only root can give a file away
        os.chown(only_file(folder), 12345, -1)
        owner = 12345
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    cache._memory.clear()
    source = Fake()
    with pytest.warns(RuntimeWarning, match=f"user {owner} owns it"):
        build(source, "sm_90a")
    assert source.compiled == ["sm_90a"]


def test_a_new_file_is_private_whatever_the_umask(folder: Path) -> None:
    old = os.umask(0)
    try:
        build(Fake(), "sm_90a")
    finally:
        os.umask(old)
    assert only_file(folder).stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    "name", ["PTXAS_OPTIONS", "DISABLE_LLVM_OPT", "TRITON_DEFAULT_FP_FUSION", "CUTE_DSL_LIBS"]
)
def test_a_variable_that_changes_the_compiler_is_part_of_the_key(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    plain = cache.key(Fake(), "sm_90a")
    monkeypatch.setenv(name, "1")
    assert cache.key(Fake(), "sm_90a") != plain


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "TRITON_INTERPRET", "PATH", "LANG"])
def test_other_variables_are_no_part_of_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = cache.key(Fake(), "sm_90a")
    monkeypatch.setenv(name, "1")
    assert cache.key(Fake(), "sm_90a") == plain

"""CuTe DSL: digests, artifacts, error messages, and the packing of launch arguments."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from kernelcat import jit, paths
from kernelcat.errors import CompileError, LaunchError, MissingDependency
from kernelcat.jit import cute
from kernelcat.jit.cache import decode, encode
from kernelcat.runtime import driver

NAIVE = cute.CuteSource(
    "gemm.naive:Naive",
    ("*bfloat16",) * 5 + ("int32",) * 3,
    (("dtype", "bfloat16"), ("bias", False), ("activation", "none"), ("residual", False)),
)


def test_the_digest_is_stable_and_differs_between_instantiations() -> None:
    assert NAIVE.digest() == replace(NAIVE).digest()
    others = [
        replace(NAIVE, constants=(("dtype", "bfloat16"), ("bias", True))),
        replace(NAIVE, params=("*float16",) * 5 + ("int32",) * 3),
        replace(NAIVE, kernel="gemm.tiled:Tiled"),
    ]
    assert len({NAIVE.digest(), *(other.digest() for other in others)}) == 4


def test_the_digest_covers_imported_catalog_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = cute.CuteSource("gemm.tiled:Tiled", NAIVE.params)
    before = source.digest()
    kernels = tmp_path / "cute"
    for folder in ("gemm", "common"):
        shutil.copytree(paths.data("kernels") / "cute" / folder, kernels / folder)
    monkeypatch.setattr(paths, "data", lambda name: tmp_path)
    assert source.digest() == before
    with kernels.joinpath("common", "tile_order.py").open("a") as file:
        file.write("CHANGED = 1\n")
    assert source.digest() != before


def test_the_artifact_holds_the_machine_code_and_leaves_no_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    artifact = NAIVE.compile("sm_90a")
    assert artifact.cubin in artifact.code
    assert artifact.cubin.startswith(b"\x7fELF")
    assert artifact.kernel.encode() in artifact.cubin
    assert 16 <= artifact.metadata["registers"] <= 64
    assert artifact.metadata["spill_bytes"] == 0
    assert decode(encode(artifact, "key"), "key") == artifact
    assert list(tmp_path.iterdir()) == []


def test_one_process_compiles_for_several_architectures() -> None:
    codes = {arch: jit.build(NAIVE, arch).cubin for arch in ("sm_90a", "sm_80", "sm_100a")}
    assert len(set(codes.values())) == 3


def test_a_compile_error_has_a_one_line_message_and_a_log() -> None:
    kinds = ("*bfloat16",) * 5 + ("int32",) * 4
    tile = (("block_m", 128), ("block_n", 128), ("cluster_m", 1), ("cluster_n", 1))
    constants = (*NAIVE.constants, *tile, ("pingpong", False))
    with pytest.raises(CompileError, match=r"^gemm\.wgmma:Wgmma does not compile for sm_80: ") as e:
        cute.CuteSource("gemm.wgmma:Wgmma", kinds, constants).compile("sm_80")
    assert "\n" not in str(e.value)
    assert "\x1b" not in e.value.log and len(e.value.log) > 20


def test_the_error_of_a_missing_dsl_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="pip install"):
        NAIVE.compile("sm_90a")


def test_a_launch_packs_parameters_of_every_type_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[bytes] = []

    class Runtime:
        @staticmethod
        def CuteDSLRT_Function_Run(function: Any, arguments: Any, count: ctypes.c_size_t) -> int:
            packed.extend(ctypes.string_at(arguments[i], 8) for i in range(count.value))
            return 0

    monkeypatch.setattr(cute, "_runtime", Runtime)
    monkeypatch.setattr(cute, "_function", lambda artifact: None)
    params = ["*bfloat16", "int32", "int64", "float32"]
    artifact = jit.Artifact("cute", "sm_90a", "kernel", b"", b"", {"params": params})
    cute.load(artifact)(0x7F0000001000, -3, 1 << 40, 1.5, 0xABC0)
    address, small, large, real, stream, error = packed
    assert int.from_bytes(address, "little") == 0x7F0000001000
    assert ctypes.c_int32.from_buffer_copy(small).value == -3
    assert int.from_bytes(large, "little") == 1 << 40
    assert ctypes.c_float.from_buffer_copy(real).value == 1.5
    assert int.from_bytes(stream, "little") == 0xABC0
    assert int.from_bytes(error, "little") == 0


@pytest.mark.skipif(driver.count() > 0, reason="with a GPU loading succeeds")
def test_without_a_gpu_loading_fails_only_at_the_driver() -> None:
    artifact = jit.build(NAIVE, "sm_90a")
    with pytest.raises(LaunchError, match=r"cannot load .*: CUDA error occurred"):
        cute.load(artifact)
    with pytest.raises(LaunchError, match=r"cannot load "):
        cute.load(replace(artifact, code=artifact.code[:200]))


@pytest.mark.gpu
def test_a_loaded_kernel_runs_without_the_dsl(tmp_path: Path) -> None:
    """Runs in a process that never imports the DSL, as after a warm start."""
    from kernelcat.runtime import gpu

    path = tmp_path / "artifact"
    path.write_bytes(encode(jit.build(NAIVE, gpu.detect(0).arch), "key"))
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["6.0", "False"]


RUN = """
import sys
import cupy
from kernelcat.jit import cute
from kernelcat.jit.cache import decode
ones = cupy.full((5, 6), 0x3F80, dtype="uint16")  # bfloat16 ones
d = cupy.zeros((5, 5), dtype="uint16")
launch = cute.load(decode(open(sys.argv[1], "rb").read(), "key"))
stream = cupy.cuda.get_current_stream()
launch(ones.data.ptr, ones.data.ptr, 0, 0, d.data.ptr, 5, 5, 6, stream.ptr)
values = (d.astype("uint32") << 16).view("float32")
assert (values == values[0, 0]).all()
print(float(values[0, 0]), "cutlass" in sys.modules)
"""

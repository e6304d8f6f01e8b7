"""Machine code: the opcodes of a kernel, and the techniques that they prove."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelcat.catalog.implementation import Implementation
from kernelcat.errors import KernelcatError, MissingDependency
from kernelcat.jit import Artifact
from kernelcat.jit.cuda import CudaSource
from kernelcat.verify import inspect
from kernelcat.verify.inspect import Report

ASM = """
struct alignas(64) Map { char bytes[128]; };
#define SHARED(p) static_cast<unsigned>(__cvta_generic_to_shared(p))
extern "C" __global__ void __launch_bounds__(256, 1) k(
    const __grid_constant__ Map map, float4* out, const float4* in,
    unsigned long long a, unsigned long long b) {
  extern __shared__ __align__(128) char tile[];
  __shared__ unsigned long long barrier;
  float d[4] = {0, 0, 0, 0};
  %s
  out[threadIdx.x] = make_float4(d[0], d[1], d[2], d[3]);
}
extern "C" __global__ void other(float* out) { *out = rsqrtf(*out); }
"""
TMA = """asm volatile(
  "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes%s "
  "[%%0], [%%1, {%%3, %%3}], [%%2]%s;"
  :: "r"(SHARED(tile)), "l"(&map), "r"(SHARED(&barrier)), "r"(0), "h"((short)3) : "memory");"""
BULK = """asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
  "[%0], [%1], 4096, [%2];" :: "r"(SHARED(tile)), "l"(in), "r"(SHARED(&barrier)) : "memory");"""
WGMMA = """asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
  "{%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
  : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));"""
TCGEN05 = """asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0;"
  "tcgen05.mma.cta_group::1.kind::f16 [%2], %0, %1, %2, p; }" :: "l"(a), "l"(b), "r"(8));"""

BOTH, HOPPER, BLACKWELL = ("sm_90a", "sm_100a"), ("sm_90a",), ("sm_100a",)
CASES = [
    ("STG*128", "", BOTH),
    ("UBLKCP.S.G", BULK, BOTH),
    ("UTMALDG.2D", TMA % ("", ""), BOTH),
    ("UTMALDG*MULTICAST", TMA % (".multicast::cluster", ", %4"), BOTH),
    ("USETMAXREG", 'asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");', BOTH),
    ("HGMMA.64x8x16.F32.BF16", WGMMA, HOPPER),
    ("UTCHMMA", TCGEN05, BLACKWELL),
]


def compiled(folder: Path, body: str, arch: str) -> Artifact:
    path = folder / "kernel.cu"
    path.write_text(ASM.replace("%s", body))
    return CudaSource(str(path), "k").compile(arch)


@pytest.mark.parametrize(
    ("pattern", "body", "arch"),
    [(pattern, body, arch) for pattern, body, archs in CASES for arch in archs],
)
def test_a_technique_is_proven_by_its_instruction(
    tmp_path: Path, pattern: str, body: str, arch: str
) -> None:
    report = inspect.inspect(compiled(tmp_path, body, arch))
    assert report.has(pattern), sorted(report.opcodes)
    others = [other for other, *_ in CASES if other != pattern and not other.startswith("STG")]
    others_present = [other for other in others if report.has(other)]
    assert others_present in ([], ["UTMALDG.2D"] if "MULTICAST" in pattern else [])


def test_only_opcodes_of_the_launched_kernel_are_counted(tmp_path: Path) -> None:
    artifact = compiled(tmp_path, "", "sm_90a")
    assert not inspect.inspect(artifact).has("MUFU.RSQ")
    everything = inspect.inspect(replace(artifact, kernel="host_entry")).opcodes
    assert everything["MUFU.RSQ"] == 1 and everything["STG.E.128"] == 1


def test_several_kernels_are_told_apart(tmp_path: Path) -> None:
    copy, product = compiled(tmp_path, BULK, "sm_90a"), compiled(tmp_path, WGMMA, "sm_90a")
    together = inspect.inspect_all([copy, product, replace(copy, kernel="other")])
    assert together[:2] == [inspect.inspect(copy), inspect.inspect(product)]
    assert [report.has("MUFU.RSQ") for report in together] == [False, False, True]
    assert inspect.inspect_all([]) == []


def test_prove_decides_every_technique(tmp_path: Path) -> None:
    artifact = compiled(tmp_path, BULK, "sm_90a")
    nothing: Any = None
    claims = {"1-D bulk": "UBLKCP", "wgmma": "HGMMA"}
    implementation = Implementation(
        "copy", "cuda", "bulk", "", ("sm_90a",), nothing, nothing, techniques=claims
    )
    assert inspect.prove(implementation, artifact) == {"1-D bulk": True, "wgmma": False}


def test_resources_are_those_that_the_compiler_reported(tmp_path: Path) -> None:
    artifact = compiled(tmp_path, "", "sm_90a")
    report = inspect.inspect(artifact)
    assert report.registers == artifact.metadata["registers"] > 0
    assert (report.spill_bytes, report.shared_bytes) == (
        0,
        artifact.metadata["static_shared_bytes"],
    )


def test_parameters_have_their_sizes_in_order(tmp_path: Path) -> None:
    artifact = compiled(tmp_path, "", "sm_90a")
    assert inspect.parameters(artifact.cubin, "k") == [128, 8, 8, 8, 8]
    with pytest.raises(KernelcatError, match="no section"):
        inspect.parameters(artifact.cubin, "nothing")


def test_opcodes_are_counted_without_predicates_and_operands() -> None:
    sass = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_0) ;
        /*0020*/             @!UP0 UTMALDG.2D.MULTICAST [UR8], [UR4], UR6, desc[UR10] ;
.L_x_0:
        /*0030*/             @P1   LDC R1, c[0x0][0x2c] ;
        /*0040*/                   EXIT ;
"""
    opcodes = inspect.opcodes(sass, [0x40, 0x50])
    assert opcodes == [Counter({"LDC": 2, "BRA": 1, "UTMALDG.2D.MULTICAST": 1}), Counter(EXIT=1)]


@pytest.mark.parametrize(
    ("pattern", "present"),
    [("UTMALDG", True), ("UTMALDG*MULTICAST", True), ("MULTICAST", False), ("UTMALDG.3D", False),
     ("HMMA", False), ("HGMMA", True)],
)  # fmt: skip
def test_patterns_are_prefixes_with_wildcards(pattern: str, present: bool) -> None:
    opcodes = Counter({"UTMALDG.2D.MULTICAST": 1, "HGMMA.64x64x16.F32": 2})
    assert Report(0, 0, 0, opcodes).has(pattern) is present


def test_an_invalid_cubin_is_a_one_line_error() -> None:
    with pytest.raises(KernelcatError, match="nvdisasm cannot read the machine code"):
        inspect.disassemble(b"no cubin")


def test_nvdisasm_of_the_nvidia_wheel_is_preferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia/cu13/bin/nvdisasm"
    tool.parent.mkdir(parents=True)
    tool.touch(mode=0o755)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert inspect.disassembler() == tool


def test_the_error_of_a_missing_nvdisasm_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inspect, "_folders", lambda: iter(()))
    with pytest.raises(MissingDependency, match="pip install nvidia-cuda-nvdisasm"):
        inspect.disassembler()

"""Every implementation compiles for every architecture it serves, and its machine code proves it.

No GPU is needed. What is compiled is the default configuration of the first problem that the
implementation serves on a SKU of the architecture.
"""

from __future__ import annotations

import struct

import pytest

from kernelcat import catalog, gpu, show
from kernelcat.implementation import (
    Float32,
    Implementation,
    Int32,
    Int64,
    Pointer,
    TensorMap,
)
from kernelcat.jit.cache import build

SKUS = ("h200", "b200", "a100", "l40s", "rtx5090")
RACED = ("h200", "b200")
"""Where a default must not spill. Elsewhere the cross-tuner rejects what spills, and says so."""
CASES = [
    pytest.param(implementation, gpu.find(sku), id=f"{implementation.name}-{sku}")
    for name in catalog.names()
    for implementation in catalog.implementations(name)
    for sku in SKUS
    if implementation.serves(gpu.find(sku).arch)
]


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "target"), CASES)
def test_it_compiles_and_the_machine_code_proves_its_techniques(
    implementation: Implementation, target: gpu.Gpu
) -> None:
    report = show.machine_code(implementation, target, problem=None, sass=False)
    missing = [technique for technique, found in report["techniques"].items() if not found]
    assert not missing, f"not in the machine code: {missing}"
    for step in report["steps"]:
        assert step["registers"] and step["registers"] > 0
        if target.sku in RACED:
            assert step["spill_bytes"] == 0, f"{step['kernel']} spills"


PARAM_BYTES = {Pointer: 8, Int32: 4, Int64: 8, Float32: 4, TensorMap: 128}
KPARAM_INFO, WITH_SIZE = 0x17, 4
"""Of a cubin's section .nv.info.KERNEL: the record of a parameter, and records that tell how long
they are; others are a word."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(implementation, id=implementation.name)
        for name in catalog.names()
        for implementation in catalog.implementations(name)
        if implementation.language == "cuda" and implementation.serves("sm_90a")
    ],
)
def test_a_cuda_kernel_takes_what_its_program_passes(implementation: Implementation) -> None:
    """A launch with too few reads whatever lies behind them on the host."""
    target = gpu.find("h200")
    problem, config = next(
        (problem, config)
        for problem in catalog.entry(implementation.entry).problems.values()
        for config in implementation.configs(problem, target)
    )
    for step in implementation.program(problem, config, target).steps:
        artifact = build(step.source, target.arch)
        passed = [PARAM_BYTES[type(param)] for param in step.params]
        assert passed == _parameter_bytes(artifact.cubin, artifact.kernel)


def _parameter_bytes(cubin: bytes, kernel: str) -> list[int]:
    """Sizes of a kernel's parameters, in order, as its cubin (an ELF file) tells them."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + i * size) for i in range(count)]
    wanted = f".nv.info.{kernel}\0".encode()
    for name, _, _, _, first, length in sections:
        if cubin.startswith(wanted, sections[names][4] + name):
            return _sizes(cubin[first : first + length])
    raise AssertionError(f"the cubin has no {wanted!r}")


def _sizes(records: bytes) -> list[int]:
    found, at = {}, 0
    while at < len(records):
        form, attribute, length = struct.unpack_from("<BBH", records, at)
        at += 4
        if form == WITH_SIZE:
            if attribute == KPARAM_INFO:
                _, ordinal, _, bits = struct.unpack_from("<IHHI", records, at)
                found[ordinal] = bits >> 18
            at += length
    return [found[ordinal] for ordinal in sorted(found)]


@pytest.mark.parametrize("name", catalog.names())
def test_every_named_problem_is_served_on_hopper_in_every_language(name: str) -> None:
    target, entry = gpu.find("h200"), catalog.entry(name)
    for problem in entry.problems.values():
        for language in catalog.languages(name):
            served = [
                i
                for i in catalog.in_language(name, language)
                if i.why_not(i.default(problem, target), problem, target) is None
            ]
            assert served, f"{language} does not serve {problem}"


@pytest.mark.parametrize("name", catalog.names())
def test_a_default_is_legal_wherever_anything_is(name: str) -> None:
    for implementation in catalog.implementations(name):
        for sku in SKUS:
            target = gpu.find(sku)
            for problem in catalog.entry(name).problems.values():
                if any(True for _ in implementation.configs(problem, target)):
                    default = implementation.default(problem, target)
                    reason = implementation.why_not(default, problem, target)
                    assert reason is None, f"{implementation.name} {problem} {default}: {reason}"

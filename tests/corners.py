"""Corners of a space of CUDA C++ kernels: what compiles, fits, and proves its techniques."""

from __future__ import annotations

from collections.abc import Iterable

from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.jit import build
from kernelcat.runtime import gpu
from kernelcat.verify import inspect

Corner = tuple[Implementation, Problem, Config]


def check(corners: Iterable[Corner]) -> None:
    """The last launch of each spills nothing, fits on an SM of an H200, and has its techniques."""
    h200, built = gpu.find("h200"), []
    for implementation, problem, config in corners:
        assert implementation.why_not(config, problem, h200) is None
        step = implementation.program(problem, config, h200).steps[-1]
        artifact = build(step.source, h200.arch)
        assert artifact.metadata["spill_bytes"] == 0, (problem, config)
        assert artifact.metadata["warnings"] == []
        assert step.shared_bytes + artifact.metadata["static_shared_bytes"] <= h200.shared_bytes
        assert step.block * artifact.metadata["registers"] <= 1 << 16
        built.append((implementation, artifact))
    reports = inspect.inspect_all([artifact for _, artifact in built])
    for (implementation, _), report in zip(built, reports, strict=True):
        assert all(inspect.proofs(implementation, [report]).values()), implementation.name

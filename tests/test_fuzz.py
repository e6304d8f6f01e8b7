"""Fuzzing: the problems that are drawn, and a planted fault that is found and shrunk."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from kernelcat import catalog
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.jit import cache
from kernelcat.runtime import gpu
from kernelcat.runtime.device import CudaDevice, MirroredDevice
from kernelcat.verify import fuzz
from kernelcat.verify.sanitizer import EXAMPLE

TILE = 16


def host(body) -> SimpleNamespace:
    """A fake device that runs ``body(problem, arrays)`` in place of every implementation."""
    return SimpleNamespace(
        xp=np,
        gpu=gpu.find("h200"),
        synchronize=lambda: None,
        load=lambda implementation, problem, config: lambda arrays: lambda: body(problem, arrays),
    )


class FakeCudaDevice(CudaDevice):
    """A CudaDevice without a GPU that runs ``right``; ``loaded`` lists what ran."""

    def __init__(self) -> None:
        self.xp, self.gpu, self.loaded = np, gpu.find("h200"), []

    def load(self, implementation, problem, config):
        self.loaded.append((problem, config))
        return lambda arrays: lambda: right(problem, arrays)

    def synchronize(self) -> None:
        pass


class FakeMirroredDevice(MirroredDevice):
    """A MirroredDevice, as for a run under the sanitizer, without a GPU; it runs ``right``."""

    def __init__(self) -> None:
        self.xp, self.gpu = np, gpu.find("h200")

    load, synchronize = FakeCudaDevice.load, FakeCudaDevice.synchronize
    loaded: list = []  # noqa: RUF012


def planted() -> Implementation:
    """An implementation of `tma_copy` with a single configuration, always legal."""
    model = catalog.in_language("tma_copy", "cuda")[0]
    return replace(
        model,
        variant="planted",
        space={"tile": (TILE,)},
        illegal=lambda config, problem, gpu: None,
        default=lambda problem, gpu: Config(tile=TILE),
    )


def right(problem: Problem, arrays: dict) -> None:
    arrays["dst"][...] = arrays["src"]


def forgets_the_tail(problem: Problem, arrays: dict) -> None:
    whole = problem["cols"] // TILE * TILE
    arrays["dst"][:, :whole] = arrays["src"][:, :whole]


def test_a_right_implementation_passes_at_least_the_requested_examples() -> None:
    result = fuzz.fuzz(planted(), host(right), 60)
    assert result.failure is None and result.examples >= 60


def test_a_forgotten_tail_is_found_and_shrunk_to_one_element() -> None:
    result = fuzz.fuzz(planted(), host(forgets_the_tail), 200)
    assert result.failure is not None
    assert (result.failure.problem["rows"], result.failure.problem["cols"]) == (1, 1)


def test_an_implementation_that_serves_no_problem_runs_no_example() -> None:
    elsewhere = replace(planted(), archs=("sm_100a",))
    assert fuzz.fuzz(elsewhere, host(right), 20) == fuzz.FuzzResult(elsewhere.name, 0)


def test_the_same_seed_draws_the_same_examples() -> None:
    drawn: list[list[str]] = [[], []]
    for keys in drawn:
        fuzz.fuzz(planted(), host(lambda p, a, d=keys: (d.append(p.key), right(p, a))), 30)
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 10


def test_a_kernel_takes_the_first_legal_configuration_from_its_start_index() -> None:
    """The search goes round the space; where the default is illegal, only the start is tried."""
    model = replace(
        planted(), space={"tile": (1, 2, 3)}, default=lambda problem, gpu: Config(tile=2)
    )
    h200, problem = gpu.find("h200"), catalog.entry("tma_copy").named("16MB")
    space = tuple(model.whole_space())

    def chosen(first: int | None, illegal_tiles: set[int]) -> Config | None:
        picky = replace(
            model, illegal=lambda c, problem, gpu: "no" if c["tile"] in illegal_tiles else None
        )
        return fuzz._Kernel({}, space, first).config(picky, problem, h200)

    assert chosen(2, set()) == Config(tile=3)
    assert chosen(2, {3}) == Config(tile=1)
    assert chosen(None, set()) == Config(tile=2)
    assert chosen(None, {2}) is None and chosen(0, {1, 2}) is None


def test_combinations_that_serve_no_problem_are_not_drawn() -> None:
    """Few combinations of formats and types are of 4-bit tiles, or of float8 with 16 bits."""
    decoded, h200 = catalog.implementation("moe_gemm", "cuda", "decoded"), gpu.find("h200")
    kernels = fuzz._served_kernels(decoded, h200, 0, 16, None)
    assert len(kernels) > 8
    formats = {(kernel.choices["format"], kernel.choices["packing"]) for kernel in kernels}
    assert formats == {("fp8", "rows"), ("mxfp4", "tiles"), ("nvfp4", "tiles")}
    elsewhere = replace(decoded, archs=("sm_100a",))
    assert len(fuzz._served_kernels(elsewhere, h200, 0, 16, None)) == 16


def test_kernels_of_the_first_examples_are_compiled_before_the_examples_run(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilation runs in other processes and does not change which examples are drawn."""
    monkeypatch.setenv("KERNELCAT_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_memory", {})
    vectorized, problems = catalog.implementation("tma_copy", "cuda", "vectorized"), []
    device, without_pool = FakeCudaDevice(), host(lambda p, a: (problems.append(p), right(p, a)))
    assert fuzz.fuzz(vectorized, device, 20, kernels=3, jobs=2).failure is None
    for problem, config in device.loaded:
        for step in vectorized.program(problem, config, device.gpu).steps:
            assert cache.find(step.source, device.gpu.arch) is not None
    assert len(list(tmp_path.iterdir())) > 1
    fuzz.fuzz(vectorized, without_pool, 20, kernels=3)
    assert problems == [problem for problem, _ in device.loaded]


def test_a_kernel_is_compiled_ahead_once_and_a_single_kernel_is_not(monkeypatch) -> None:
    wgmma, h200 = catalog.implementation("multicast_gemm", "cuda", "multicast"), gpu.find("h200")
    monkeypatch.setattr(fuzz, "find", lambda source, arch: None)
    problem = catalog.entry("multicast_gemm").named("4096x4096x4096")
    first, second = [c for c in wgmma.configs(problem, h200) if c["group_m"] == 8][:2]
    cases = [(problem, first), (problem, second), (problem, first)]
    assert list(fuzz._uncompiled(wgmma, cases, h200)) == cases[:2]
    monkeypatch.setattr(fuzz, "CompilePool", None)  # not called
    fuzz._compile(wgmma, cases[:1], h200, jobs=8)
    fuzz._compile(wgmma, cases[:2], h200, jobs=1)


def test_a_sanitized_run_prints_each_example_before_it_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fuzz.fuzz(planted(), FakeMirroredDevice(), 5)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(EXAMPLE)]
    assert len(lines) >= 5
    assert lines[0].startswith(f"{EXAMPLE}cuda/planted tile={TILE} on cols=")


@pytest.mark.parametrize("name", catalog.names())
def test_drawn_problems_are_legal_and_within_the_limit_and_few_are_empty(name: str) -> None:
    entry, drawn = catalog.entry(name), []

    @settings(
        max_examples=100,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),  # as in a fuzz run
    )
    @given(fuzz.worthwhile(entry, limit=160))
    def draw(problem: Problem) -> None:
        assert entry.problem(**problem.values) == problem
        assert all(problem[a.name] <= 160 for a in entry.axes if not a.values)
        drawn.append(problem)

    draw()
    num_empty = sum(entry.bytes_moved(problem) == 0 for problem in drawn)
    assert len(drawn) >= 50
    assert num_empty <= len(drawn) // 4

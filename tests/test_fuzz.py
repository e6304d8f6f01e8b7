"""Fuzzing: what is drawn, and that a planted fault is found and shrunk."""

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
    """A device whose every implementation is the Python function ``body(problem, arrays)``."""
    return SimpleNamespace(
        xp=np,
        gpu=gpu.find("h200"),
        synchronize=lambda: None,
        load=lambda implementation, problem, config: lambda arrays: lambda: body(problem, arrays),
    )


class Gpuless(CudaDevice):
    """The same in the place of a GPU; ``loaded`` tells what ran."""

    def __init__(self) -> None:
        self.xp, self.gpu, self.loaded = np, gpu.find("h200"), []

    def load(self, implementation, problem, config):
        self.loaded.append((problem, config))
        return lambda arrays: lambda: right(problem, arrays)

    def synchronize(self) -> None:
        pass


class Mirror(MirroredDevice):
    """The same in the place of a sanitized GPU."""

    def __init__(self) -> None:
        self.xp, self.gpu = np, gpu.find("h200")

    load, synchronize = Gpuless.load, Gpuless.synchronize
    loaded: list = []  # noqa: RUF012


def planted() -> Implementation:
    """A copy with one configuration."""
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


def test_a_right_implementation_passes_as_many_examples_as_asked() -> None:
    result = fuzz.fuzz(planted(), host(right), 60)
    assert result.failure is None and result.examples >= 60


def test_a_forgotten_tail_is_found_and_shrunk_to_one_element() -> None:
    result = fuzz.fuzz(planted(), host(forgets_the_tail), 200)
    assert result.failure is not None
    assert (result.failure.problem["rows"], result.failure.problem["cols"]) == (1, 1)


def test_an_implementation_that_serves_nothing_passes_nothing() -> None:
    elsewhere = replace(planted(), archs=("sm_100a",))
    assert fuzz.fuzz(elsewhere, host(right), 20) == fuzz.FuzzResult(elsewhere.name, 0)


def test_the_same_seed_draws_the_same_examples() -> None:
    seen: list[list[str]] = [[], []]
    for draws in seen:
        fuzz.fuzz(planted(), host(lambda p, a, d=draws: (d.append(p.key), right(p, a))), 30)
    assert seen[0] == seen[1] and len(set(seen[0])) > 10


def test_a_kernel_keeps_its_configuration_where_it_serves() -> None:
    """Else it has the next that does, and none where the default does not serve."""
    model = replace(
        planted(), space={"tile": (1, 2, 3)}, default=lambda problem, gpu: Config(tile=2)
    )
    h200, problem = gpu.find("h200"), catalog.entry("tma_copy").named("16MB")
    space = tuple(model.whole_space())

    def found(first: int | None, refused: set[int]) -> Config | None:
        picky = replace(
            model, illegal=lambda c, problem, gpu: "no" if c["tile"] in refused else None
        )
        return fuzz._Kernel({}, space, first).config(picky, problem, h200)

    assert found(2, set()) == Config(tile=3)
    assert found(2, {3}) == Config(tile=1)
    assert found(None, set()) == Config(tile=2)
    assert found(None, {2}) is None and found(0, {1, 2}) is None


def test_what_the_first_examples_need_is_compiled_before_they_run(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes of their own, with no effect on which examples are drawn."""
    monkeypatch.setenv("KERNELCAT_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_memory", {})
    vectorized, seen = catalog.implementation("tma_copy", "cuda", "vectorized"), []
    device, alone = Gpuless(), host(lambda p, a: (seen.append(p), right(p, a)))
    assert fuzz.fuzz(vectorized, device, 20, kernels=3, jobs=2).failure is None
    for problem, config in device.loaded:
        for step in vectorized.program(problem, config, device.gpu).steps:
            assert cache.find(step.source, device.gpu.arch) is not None
    assert len(list(tmp_path.iterdir())) > 1
    fuzz.fuzz(vectorized, alone, 20, kernels=3)
    assert seen == [problem for problem, _ in device.loaded]


def test_a_kernel_is_compiled_ahead_once_and_one_alone_is_left(monkeypatch) -> None:
    wgmma, h200 = catalog.implementation("multicast_gemm", "cuda", "multicast"), gpu.find("h200")
    monkeypatch.setattr(fuzz, "find", lambda source, arch: None)
    problem = catalog.entry("multicast_gemm").named("4096x4096x4096")
    first, second = [c for c in wgmma.configs(problem, h200) if c["group_m"] == 8][:2]
    same = [(problem, first), (problem, second), (problem, first)]
    assert list(fuzz._uncompiled(wgmma, same, h200)) == same[:2]
    monkeypatch.setattr(fuzz, "CompilePool", None)  # not called
    fuzz._compile(wgmma, same[:1], h200, jobs=8)
    fuzz._compile(wgmma, same[:2], h200, jobs=1)


def test_a_sanitized_run_says_what_it_does_next(capsys: pytest.CaptureFixture[str]) -> None:
    fuzz.fuzz(planted(), Mirror(), 5)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(EXAMPLE)]
    assert len(lines) >= 5
    assert lines[0].startswith(f"{EXAMPLE}cuda/planted tile={TILE} on cols=")


@pytest.mark.parametrize("name", catalog.names())
def test_drawn_problems_are_legal_and_within_the_limit(name: str) -> None:
    entry = catalog.entry(name)

    @settings(max_examples=100, deadline=None)
    @given(problem=fuzz.problems(entry, limit=50))
    def run(problem: Problem) -> None:
        assert entry.problem(**problem.values) == problem
        assert all(problem[a.name] <= 50 for a in entry.axes if not a.values)

    run()


@pytest.mark.parametrize("name", catalog.names())
def test_few_drawn_problems_have_nothing_to_do(name: str) -> None:
    entry, drawn = catalog.entry(name), []

    @settings(
        max_examples=100,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),  # as a fuzz run has it
    )
    @given(fuzz.worthwhile(entry, limit=160))
    def draw(problem: Problem) -> None:
        drawn.append(problem)

    draw()
    idle = sum(entry.bytes_moved(problem) == 0 for problem in drawn)
    assert len(drawn) >= 50
    assert idle <= len(drawn) // 4

"""Every implementation compiles for the architectures it serves, and its machine code proves it.

No GPU is needed. Each test compiles the default configuration of the first problem that the
implementation serves on a SKU of the architecture. A campaign compiles for every architecture.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from campaign import RUNS_ALL, share

from kernelcat import catalog
from kernelcat.catalog.implementation import Implementation
from kernelcat.catalog.random_problems import as_called, draw
from kernelcat.report import show
from kernelcat.runtime import gpu
from kernelcat.tune.backend import Cuda
from kernelcat.tune.cross import misfit
from kernelcat.tune.messages import Built

SKUS = ("a100", "l40s", "h200", "b200", "rtx5090")
"""A GPU of each architecture, the oldest first."""
SPILL_FREE_SKUS = ("h200", "b200")
"""GPUs whose defaults must not spill. For other GPUs the cross-tuner rejects spills and says so."""
NAMES = catalog.names()
ENTRIES_OF_A_CASE = 6
"""The disassembler reads the kernels of so many entries in one run, because its start is slow."""


def compiled(names: Sequence[str], sku: str) -> list[Implementation]:
    """The implementations of some entries that are compiled for ``sku``.

    In a campaign these are all that serve it. Else each implementation is compiled for the oldest
    GPU that it serves, and for the H200.
    """
    chosen = []
    for implementation in itertools.chain.from_iterable(map(catalog.implementations, names)):
        served = [sku for sku in SKUS if implementation.serves(gpu.find(sku).arch)]
        if sku in (served if RUNS_ALL else {served[0], "h200"} & set(served)):
            chosen.append(implementation)
    return chosen


CASES = [
    pytest.param(chosen, gpu.find(sku), id=f"{'-'.join(names)}-{sku}")
    for first in range(0, len(NAMES), ENTRIES_OF_A_CASE)
    for names in [NAMES[first : first + ENTRIES_OF_A_CASE]]
    for sku in SKUS
    if (chosen := compiled(names, sku))
]


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize(("implementations", "target"), CASES)
def test_implementations_compile_and_their_machine_code_proves_their_techniques(
    implementations: list[Implementation], target: gpu.Gpu
) -> None:
    faults = []
    for report in show.machine_codes(implementations, target):
        name = report["implementation"]
        faults += [
            f"{name}: no instruction of {technique}"
            for technique, is_proven in report["techniques"].items()
            if not is_proven
        ]
        for step in report["steps"]:
            if not step["registers"]:
                faults.append(f"{name}: {step['kernel']} has no registers")
            if target.sku in SPILL_FREE_SKUS and step["spill_bytes"] != 0:
                faults.append(f"{name}: {step['kernel']} spills")
    assert not faults


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "unusual"),
    [
        (name, unusual)
        for name in NAMES
        for unusual in (False, True)
        if catalog.entry(name).unusual_problem
        or (catalog.entry(name).random_problem and not unusual)
    ],
)
def test_what_calls_choose_for_random_problems_compiles_and_fits(name: str, unusual: bool) -> None:
    """Portfolios have configurations that no named problem compiles."""
    entry, target, backend = catalog.entry(name), gpu.find("h200"), Cuda()
    for drawn in draw(entry, "compiles", share(20), unusual=unusual):
        problem = as_called(entry, drawn)
        chosen = backend.decide(entry, problem, target, {})
        steps = backend.build(chosen.implementation, problem, chosen.config, target)
        assert steps
        assert misfit(Built(tuple(steps)), target) is None, (problem, chosen)


@pytest.mark.parametrize("name", catalog.names())
def test_every_named_problem_is_served_on_hopper_in_every_language(name: str) -> None:
    """Problems of a type that Hopper's tensor cores lack (4 bits) need one language only."""
    target, entry = gpu.find("h200"), catalog.entry(name)
    for problem in entry.problems.values():
        serving = {
            i.language
            for i in catalog.implementations(name)
            if i.why_not(i.default(problem, target), problem, target) is None
        }
        dtype = str(problem.values.get("dtype"))
        is_native = dtype in target.flops or dtype not in gpu.find("b200").flops
        missing = set(catalog.languages(name)) - serving if is_native or not serving else None
        assert not missing, f"{missing} does not serve {problem}"


@pytest.mark.parametrize("name", catalog.names())
def test_a_default_is_legal_wherever_a_configuration_is(name: str) -> None:
    for implementation in catalog.implementations(name):
        for sku in SKUS:
            target = gpu.find(sku)
            for problem in catalog.entry(name).problems.values():
                if any(True for _ in implementation.configs(problem, target)):
                    default = implementation.default(problem, target)
                    reason = implementation.why_not(default, problem, target)
                    assert reason is None, f"{implementation.name} {problem} {default}: {reason}"

"""`moe_route`'s CuTe kernels on the host (``cute_threads``): cases in, verdicts out, as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import cute_threads  # noqa: F401  (replaces the DSL)
import numpy as np
from cute_host import Pointer, Value

from kernelcat import catalog
from kernelcat.catalog.implementation import Config, Float32, Program
from kernelcat.catalog.implementation import Pointer as PointerParam
from kernelcat.kernels.cuda.moe_route import blocks
from kernelcat.kernels.cute import moe_route
from kernelcat.kernels.cute.moe_route import naive, naive_place, place, router
from kernelcat.runtime import gpu
from kernelcat.verify import gate

ENTRY = catalog.entry("moe_route")
HOST = SimpleNamespace(xp=np, gpu=gpu.find("h200"), synchronize=lambda: None)
# Threads take long here, so problems are small: those of naive have at most 32 experts, and two
# launches begin at 33 tokens.
naive.THREADS = naive_place.THREADS = router.THREADS = 32
place.PLACE_THREADS = blocks.PLACE_THREADS = 32
place.BATCH, blocks.CLUSTER_TOKENS = 2, 32


def bind(program: Program, arrays: Mapping[str, Any]) -> Callable[[], None]:
    """All of ``program``'s kernels, on workspaces that runs share."""
    kinds = {
        param.tensor: kind[1:]
        for step in program.steps
        for param, kind in zip(step.params, step.source.params, strict=True)
        if isinstance(param, PointerParam)
    }
    workspaces = {
        name: np.zeros(size, "uint8").view(kinds[name])
        for name, size in program.workspaces.items()
        if size
    }
    memory = {name: Pointer(array.reshape(-1)) for name, array in {**workspaces, **arrays}.items()}

    def value(param: Any) -> Any:
        if isinstance(param, PointerParam):
            return memory.get(param.tensor)
        return Value(param.value) if isinstance(param, Float32) else param.value

    def run() -> None:
        for step in program.steps:
            module = import_module(step.source.module)
            kernel = getattr(module, step.source.builder)(**dict(step.source.constants))
            kernel(*map(value, step.params), stream=None)

    return run


def judge(variant: str, config: dict[str, Any], axes: dict[str, Any]) -> list[str]:
    """What is wrong after two runs: the second has workspaces as the first left them."""
    (implementation,) = (i for i in moe_route.IMPLEMENTATIONS if i.variant == variant)
    problem, chosen = ENTRY.problem(**axes), Config(config)
    reason = implementation.why_not(chosen, problem, HOST.gpu)
    assert reason is None, reason
    prepared = gate.prepare(ENTRY, problem, HOST)
    run = bind(implementation.program(problem, chosen, HOST.gpu), prepared.arrays)
    return [prepared.verify_run(run, poison=poison).detail for poison in gate.BANDS]


print(json.dumps({name: judge(*case) for name, case in json.load(sys.stdin).items()}))

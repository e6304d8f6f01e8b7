"""A rank on the CPU: ``RANK RANKS FOLDER JOB``, where the folder holds a file for each window.

JOB is a list in JSON of launches: entry, variant (``ll``, ``triton/slots``), axes, configuration.
The rank runs each with the host build of its kernel (`cuda_fibers`), in Triton's interpreter, or
thread by thread (`cute_ranks`),
judges its part of the result, and prints a list of what was wrong. Nothing but the kernels keeps
the ranks together. An axis ``absent`` names a rank that does not launch; with ``repeated`` the last
expert of some tokens is their first one; ``slot_bytes`` replaces the size of the slots, by which
Triton's programs divide tokens into launches.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda_fibers
import numpy as np

from kernelcat import catalog
from kernelcat.catalog.implementation import Config
from kernelcat.jit.interpreter import interpret
from kernelcat.kernels.cuda.common import windows as layout
from kernelcat.ranks import shares
from kernelcat.ranks.group import filled
from kernelcat.ranks.window import ERROR_OFFSET, WINDOW_BYTES
from kernelcat.runtime import gpu

SLOT_BYTES = layout.HALF_BYTES
DEVICE: Any = SimpleNamespace(xp=np, gpu=gpu.find("h200"), synchronize=lambda: None)


MAX_BLOCKS = 512
"""More than any grid has: thread blocks of equal index on all ranks go together."""


def mapped(path: Path) -> tuple[mmap.mmap, int]:
    """The window in the file ``path``, and its address."""
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), WINDOW_BYTES)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def repeated(problem: Any, normal: Any) -> dict[str, Any]:
    """Inputs of an entry in which every third token has an expert twice."""
    inputs: dict[str, Any] = catalog.entry(problem.entry).make_inputs(problem, normal)
    ids = inputs["expert_ids"]
    ids[:, ::3, -1] = ids[:, ::3, 0]
    return inputs


def main() -> None:
    rank, ranks = map(int, sys.argv[1:3])
    launches = json.loads(sys.argv[4])
    is_missing = any("absent" in axes for _, _, axes, _ in launches)
    # A wait of 5 s takes seconds on the CPU where a rank is missing, and else up to a minute.
    layout.TRIES = 3_000 if is_missing else 1_000_000
    os.environ["HOST_SLOWDOWN"] = "1" if is_missing else "10"
    importlib.import_module("kernelcat.kernels.triton.common.device.windows")  # with all slots
    windows = [mapped(Path(sys.argv[3]) / str(each)) for each in range(ranks)]
    wrong = []
    for number, (name, variant, axes, config) in enumerate(launches):
        entry = catalog.entry(name)
        layout.HALF_BYTES = axes.pop("slot_bytes", SLOT_BYTES)
        absent = axes.pop("absent", None)
        if axes.pop("repeated", False):
            entry = replace(entry, make_inputs=repeated)
        if rank == absent:
            continue
        problem = entry.problem(**{"ranks": ranks, "dtype": "bfloat16", **axes})
        language, _, variant = variant.rpartition("/")
        implementation = catalog.implementation(name, language or "cuda", variant)
        reason = implementation.why_not(Config(config), problem, DEVICE.gpu)
        assert reason is None, reason
        program = implementation.program(problem, Config(config), DEVICE.gpu)
        program = filled(program, rank, [address for _, address in windows])
        prepared = shares.prepare(entry, problem, DEVICE, rank, seed=number)
        prepared.reset()
        if language == "cute":
            importlib.import_module("cute_ranks").run(program, prepared.arrays)
        elif language == "triton":
            interpret(program, prepared.arrays)
        else:
            cuda_fibers.run(program, prepared.arrays, MAX_BLOCKS, seed=rank + 1)
        verdict = prepared.judge()
        missing = int.from_bytes(windows[rank][0][ERROR_OFFSET : ERROR_OFFSET + 4], "little")
        if missing:
            wrong.append(f"rank {missing - 1} is missing")
        elif not verdict.passed:
            wrong.append(f"launch {number}: {verdict.detail}")
    print(json.dumps(wrong))


if __name__ == "__main__":
    main()

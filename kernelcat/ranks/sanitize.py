"""NVIDIA's compute-sanitizer over a fuzz run whose ranks are processes, each under the tool."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from kernelcat.errors import KernelcatError, MissingDependency, RankFailed
from kernelcat.ranks import processes
from kernelcat.verify import sanitizer
from kernelcat.verify.sanitizer import SANITIZED_S, Output, Report

LEFT_OUT = {"initcheck": "initcheck takes memory that another process writes for uninitialized"}
"""Tools that cannot judge entries of several ranks, with the reason. NVIDIA's release notes: "The
initcheck tool does not support IPC allocations. Using it will result in false positives.\""""
TOOLS = tuple(tool for tool in sanitizer.SANITIZERS if tool not in LEFT_OUT)
SLOWNESS = 4.0
"""How many times as long as usual ranks wait for each other on the host under a tool."""
EAGER = {"CUDA_MODULE_LOADING": "EAGER"}
"""A tool rewrites kernels when they are loaded: then before the ranks meet, and not at the first
launch, in which the kernels of other ranks wait."""


def sanitize(
    job: Mapping[str, Any], gpus: Sequence[int], tools: Sequence[str] = TOOLS
) -> dict[str, Report]:
    """Run each compute-sanitizer tool over a ``job`` that fuzzes on mirrored arrays.

    The process of every rank runs under a tool of its own; ``gpus`` are the ranks' GPUs. The same
    job without a tool comes first, so that no kernel is compiled under a tool.

    Returns tool -> report: errors of all ranks together.

    Raises
    ------
    MissingDependency
        There is no compute-sanitizer (part of the CUDA toolkit).
    KernelcatError
        As :func:`kernelcat.verify.sanitizer.sanitize`.
    """
    if sanitizer.sanitizer_path() is None:
        raise MissingDependency(sanitizer.MISSING)
    before = "fuzz before the sanitizer"
    try:
        results = processes.run(job, gpus, SANITIZED_S)
    except RankFailed as error:
        raise KernelcatError(f"{before}: {error}") from error
    if results[0]["failure"]:
        raise KernelcatError(f"{before}: {results[0]['failure']}")
    return {tool: run(tool, job, gpus) for tool in tools}


def run(tool: str, job: Mapping[str, Any], gpus: Sequence[int]) -> Report:
    """Run a job with every rank under a tool; raises as :func:`sanitize` does."""
    command, what = sanitizer.tool_command(tool), f"compute-sanitizer --tool {tool}"
    try:
        ended = processes.run_under(command, job, gpus, SANITIZED_S, env={**os.environ, **EAGER})
    except RankFailed as error:
        raise KernelcatError(f"{what}: {error}") from error
    outputs = {f"rank {rank}": Output(each.text, each.code) for rank, each in enumerate(ended)}
    failure = processes.failure(ended) or ended[0].result["value"]["failure"]
    if failure and not any(output.errors for output in outputs.values()):
        raise KernelcatError(f"{what}: {failure}")
    return sanitizer.parse_all(tool, outputs)

"""Baselines: the variant `naive`, the lowest step of an entry's ladder."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.runtime.gpu import Gpu

Estimate = Callable[[Problem, Config, Gpu], float]


def baseline(
    entry: str,
    summary: str,
    program: Callable[[Problem, Config, Gpu], Program],
    estimate: Estimate,
    techniques: Mapping[str, str] | None = None,
    unverified: str | None = None,
) -> Implementation:
    """The baseline of ``entry``: its space has one configuration, which can serve everything."""
    return Implementation(
        entry=entry,
        language="cuda",
        variant="naive",
        summary=summary,
        archs=("sm_80+",),
        space={},
        program=program,
        estimate=estimate,
        techniques=techniques or {},
        rank=0,
        unverified=unverified,
    )


def element_by_element_us(bytes_moved: Callable[[Problem], int]) -> Estimate:
    """The estimate of a baseline that is bound by memory: an eighth of a copy's bandwidth."""
    return lambda problem, config, gpu: LAUNCH_US + 8 * copy_us(bytes_moved(problem), gpu)

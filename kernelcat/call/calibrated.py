"""Predicted times of an entry's portfolio: which configuration is fastest where none was measured.

Cost models estimate; coefficients of the SKU, fitted from measured rows, correct the estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kernelcat import catalog
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.errors import MissingDependency, UnknownName
from kernelcat.runtime.gpu import Gpu
from kernelcat.store.calibration import Calibrated


class Prediction(NamedTuple):
    """A configuration and its predicted time in microseconds."""

    us: float
    language: str
    variant: str
    config: Config


def predictions(
    model: Calibrated, problem: Problem, gpu: Gpu, allows: Callable[[str, str], bool]
) -> list[Prediction]:
    """The portfolio's configurations that are worth a try for ``problem``, the fastest first.

    ``allows`` takes a language and a variant. Left out is what this installation cannot compile,
    and what today's spaces no longer have.
    """
    found = [
        Prediction(us, each.language, each.variant, config)
        for each, config, us in _estimates(model, problem, gpu, allows)
    ]
    return sorted(found, key=lambda p: (p.us, p.language, p.variant, p.config.key))


def _estimates(
    model: Calibrated, problem: Problem, gpu: Gpu, allows: Callable[[str, str], bool]
) -> Iterator[tuple[Implementation, Config, float]]:
    for member in model.portfolio:
        language, variant = member.implementation.split("/")
        if not allows(language, variant):
            continue
        try:
            implementation = catalog.implementation(problem.entry, language, variant)
        except (MissingDependency, UnknownName):
            continue
        if implementation.why_not(member.config, problem, gpu) is None:
            estimate_us = implementation.estimate(problem, member.config, gpu)
            coefficients = model.coefficients[member.implementation]
            yield implementation, member.config, coefficients.predict(estimate_us)

"""Predicted times of an entry's portfolio: which configuration is fastest where none was measured.

Cost models estimate; coefficients of the SKU, fitted from measured rows, correct the estimates.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from kernelcat import catalog
from kernelcat.catalog.implementation import NAIVE, Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.errors import MissingDependency, UnknownName
from kernelcat.runtime.gpu import Gpu
from kernelcat.store.calibration import Calibrated

if TYPE_CHECKING:
    from kernelcat.store import Choice

MATES = 4
"""Rows of the bucket that are compared with the portfolio; the best ones come first."""
MATE_SHARE = 0.25
"""How much of the logarithm of a row's time over the row's own prediction holds for a neighbour: 53
calls that rows of the bucket served differ from such predictions by a standard deviation of 10 %,
by 16 % where all of it holds, by 11 % where nothing does."""
MATE_DOUBT = 1.1
"""By which the scaled time of a row is raised that the model has no coefficients for."""


class Prediction(NamedTuple):
    """A configuration and its predicted time in microseconds.

    ``high_us`` is the time that is compared: the predicted one and its doubt. ``evidence`` is the
    row of the bucket from whose time the prediction follows, or None.
    """

    high_us: float
    us: float
    language: str
    variant: str
    config: Config
    evidence: Choice | None = None

    def __str__(self) -> str:
        return f"{self.us:.4g} us (up to {self.high_us:.4g})"


def predictions(
    model: Calibrated,
    problem: Problem,
    gpu: Gpu,
    allows: Callable[[str, str], bool],
    mates: Iterable[Choice] = (),
) -> list[Prediction]:
    """What the portfolio has for ``problem``, and what is fastest in its bucket; the best first.

    Where the portfolio has naive kernels alone, the defaults of all kernels with coefficients are
    predicted as well: a portfolio is made for sizes that models have, and calls may have any.

    ``allows`` takes a language and a variant. ``mates`` are rows of the bucket: each brings its
    configuration, and says how far the model is off. Left out is what this installation cannot
    compile, what today's spaces no longer have, and what is not worth a prediction.
    """
    found = list(_of_configs(model, model.configs, problem, gpu, allows))
    if all(each.variant == NAIVE for each in found):
        found += _of_defaults(model, problem, gpu, allows)
    found += _of_mates(model, problem, gpu, mates)
    return sorted(found, key=lambda p: (p.high_us, p.language, p.variant, p.config.key))


def _of_defaults(
    model: Calibrated, problem: Problem, gpu: Gpu, allows: Callable[[str, str], bool]
) -> Iterator[Prediction]:
    """The default of each kernel that has coefficients and is not naive."""
    defaults = {}
    for name in model.coefficients:
        language, variant = name.split("/")
        implementation = _find(problem.entry, language, variant, gpu)
        if implementation is not None and variant != NAIVE and allows(language, variant):
            defaults[name] = [implementation.default(problem, gpu)]
    yield from _of_configs(model, defaults, problem, gpu, allows)


def _of_configs(
    model: Calibrated,
    configs_of: Mapping[str, Iterable[Config]],
    problem: Problem,
    gpu: Gpu,
    allows: Callable[[str, str], bool],
) -> Iterator[Prediction]:
    """Predictions of ``configs_of``, language/variant -> configurations."""
    for name, configs in configs_of.items():
        language, variant = name.split("/")
        implementation = _find(problem.entry, language, variant, gpu)
        if implementation is None or not allows(language, variant):
            continue
        coefficients = model.coefficients[name]
        predict, doubt = coefficients.predict, coefficients.doubt(model.caution)
        for config in configs:
            estimate_us = _estimate(implementation, config, problem, gpu)
            if estimate_us is not None:
                us = predict(estimate_us)
                yield Prediction(us * doubt, us, language, variant, config)


def _of_mates(
    model: Calibrated, problem: Problem, gpu: Gpu, mates: Iterable[Choice]
) -> Iterator[Prediction]:
    for mate in itertools.islice(mates, MATES):
        implementation = _find(problem.entry, mate.language, mate.variant, gpu)
        if implementation is None or not mate.median_us:
            continue
        estimate_us = _estimate(implementation, mate.config, problem, gpu)
        estimated_us = _estimate_of_row(mate.language, mate.variant, mate.config, mate.problem, gpu)
        if estimate_us and estimated_us:
            us, doubt = estimate_us * mate.median_us / estimated_us, MATE_DOUBT
            coefficients = model.coefficients.get(f"{mate.language}/{mate.variant}")
            if coefficients is not None:
                predicted_us = coefficients.predict(estimate_us)
                us = predicted_us * (us / predicted_us) ** MATE_SHARE
                doubt = coefficients.doubt(model.caution)
            yield Prediction(us * doubt, us, mate.language, mate.variant, mate.config, mate)


@lru_cache(256)  # each new size asks for those of the rows of its bucket
def _estimate_of_row(
    language: str, variant: str, config: Config, problem: Problem, gpu: Gpu
) -> float | None:
    implementation = _find(problem.entry, language, variant, gpu)
    assert implementation is not None
    return _estimate(implementation, config, problem, gpu)


def _find(entry: str, language: str, variant: str, gpu: Gpu) -> Implementation | None:
    """The implementation, or None where today's catalog or this installation lacks it, or where it
    does not serve GPUs like ``gpu``."""
    try:
        found = catalog.implementation(entry, language, variant)
    except (MissingDependency, UnknownName):
        return None
    return found if found.serves(gpu.arch) else None


def _estimate(
    implementation: Implementation, config: Config, problem: Problem, gpu: Gpu
) -> float | None:
    """The estimate in microseconds, or None where the configuration cannot serve or is not worth an
    estimate. A choice asks for a hundred."""
    if (
        implementation.why_not_in_space(config) is not None
        or implementation.illegal(config, problem, gpu) is not None
        or implementation.unpromising(config, problem, gpu) is not None
    ):
        return None
    return implementation.estimate(problem, config, gpu)

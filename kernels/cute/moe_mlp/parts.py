"""`moe_mlp` as launches of other entries, and what keeps these entries from serving it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kernelcat.catalog.composition import composed, renamed
from kernelcat.catalog.cost_model import LAUNCH_US
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cute import fp8_quantize, moe_route
from kernelcat.reference._moe_parts import (
    ROUTER_NAMES,
    quantization_names,
    quantizations,
    router,
    workspaces,
)
from kernelcat.reference.moe_route import ENTRY as ROUTER
from kernelcat.runtime.gpu import Gpu

Part = tuple[str, Implementation, Problem, Config, Mapping[str, str]]
"""A name, what computes the part, the part's problem and configuration, and names of tensors: in
the part's entry -> in `moe_mlp`."""


def named(entry: tuple[Implementation, ...], variant: str) -> Implementation:
    """An entry's implementation by the name of the variant."""
    return next(each for each in entry if each.variant == variant)


def by_default(
    name: str, implementation: Implementation, problem: Problem, gpu: Gpu, names: Mapping[str, str]
) -> Part:
    """A part in its default configuration."""
    return name, implementation, problem, implementation.default(problem, gpu), names


def routing(problem: Problem, variant: str, gpu: Gpu) -> Part:
    """The selection of experts, and the maps of their rows."""
    implementation = named(moe_route.IMPLEMENTATIONS, variant)
    return by_default("the router", implementation, router(problem), gpu, ROUTER_NAMES)


def quantizing(problem: Problem, variant: str, gpu: Gpu) -> tuple[Part, ...]:
    """The quantization of x and that of h; none for activations in 16 bits."""
    implementation = named(fp8_quantize.IMPLEMENTATIONS, variant)
    return tuple(
        by_default(f"quantizing {name}", implementation, part, gpu, quantization_names(name))
        for part, name in quantizations(problem)
    )


def program(problem: Problem, parts: tuple[Part, ...], gpu: Gpu) -> Program:
    """The launches of all ``parts``."""
    programs = (
        renamed(implementation.program(part, config, gpu), names)
        for _, implementation, part, config, names in parts
    )
    return composed(*programs, workspaces=workspaces(problem))


def why_not(problem: Problem, parts: tuple[Part, ...], gpu: Gpu) -> str | None:
    """Why a part cannot serve, or None."""
    if why := ROUTER.constraint(router(problem)):
        return f"the router: {why}"
    for name, implementation, part, config, _ in parts:
        if why := implementation.why_not(config, part, gpu):
            return f"{name}: {why}"
    return None


def estimate(parts: tuple[Part, ...], gpu: Gpu) -> float:
    """Microseconds of all ``parts``, whose launches overlap by half."""
    return sum(_estimates(parts, gpu)) - LAUNCH_US / 2 * (len(parts) - 1)


def _estimates(parts: tuple[Part, ...], gpu: Gpu) -> Iterator[float]:
    for _, implementation, part, config, _ in parts:
        yield implementation.estimate(part, config, gpu)

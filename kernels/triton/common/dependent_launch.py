"""Programmatic dependent launch: a kernel starts while the kernel before it still runs."""

from collections.abc import Mapping
from dataclasses import replace

from kernelcat.catalog.implementation import ConfigValue, Program, Step
from kernelcat.jit import triton
from kernelcat.runtime.gpu import Gpu


def has_dependent_launch(gpu: Gpu) -> bool:
    """Whether the GPU has programmatic dependent launch: sm_90 and later."""
    return int(gpu.arch.removeprefix("sm_").rstrip("af")) >= 90


def dependent_step(
    gpu: Gpu,
    kernel: str,
    grid: tuple[int, int, int],
    arguments: Mapping[str, triton.Argument],
    constants: Mapping[str, ConfigValue],
    **options: int,
) -> Step:
    """As `triton.step`, with the constant DEPENDENT: True on GPUs with dependent launch.

    Every program of the kernel calls `await_previous` (device/dependent_launch.py).
    """
    is_dependent = has_dependent_launch(gpu)
    constants = {**constants, "DEPENDENT": is_dependent}
    step = triton.step(kernel, grid, arguments, constants, **options)
    return replace(step, programmatic=is_dependent)


def dependent(program: Program) -> Program:
    """``program`` with programmatic launches of those kernels that have a constant DEPENDENT.

    Needs sm_90 or later.
    """
    return replace(program, steps=tuple(map(_with_dependent_launch, program.steps)))


def _with_dependent_launch(step: Step) -> Step:
    source = step.source
    if not isinstance(source, triton.TritonSource) or "DEPENDENT" not in source.constants:
        return step
    constants = {**source.constants, "DEPENDENT": True}
    return replace(step, source=replace(source, constants=constants), programmatic=True)

"""Programs whose kernels start while the kernel before still runs (device/dependent_launch.py)."""

from dataclasses import replace

from kernelcat.catalog.implementation import Program, Step
from kernelcat.jit.triton import TritonSource


def dependent(program: Program) -> Program:
    """``program`` with programmatic launches of those kernels that have a constant DEPENDENT.

    Needs sm_90 or later.
    """
    return replace(program, steps=tuple(map(_dependent_step, program.steps)))


def _dependent_step(step: Step) -> Step:
    source = step.source
    if not isinstance(source, TritonSource) or "DEPENDENT" not in source.constants:
        return step
    constants = {**source.constants, "DEPENDENT": True}
    return replace(step, source=replace(source, constants=constants), programmatic=True)

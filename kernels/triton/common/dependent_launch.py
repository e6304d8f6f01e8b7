"""Programmatic dependent launch: a kernel starts while the kernel before it still runs."""

from collections.abc import Mapping
from dataclasses import replace

from kernelcat.catalog.implementation import ConfigValue, Step
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

"""Programmatic dependent launch: a kernel starts while the kernel before it still runs."""

from __future__ import annotations

from kernelcat.runtime.gpu import Gpu


def has_dependent_launch(gpu: Gpu) -> bool:
    """Whether the GPU can do it: Hopper and later."""
    return int(gpu.arch.strip("sm_af")) >= 90

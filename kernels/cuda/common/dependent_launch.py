"""Programmatic dependent launch in kernels that also serve GPUs without it."""

from __future__ import annotations

from kernelcat.runtime.gpu import Gpu


def has_dependent_launch(gpu: Gpu) -> bool:
    """Whether the GPU has programmatic dependent launch: sm_90 and later."""
    return int(gpu.arch.removeprefix("sm_").rstrip("af")) >= 90

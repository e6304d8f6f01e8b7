"""Programmatic dependent launch: a kernel starts while the kernel before it still runs."""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def await_previous(DEPENDENT: tl.constexpr):
    """Wait for the kernels before this one; then let the next kernel start.

    Only weights may be loaded before, and nothing may be stored. Every program must wait: then a
    kernel that has ended stands for all kernels before it.
    """
    if DEPENDENT:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()

"""Programmatic dependent launch (sm_90+): a kernel starts while the kernel before it still runs.

With DEPENDENT a kernel has a programmatic launch, and calls `start_dependent` before it reads what
an earlier kernel wrote, or writes anything.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def start_dependent(DEPENDENT: tl.constexpr):
    """Waits for the kernels before this one, and lets the programs of the next kernel start.

    The next kernel starts once all programs have called this or ended, and must wait in its turn.
    """
    if DEPENDENT:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()

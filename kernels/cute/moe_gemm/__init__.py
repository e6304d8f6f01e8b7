"""`moe_gemm` in CuTe DSL: Blackwell's tensor cores.

The device code is in modules that import the DSL; they are imported when a kernel is compiled.
"""

from kernelcat.kernels.cute.moe_gemm import block_scaled, tcgen05

IMPLEMENTATIONS = (tcgen05.IMPLEMENTATION, block_scaled.IMPLEMENTATION)

"""`moe_gemm` in CUDA C++: one thread for each element, and Hopper's tensor cores."""

from kernelcat.kernels.cuda.moe_gemm import naive, wgmma

IMPLEMENTATIONS = (naive.IMPLEMENTATION, wgmma.IMPLEMENTATION)

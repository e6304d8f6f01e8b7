"""`moe_gemm` in CUDA C++: a baseline, and Hopper's tensor cores for each form of weights."""

from kernelcat.kernels.cuda.moe_gemm import decoded, naive, wgmma

IMPLEMENTATIONS = (naive.IMPLEMENTATION, wgmma.IMPLEMENTATION, decoded.IMPLEMENTATION)

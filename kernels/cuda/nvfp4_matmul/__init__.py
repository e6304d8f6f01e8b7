"""`nvfp4_matmul` in CUDA C++: one thread an element, weights streamed to registers, and wgmma."""

from kernelcat.kernels.cuda.nvfp4_matmul import mma, naive, wgmma

IMPLEMENTATIONS = (naive.IMPLEMENTATION, mma.IMPLEMENTATION, wgmma.IMPLEMENTATION)

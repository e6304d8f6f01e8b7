"""`nvfp4_matmul` in CUDA C++: one thread an element, and weights streamed to registers."""

from kernelcat.kernels.cuda.nvfp4_matmul import mma, naive

IMPLEMENTATIONS = (naive.IMPLEMENTATION, mma.IMPLEMENTATION)

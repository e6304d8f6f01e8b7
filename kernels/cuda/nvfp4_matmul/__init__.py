"""`nvfp4_matmul` in CUDA C++: one thread an element."""

from kernelcat.kernels.cuda.nvfp4_matmul import naive

IMPLEMENTATIONS = (naive.IMPLEMENTATION,)

"""`flashmla` in CUDA C++: a warp a query and head, mma.sync for few rows and for float8, wgmma."""

from kernelcat.kernels.cuda.flashmla import mma, naive, wgmma

IMPLEMENTATIONS = (naive.IMPLEMENTATION, mma.IMPLEMENTATION, wgmma.IMPLEMENTATION)
